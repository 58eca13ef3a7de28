"""The loop: rates that are true, dropout that differs where it should, and runs that repeat themselves."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from distributed import run as on_ranks
from paceline.config.load import resolve
from paceline.costs.adapters import step_flops_per_token
from paceline.costs.layers import token_flops
from paceline.data.build import build_datasets
from paceline.data.loader import Loader
from paceline.observe.hooks import Hook, StepEnd
from paceline.runtime.process import ProcessInfo
from paceline.runtime.seed import rng_state
from paceline.runtime.signals import StopRequest
from paceline.training.run import run_in_group
from paceline.training.setup import build_parts
from tests.training import runs
from tests.training.steps import Job, config_of, global_batch


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return runs.write_dataset(tmp_path_factory.mktemp("data") / "corpus")


class Watch(Hook):
    """The time of every step's end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, end: StepEnd) -> None:
        self.ends.append(time.perf_counter())


def _timed(rank: int, world_size: int, recipes: Sequence[Sequence[str]]) -> list[tuple[float, float]]:
    """Tokens per second by the clock and by the records."""
    found = []
    for overrides in recipes:
        recipe = resolve({}, list(overrides))
        watch = Watch()
        recipe.registry.hook(lambda config, watch=watch: watch)
        info = ProcessInfo(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size)
        run_in_group(recipe, info, torch.device("cpu"), StopRequest())
        train = recipe.config.train
        records = runs.read_metrics(Path(recipe.config.run.folder))
        tokens = train.global_batch_size * train.seq_len
        by_clock = tokens * (len(watch.ends) - 1) / (watch.ends[-1] - watch.ends[0])
        seconds = sum(tokens / record.tokens_per_second_per_gpu / world_size for record in records[1:])
        found.append((by_clock, tokens * (len(records) - 1) / seconds))
    return found


def test_tokens_per_second_are_tokens_over_time_whatever_the_accumulation(data: str, tmp_path: Path) -> None:
    """Case 16. The two clocks stop at slightly different moments: 10 %, where a wrong factor would be 2 or 4."""
    recipes = [
        runs.tiny(
            tmp_path / str(micro),
            data,
            f"train.micro_batch_size={micro}",
            "train.global_batch_size=8",
            "checkpoint.interval=0",
            "train.seq_len=32",
            steps=12,
        )
        for micro in (4, 2, 1)
    ]
    for by_clock, by_records in on_ranks(_timed, 2, recipes)[0]:
        assert by_records == pytest.approx(by_clock, rel=0.1)


# ---- case 72: dropout


ADAPTERS = ("lora.rank=4", "lora.dropout=0.3")


def _local_losses(rank: int, world_size: int, sets: Sequence[str]) -> list[float]:
    """Losses of this rank on micro-batches that are the same on all ranks and all the same, in steps 1, 2 and 1."""
    config = config_of(Job(sets=(*sets, "optim.lr=1e-12"), micro=2))
    info = ProcessInfo(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size)
    parts = build_parts(config, resolve({}).registry, info, torch.device("cpu"))
    for name, value in parts.engine.weights().items():
        for piece in value.pieces if name.endswith("lora_b") else ():
            piece.tensor.fill_(0.1)  # zero as it begins: nothing would be seen of the adapters
    parts.engine.publish_weights()
    parts.step.train()
    batch = global_batch(1, "none")
    losses: list[float] = []
    for number in (1, 2, 1):
        count = config.train.global_batch_size // (2 * world_size)
        losses += [float(loss) for loss in parts.step.rerun(number, [batch] * count)]
        parts.engine.zero_gradients()
    return losses


@pytest.mark.parametrize("sets", [("model.dropout=0.3",), ADAPTERS], ids=["model", "adapters"])
def test_dropout_differs_over_ranks_micro_batches_and_steps(sets: Sequence[str]) -> None:
    """And a step that runs again drops the same: masks go by position, not by what was drawn before."""
    found = on_ranks(_local_losses, 2, sets)
    dropped = [loss for losses in found for loss in losses[:4]]
    assert len(dropped) == 8 and len(set(dropped)) == 8
    assert all(losses[4:] == losses[:2] for losses in found)


def test_without_dropout_nothing_differs() -> None:
    found = on_ranks(_local_losses, 2, ("model.dropout=0.0",))
    assert len({loss for losses in found for loss in losses}) == 1


def _runs(rank: int, world_size: int, recipes: Sequence[tuple[Sequence[str], int]]) -> list[dict[int, float | None]]:
    return [runs.losses(runs.run(rank, world_size, recipe, stop)) for recipe, stop in recipes]


