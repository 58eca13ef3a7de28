"""Four cards of 24 GB and a 7B model: what does not fit and why, what does, with the limit that was passed."""

from __future__ import annotations

from functools import lru_cache

from paceline.config.load import resolve
from paceline.costs.profiles import PACELINE
from paceline.costs.step import fits, room_of
from paceline.costs.workload import Cluster
from paceline.planner.layout_text import layout_text
from paceline.planner.machines import find_gpu, make_cluster
from paceline.planner.rank import Ranking, rank
from paceline.planner.reasons import Reasons, reasons


@lru_cache(maxsize=1)
def four_cards() -> tuple[Cluster, Ranking, Reasons]:
    config = resolve({"model": {"preset": "llama2_7b"}, "train": {"seq_len": 4096, "global_batch_size": 128}}).config
    cluster, _ = make_cluster(find_gpu("RTX 4090"), 4)
    ranking = rank(config, cluster)
    return cluster, ranking, reasons(ranking, cluster)


def test_the_answer_says_what_does_not_fit_and_what_does() -> None:
    cluster, ranking, why = four_cards()
    needed, lightest, *ways = why.answer
    # 6.74B times 16 bytes; four times what the driver leaves of 24 GiB
    assert "AdamW" in needed and "16 bytes" in needed and "100.41 GiB" in needed and "94.56 GiB" in needed
    assert ranking.least_on_cards is not None and not fits(ranking.least_on_cards, cluster, PACELINE)
    assert "more than the 21.28 GiB of 23.64 GiB that a layout may fill" in lightest
    assert "host memory" in ways[0] and f"{ranking.fitting[0].estimate.memory_gib:.1f} GiB" in ways[0]
    assert "optim.name=adamw8bit" in ways[1]


def test_the_limit_is_the_one_that_decides() -> None:
    cluster, _, why = four_cards()
    room = room_of(cluster, PACELINE)
    assert fits(room, cluster, PACELINE) and not fits(room + 1, cluster, PACELINE)
    too_large = [sentence for sentence in why.rejected if "on the fullest card" in sentence]
    assert too_large and all("that a layout may fill" in sentence for sentence in too_large)


def test_eight_bit_moments_are_marked_and_say_what_they_need() -> None:
    _, _, why = four_cards()
    note = next(found for found in why.helps if found.id == "planner.eight-bit")
    assert "! (tight)" in note.subject
    assert "pip install -c constraints.txt -e '.[lowbit]'" in note.next_step


def test_the_price_of_other_kinds_of_parallelism_is_told() -> None:
    _, _, why = four_cards()
    assert any(sentence.startswith("tp ") and "tensor-parallel communication" in sentence for sentence in why.others)
    assert any(sentence.startswith("cp ") for sentence in why.others)
    assert any(sentence.startswith("Sharded gradients and parameters") for sentence in why.rejected)


def test_nothing_is_answered_where_the_state_stays_on_the_cards() -> None:
    config = resolve({"model": {"preset": "llama3_1b"}, "train": {"seq_len": 2048, "global_batch_size": 64}}).config
    cluster, _ = make_cluster(find_gpu("H100"), 8)
    ranking = rank(config, cluster, keep=4, probe=20)
    assert ranking.fitting and ranking.least_on_cards is None
    assert reasons(ranking, cluster).answer == ()


def test_where_nothing_fits_the_answer_says_how_far_off_it_is() -> None:
    config = resolve({"model": {"preset": "llama2_70b"}, "train": {"seq_len": 4096, "global_batch_size": 128}}).config
    cluster, _ = make_cluster(find_gpu("RTX 4090"), 4)
    ranking = rank(config, cluster)
    assert not ranking.fitting
    needed, lightest = reasons(ranking, cluster).answer
    assert "not with the optimizer's state in host memory either" in needed and "69.0B parameters" in needed
    assert "more than the 21.28 GiB" in lightest


def test_where_all_weights_do_not_fit_adapters_are_named_for_fine_tuning() -> None:
    _, _, why = four_cards()
    note = next(found for found in why.helps if found.id == "planner.adapters")
    assert note.subject.startswith("fine-tuning only: LoRA of rank 16 fits: ")
    assert note.next_step == "--set lora.rank=16"


def test_where_adapters_do_not_fit_4_bits_are_named() -> None:
    lora = {"rank": 8}
    train = {"seq_len": 2048, "global_batch_size": 64}
    config = resolve({"model": {"preset": "llama2_13b"}, "train": train, "lora": lora}).config
    cluster, _ = make_cluster(find_gpu("RTX 4090"), 1)
    why = reasons(rank(config, cluster), cluster)
    # 13.0B in bf16
    assert "frozen parameters take 2 bytes each" in why.answer[0] and "host memory" not in why.answer[0]
    note = next(found for found in why.helps if found.id == "planner.adapters")
    assert "QLoRA of rank 8 fits" in note.subject
    assert note.next_step == "--set lora.rank=8 --set lora.base=nf4"


def test_where_bf16_sums_are_what_does_not_fit_fp32_sums_are_named() -> None:
    """A pipeline alone: nobody shares the fp32 copy that bf16 sums are updated from."""
    tables = {
        "model": {"preset": "llama2_7b"},
        "train": {"seq_len": 4096, "global_batch_size": 128},
        "optim": {"name": "adamw8bit"},
    }
    cluster, _ = make_cluster(find_gpu("RTX 4090"), 4)
    ranking = rank(resolve({**tables, "parallel": {"accumulate_dtype": "bf16"}}).config, cluster)
    assert not ranking.fitting
    why = reasons(ranking, cluster)
    note = next(found for found in why.helps if found.id == "planner.fp32-sums")
    assert note.next_step == "--set parallel.accumulate_dtype=fp32"
    # and so it is, asked with that
    best = rank(resolve(tables).config, cluster).fitting[0]
    assert layout_text(best.config) in note.subject and f"{best.estimate.memory_gib:.1f} GiB" in why.answer[-1]
    assert why.answer[-1].startswith("What fits: gradients summed in fp32")


def test_where_a_change_frees_memory_layouts_are_ranked_again() -> None:
    """What is told is what the planner answers when it is asked with the change."""
    tables = {"model": {"preset": "llama3_8b"}, "train": {"seq_len": 8192, "global_batch_size": 128}}
    cluster, _ = make_cluster(find_gpu("H100-80"), 8)
    ranking = rank(resolve(tables).config, cluster)
    before = ranking.fitting[0]
    note = next(found for found in reasons(ranking, cluster).helps if "gradients summed in bf16" in found.subject)
    after = rank(resolve({**tables, "parallel": {"accumulate_dtype": "bf16"}}).config, cluster).fitting[0]
    gain = before.estimate.seconds / after.estimate.seconds - 1
    assert layout_text(after.config, than=before.config), "it is another layout"
    assert f"and then another layout: {gain:+.1%} tokens/s" in note.subject
    assert layout_text(after.config, than=before.config) in note.evidence and "In the same layout" in note.evidence
