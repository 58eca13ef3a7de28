"""From `[data]` to rows: what is refused, cut, left out, split and blended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.config.data import DataConfig
from paceline.data.build import Datasets
from paceline.data.example_files import RowRequest
from paceline.data.example_sets import build_row_datasets
from paceline.data.tokenizer import load_tokenizer
from paceline.errors import ConfigError, DataError
from tests.data import chat_tokenizers

DEMO = Path(__file__).parent / "llamafactory" / "dataset_info.json"


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def build(
    task: str = "sft", *, seq_len: int = 128, samples: int = 8, batch: int = 4, vocab: int = 300, **options: Any
) -> Datasets:
    config = DataConfig(**{"tokenizer": "byte", "template": "zephyr", **options})
    request = RowRequest(task=task, seq_len=seq_len, seed=1, global_batch_size=batch, vocab_size=vocab)
    return build_row_datasets(config, request, train_samples=samples)


def chat(text: str, answer: str = "yes") -> dict[str, str]:
    return {"instruction": text, "output": answer}


def examples(data: Datasets) -> int:
    return int(data.reports[0].note.partition(" ")[0].replace(",", ""))


def test_bad_rows_are_refused_with_their_places(tmp_path: Path) -> None:
    rows = [chat("a"), chat("b", ""), chat("c"), {"foo": 1}]
    path = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError) as error:
        build(train=path)
    assert error.value.subject == (f"{path}: 2 of 4 rows cannot be used: 1 empty assistant turn, 1 unknown format")
    assert f"{path}:2: empty assistant turn: turn 2 has neither text nor a tool call" in error.value.evidence
    assert f"{path}:4: unknown format: it has 'foo'" in error.value.evidence
    assert "data.bad_rows = 'skip'" in error.value.next_step
    data = build(train=path, bad_rows="skip")
    assert examples(data) == 2
    assert "skipped: 2 of 4 rows cannot be used" in data.reports[0].note
    assert f"{path}:2: empty assistant turn" in str(data.reports[0])
    with pytest.raises(DataError, match="1 of 1 rows"):
        build(train=write(tmp_path / "b.jsonl", [chat("b", "")]), bad_rows="skip")


def test_markers_that_the_tokenizer_lacks_are_a_warning_with_a_next_step(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [chat("a"), chat("b")])
    (told,) = build(train=path, template="gemma").warnings
    assert told.startswith("data.template = 'gemma': <start_of_turn>, <end_of_turn> are no tokens of tokenizer byte")
    assert "Set data.template" in told and "data.tokenizer" in told
    data = build(train=path, template="alpaca")
    assert data.warnings == () and "tokens of" not in data.reports[0].note


def test_only_the_first_bad_rows_are_listed(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        build(train=write(tmp_path / "a.jsonl", [chat("a", "")] * 500 + [chat("a")]))
    assert error.value.evidence.count("\n") == 10
    assert error.value.evidence.endswith("... and 490 more")
    assert "500 of 501 rows" in error.value.subject


@pytest.mark.parametrize(
    ("task", "row", "why"),
    [
        ("dpo", {"prompt": "a", "chosen": "same", "rejected": "same"}, "1 equal answers"),
        ("dpo", chat("a"), "1 record of another task"),
        ("sft", {"prompt": "a", "chosen": "b", "rejected": "c"}, "1 record of another task"),
        ("sft", {"messages": [{"role": "user", "content": "a"}]}, "1 turns out of order"),
    ],
)
def test_what_a_task_cannot_use(tmp_path: Path, task: str, row: dict[str, Any], why: str) -> None:
    with pytest.raises(DataError) as error:
        build(task, train=write(tmp_path / "a.jsonl", [row]))
    assert why in error.value.subject
    assert error.value.next_step


# ---- longer than a row


def test_too_long_is_refused_cut_or_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [chat("a"), chat("b", "x" * 200), chat("y" * 200)])
    with pytest.raises(DataError) as error:
        build(train=path)
    assert "2 of 3 rows cannot be used: 2 longer than a sequence" in error.value.subject
    assert f"{path}:2: longer than a sequence: 227 tokens, train.seq_len = 128" in error.value.evidence
    assert "train.seq_len" in error.value.next_step and "data.too_long" in error.value.next_step
    cut = build(train=path, too_long="truncate")
    assert examples(cut) == 2, "the answer of the third begins beyond the row"
    told = "1 example longer than a sequence cut; 1 example longer than a sequence left out, no answer would be left of"
    assert told in cut.reports[0].note
    dropped = build(train=path, too_long="drop")
    assert examples(dropped) == 1
    assert "2 examples longer than a sequence left out\n" in dropped.reports[0].note
    with pytest.raises(DataError, match=r"no example fits into train\.seq_len = 16"):
        build(train=path, too_long="drop", seq_len=16)


def test_a_pair_is_cut_so_that_both_answers_fit(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "a", "chosen": "x" * 300, "rejected": "no"}] * 2)
    sample = build("dpo", train=path, too_long="truncate").train[0]
    sizes = sample.fields["lengths"]
    assert sizes.tolist()[:3] == [128 - 29, 29, 0]
    path = write(tmp_path / "b.jsonl", [{"prompt": "a", "chosen": "x" * 300, "rejected": "z" * 300}])
    sample = build("dpo", train=path, too_long="truncate").train[0]
    assert sample.fields["lengths"].tolist()[:3] == [64, 64, 0]
    assert [int(((sample.documents == i) & (sample.labels >= 0)).sum()) for i in (0, 1)] == [38, 38]


def test_pairs_that_are_equal_after_the_cut_are_left_out(tmp_path: Path) -> None:
    """Their loss would be log 2 whatever the model says."""
    same = {"prompt": "a", "chosen": "x" * 300 + "yes", "rejected": "x" * 300 + "no"}
    other = {"prompt": "a", "chosen": "yes" + "x" * 300, "rejected": "no" + "x" * 300}
    data = build("dpo", train=write(tmp_path / "a.jsonl", [same, other, same]), too_long="truncate")
    note = data.reports[0].note
    assert "1 example longer than a sequence cut; 2 examples longer than a sequence left out, equal answers" in note
    assert data.reports[0].documents == 2
    with pytest.raises(DataError, match="of 2 the answers are equal after the cut"):
        build("dpo", train=write(tmp_path / "b.jsonl", [same] * 2), too_long="truncate")


@pytest.mark.parametrize("packing", ["pack", "none"])
def test_a_pair_is_cut_to_an_odd_length(tmp_path: Path, packing: str) -> None:
    rows = [{"prompt": "a", "chosen": "x" * 300, "rejected": "z" * count} for count in (300, 74, 73, 38, 2)]
    data = build("dpo", train=write(tmp_path / "a.jsonl", rows), too_long="truncate", seq_len=201, packing=packing)
    lengths = [tuple(data.train[i].fields["lengths"].tolist()[:2]) for i in range(5)]
    assert sorted(lengths) == [(100, 100), (100, 100), (101, 100), (136, 65), (172, 29)]


# ---- sources


def test_a_description_of_llamafactory(tmp_path: Path) -> None:
    data = build(train=f"{DEMO}#alpaca_en_demo", cache_dir=str(tmp_path))
    assert examples(data) == 3
    data = build("kto", train=f"{DEMO}#kto_en_demo", cache_dir=str(tmp_path), valid=f"{DEMO}#kto_en_demo", seq_len=256)
    assert data.valid is not None and len(data.valid) == 2
    both = build(train=[f"{DEMO}#identity", f"{DEMO}#wiki_demo"], cache_dir=str(tmp_path))
    assert examples(both) == 4
    with pytest.raises(DataError, match="not on this disk"):
        build(train=f"{DEMO}#alpaca_en", cache_dir=str(tmp_path))


def test_num_samples_draws(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", [chat(f"{i}") for i in range(10)])
    info = {name: {"file_name": "rows.jsonl", "num_samples": count} for name, count in (("few", 4), ("many", 25))}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    few, many = (build(train=f"{tmp_path}/dataset_info.json#{name}", packing="none", samples=25) for name in info)
    assert (examples(few), examples(many)) == (4, 25)
    counts = np.unique([many.train[i].tokens.tobytes() for i in range(25)], return_counts=True)[1]
    assert sorted(counts.tolist()) == [2] * 5 + [3] * 5


def test_weights_decide_the_share_of_rows(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", [chat("a" * 40, "1" * 40)] * 5)
    b = write(tmp_path / "b.jsonl", [chat("b" * 40, "2" * 40)] * 5)
    data = build(train=[{"path": a, "weight": 3}, {"path": b}], samples=40)
    kinds = [bool((data.train[i].tokens == ord("1")).any()) for i in range(40)]
    assert sum(kinds) in (29, 30, 31)
    assert [report.weight for report in data.reports] == [0.75, 0.25]
    with pytest.raises(ConfigError, match="'buckets' with sources of different weights"):
        build(train=[{"path": a, "weight": 3}, {"path": b}], packing="buckets")


def test_split_cuts_by_example(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [chat(f"{i:03}") for i in range(50)])
    data = build(train=path, split="80,20,0", packing="none", samples=40)
    assert data.valid is not None and data.test is None
    train = {data.train[i].tokens.tobytes() for i in range(40)}
    valid = {data.valid[i].tokens.tobytes() for i in range(len(data.valid))}
    assert (len(train), len(valid)) == (40, 10)
    assert not train & valid


def test_split_holds_out_examples_that_are_drawn_several_times(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", [chat(f"{i:02}") for i in range(12)])
    info = {"many": {"file_name": "rows.jsonl", "num_samples": 40}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    data = build(train=f"{tmp_path}/dataset_info.json#many", split="80,20,0", packing="none", samples=40)
    assert data.valid is not None
    train = [data.train[i].tokens.tobytes() for i in range(40)]
    valid = [data.valid[i].tokens.tobytes() for i in range(len(data.valid))]
    assert not set(train) & set(valid)
    # four contents are drawn 4 times, eight 3 times; the shares are of 40 examples: 32 and 8
    assert (len(set(train)), len(set(valid)), len(valid)) == (9, 3, 9)
    assert sum(report.documents for report in data.reports if report.split in ("train", "valid")) == 40


def test_shares_of_a_split_are_of_examples(tmp_path: Path) -> None:
    """Half of the rows are copies of one: that content is on one side, and the others fill both up to the shares."""
    path = write(tmp_path / "a.jsonl", [chat("same")] * 50 + [chat(f"{i:02}") for i in range(50)])
    data = build(train=path, split="80,15,5", packing="none", samples=80)
    assert [report.documents for report in data.reports] == [80, 15, 5]


@pytest.mark.parametrize("seed", range(3))
def test_what_is_held_out_is_nowhere_trained_on(tmp_path: Path, seed: int) -> None:
    """Rows that come several times, a file that is named twice, and one that repeats rows of another."""
    a = write(tmp_path / "a.jsonl", [chat(f"{i % 20:02}") for i in range(60)])
    b = write(tmp_path / "b.jsonl", [chat(f"{i:02}") for i in range(10, 40)])
    config = DataConfig(
        tokenizer="byte", template="zephyr", packing="none", split="70,20,10", train=[{"path": p} for p in (a, b, a)]
    )
    request = RowRequest(task="sft", seq_len=128, seed=seed)
    data = build_row_datasets(config, request, train_samples=105)
    assert data.valid is not None and data.test is not None
    rows = [
        [part[i].tokens.tobytes() for i in range(report.documents)]
        for part, report in zip((data.train, data.valid, data.test), data.reports, strict=True)
    ]
    assert sum(map(len, rows)) == 150  # none is lost
    assert [len(set(part)) for part in rows] == [28, 8, 4]  # of 40 contents
    train, valid, test = map(set, rows)
    assert not train & valid and not train & test and not valid & test


def test_pairs_and_verdicts_with_the_same_texts_are_on_one_side(tmp_path: Path) -> None:
    judged = [{"prompt": f"{i % 10}", "completion": "yes", "label": i % 3 == 0} for i in range(40)]
    data = build("kto", train=write(tmp_path / "k.jsonl", judged), split="50,50,0", packing="none", samples=20)
    assert data.valid is not None
    # documents of kto: an example, and its prompt with another's answer
    first = [
        {sample.tokens[sample.documents == 0].tobytes() for sample in (part[i] for i in range(20))}
        for part in (data.train, data.valid)
    ]
    assert [len(part) for part in first] == [5, 5] and not first[0] & first[1]


def test_epochs_name_the_steps_that_fit(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [chat(f"{i:03}") for i in range(50)])
    build(train=path, packing="none", epochs=2, samples=100)
    with pytest.raises(ConfigError, match=r"train\.steps asks for 4 epochs, data\.epochs = 2") as error:
        build(train=path, packing="none", epochs=2, samples=200)
    assert error.value.next_step == "Set train.steps = 25."
    build(train=path, packing="none", epochs=0.5, samples=28)
    with pytest.raises(ConfigError, match=r"asks for 0\.64 epochs") as error:
        build(train=path, packing="none", epochs=0.5, samples=32)
    assert error.value.next_step == "Set train.steps = 7: steps are whole, so this reads 0.56 epochs."


def test_epochs_of_a_blend_are_those_of_the_source_that_is_read_most_often(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", [chat(f"a{i}") for i in range(12)])
    b = write(tmp_path / "b.jsonl", [chat(f"b{i}") for i in range(6)])
    options: dict[str, Any] = {"train": [{"path": a}, {"path": b, "weight": 3}], "packing": "none", "batch": 4}
    data = build(**options, epochs=1, samples=8)
    assert [report.epochs for report in data.reports] == [2 / 12, 1.0]
    with pytest.raises(ConfigError) as error:
        build(**options, epochs=1, samples=160)
    assert error.value.subject == f"train.steps asks for 20 epochs of {b}, data.epochs = 1"
    assert (
        "6 sequences" in error.value.evidence and "global_batch_size = 4, 75.0% of them from it" in error.value.evidence
    )
    assert error.value.next_step == "Set train.steps = 2."
    many = [{"path": b, "weight": 1 / (3 * n)} for n in range(1, 5)]
    for epochs in range(1, 30):
        with pytest.raises(ConfigError) as error:
            build(**{**options, "train": many}, epochs=epochs, samples=10_000)
        steps = int(error.value.next_step.split("=")[1].split(":")[0].strip(" ."))
        build(**{**options, "train": many}, epochs=epochs, samples=4 * steps)


def test_identity_is_what_decides_the_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [chat(f"{i:03}") for i in range(20)])
    first = build(train=path).train.identity
    assert build(train=path, samples=99).train.identity == first
    others = [
        build(train=path, packing="none"),
        build(train=path, seq_len=96),
        build(train=path, template="chatml"),
        build(train=path, mask="all"),
        build(train=path, split="90,10,0"),
    ]
    assert len({data.train.identity for data in others} | {first}) == 6


@pytest.mark.parametrize(
    ("train", "task", "reads"),
    [
        ("synthetic", "sft", False),
        ("corpus", "pretrain", False),
        ("corpus", "sft", True),
        ("chat.jsonl", "pretrain", True),
        (["corpus", "dataset_info.json#wiki"], "pretrain", True),
        ([{"path": "corpus"}], "kto", True),
    ],
)
def test_what_is_read_as_rows(train: Any, task: str, reads: bool) -> None:
    assert DataConfig(train=train).reads_rows(task) is reads


# ---- tokenizer and template


def test_the_tokenizer_and_template_of_the_first_weights(tmp_path: Path) -> None:
    folder = chat_tokenizers.write_tokenizer(tmp_path / "model", chat_tokenizers.CHATML)
    path = write(tmp_path / "a.jsonl", [chat("hello", "fox")])
    request = RowRequest(task="sft", seq_len=64, seed=1, init_from=str(folder))
    data = build_row_datasets(DataConfig(train=path), request, train_samples=1)
    assert data.tokenizer_info.name == str(folder / "tokenizer.json")
    sample = data.train[0]
    assert load_tokenizer(folder).decode(sample.labels[sample.labels >= 0]) == "fox<|im_end|>"


def test_tokenizer_and_template(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [chat("a")])
    with pytest.raises(DataError, match="no tokenizer is named"):
        build(train=path, tokenizer="")
    with pytest.raises(DataError, match=r"vocabulary of byte, 257, is larger than model.vocab_size = 100"):
        build(train=path, vocab=100)
    with pytest.raises(DataError, match="the tokenizer byte has no chat template") as error:
        build(train=path, template="")
    assert "chatml" in error.value.next_step
    with pytest.raises(DataError, match="one example is not enough for kto"):
        build("kto", train=write(tmp_path / "b.jsonl", [chat("a") | {"label": True}]))


def test_margins_are_there_for_all_or_none(tmp_path: Path) -> None:
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    path = write(tmp_path / "a.jsonl", [pair | {"margin": 1}, pair])
    with pytest.raises(DataError, match=r"a.jsonl:2: no margin, and 1 other rows have it"):
        build("reward", train=path)


def test_a_folder_is_the_same_data_after_its_tokens_are_kept_in_it(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [chat("a")])
    write(tmp_path / "b.jsonl", [chat("b")])
    first = build(train=str(tmp_path))
    assert (tmp_path / "cache").is_dir()
    assert build(train=str(tmp_path)).train.identity == first.train.identity