def test_a_resumed_run_draws_the_same_dropout(data: str, tmp_path: Path) -> None:
    """Bit-equal losses, for a dense and an expert model, also with recomputation switched on at the resume."""
    shapes = {
        "dense": ("model.dropout=0.2", "model.attention_dropout=0.1"),
        "experts": (
            "model.dropout=0.1",
            "model.num_experts=4",
            "model.top_k=1",
            "model.moe.capacity_factor=1.25",
            "model.moe.jitter=0.05",
            "model.moe.expert_dropout=0.2",
            "model.moe.aux_loss_coef=0.01",
        ),
        "biased": ("model.num_experts=4", "model.top_k=2", "model.moe.bias_balance=true", "model.moe.score=sigmoid"),
        "two tokens": ("model.mtp_layers=1", "model.dropout=0.1"),
        "adapters": (*ADAPTERS, "optim.lr=0.05"),
    }
    jobs: list[tuple[Sequence[str], int]] = []
    for name, sets in shapes.items():
        jobs.append((runs.tiny(tmp_path / name, data, *sets), 0))
        again = runs.tiny(tmp_path / f"{name} again", data, *sets)
        jobs += [(again, 5), ([*again, "parallel.recompute=full"], 0)]
    found = on_ranks(_runs, 2, jobs)[0]
    for index, name in enumerate(shapes):
        straight, stopped, resumed = found[3 * index : 3 * index + 3]
        assert list(stopped) == [1, 2, 3, 4, 5]
        assert resumed == straight, name
        first, last = straight[1], straight[8]
        assert first is not None and last is not None and last < first


def test_adapters_drop_alike_however_state_is_spread(data: str, tmp_path: Path) -> None:
    """Masks go by position: sharding what learns, on the same ranks, moves losses by the order of sums alone."""
    sets = (*ADAPTERS, "optim.lr=0.05")
    layouts = ("parallel.zero=0", "parallel.zero=1", "parallel.zero=3")
    jobs = [(runs.tiny(tmp_path / layout, data, *sets, layout, steps=4), 0) for layout in layouts]
    whole, *others = on_ranks(_runs, 2, [*jobs, (runs.tiny(tmp_path / "none", data, *sets[::2], steps=4), 0)])[0]
    assert others[:2] == [pytest.approx(whole, abs=1e-5)] * 2
    undropped = others[2][4]
    assert undropped is not None and whole[4] is not None and abs(undropped - whole[4]) > 1e-4, "dropout does something"


def test_opening_data_does_not_move_the_global_generators(data: str) -> None:
    before = rng_state(torch.device("cpu"))
    config = resolve({}, [f"data.train={data}"]).config.data
    built = build_datasets(config, seq_len=16, vocab_size=runs.VOCAB, seed=3, train_samples=64)
    with Loader(built.train, micro_batch_size=2, global_batch_size=4, dp_rank=1, dp_size=2, num_workers=2) as loader:
        batches: Iterator[object] = iter(loader)
        assert next(batches) is not None and next(batches) is not None
    after = rng_state(torch.device("cpu"))
    assert all(torch.equal(before[name], after[name]) or before[name].isnan().all() for name in before)


def _twice_deterministic(rank: int, world_size: int, recipes: Sequence[Sequence[str]]) -> list[dict[int, float | None]]:
    torch.use_deterministic_algorithms(True)  # what `run.deterministic` does before the process group is made
    try:
        return [runs.losses(runs.run(rank, world_size, recipe)) for recipe in recipes]
    finally:
        torch.use_deterministic_algorithms(False)


def test_deterministic_runs_are_bit_equal(data: str, tmp_path: Path) -> None:
    """No operation of a step, dense or with experts, refuses the mode."""
    recipes = [
        runs.tiny(tmp_path / f"{kind}{number}", data, "run.deterministic=true", *sets)
        for kind, sets in (
            ("dense", ("model.dropout=0.1",)),
            ("experts", ("model.num_experts=4", "model.top_k=2", "model.moe.aux_loss_coef=0.1")),
        )
        for number in (1, 2)
    ]
    dense, dense_again, experts, experts_again = on_ranks(_twice_deterministic, 2, recipes)[0]
    assert dense == dense_again and experts == experts_again


def test_flops_of_packed_rows_are_those_of_their_documents(tmp_path: Path) -> None:
    """By hand: sequences that hold 4 documents of 9 tokens, and sequences that hold one."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"input_ids": [1] * 9, "labels": [1] * 9}) + "\n" for _ in range(32)))
    wanted = [
        "task.kind=sft",
        "data.tokenizer=byte",
        "model.vocab_size=300",
        "model.max_seq_len=40",
        "train.seq_len=40",
    ]
    found = {}
    for packing in ("pack", "none"):
        options = runs.tiny(tmp_path / packing, str(rows), *wanted, f"data.packing={packing}", steps=1)
        (record,) = runs.alone(options)
        config = resolve({}, options).config
        flops = step_flops_per_token(config)  # as if all of a sequence were seen
        scores = 3 * token_flops(config.model, 40).scores
        documents = {"pack": 4, "none": 1}[packing]
        expected = flops - scores + documents * 9 / 40 * 3 * token_flops(config.model, 9).scores
        assert record.tflops_per_gpu is not None and record.flops_convention == "causal within documents"
        assert record.tflops_per_gpu * 1e12 / record.tokens_per_second_per_gpu == pytest.approx(expected)
        found[packing] = expected
        told = json.loads((tmp_path / packing / "summary.json").read_text())
        assert told["flops_convention"] == record.flops_convention and told["flops_per_token"] == pytest.approx(
            expected
        )
    assert found["none"] < found["pack"]
