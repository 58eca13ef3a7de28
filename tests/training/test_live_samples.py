"""What a model says at evaluations, and that its training does not notice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.config.load import resolve
from paceline.training.live_samples import row_length
from tests.distributed import run as run_ranks
from tests.training import runs

ASKED = (
    'observe.sample_prompts=["abcd", "m"]',
    "observe.sample_tokens=5",
    "observe.sample_interval=1",
    "train.eval_interval=2",
    "train.eval_steps=1",
    "model.vocab_size=300",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("data")
    return f"data.valid={runs.write_text(folder / 'valid', documents=9, seed=1)}", runs.write_text(folder / "train")


def said(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def log_of(folder: Path) -> str:
    return "".join(path.read_text() for path in (folder / "logs").iterdir())


def test_training_goes_on_as_if_nobody_had_asked(data: tuple[str, str], tmp_path: Path) -> None:
    """With dropout: a draw from the generators of the training would be seen. Every bit of every loss."""
    valid, train = data
    more = (valid, *ASKED, "model.dropout=0.1", "checkpoint.interval=0")
    found = [
        runs.alone(runs.tiny(tmp_path / str(interval), train, *more, f"observe.sample_interval={interval}", steps=6))
        for interval in (1, 0)
    ]
    with_them, without = ([(record.loss, record.grad_norm) for record in records] for records in found)
    assert with_them == without
    assert len(said(tmp_path / "1")) == 6 and not (tmp_path / "0" / "samples.jsonl").exists()
    assert "step 2: 'abcd' goes on" in log_of(tmp_path / "1")


def test_drawn_as_at_the_end_and_at_every_second_evaluation(data: tuple[str, str], tmp_path: Path) -> None:
    """By the same seeds as from the checkpoint of the same step, which `summary.json` holds."""
    valid, train = data
    runs.alone(runs.tiny(tmp_path / "run", train, valid, *ASKED, "observe.sample_interval=2", steps=8))
    found = said(tmp_path / "run")
    assert [(each["step"], each["prompt"]) for each in found] == [(4, "abcd"), (4, "m"), (8, "abcd"), (8, "m")]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [[each["prompt"], each["text"]] for each in found[2:]] == summary["samples"]


def test_a_resumed_run_says_each_thing_once(data: tuple[str, str], tmp_path: Path) -> None:
    valid, train = data
    wanted = runs.tiny(tmp_path / "run", train, valid, *ASKED, steps=8)
    runs.alone(wanted, stop_after=5)
    last = tmp_path / "run" / "checkpoints" / "step_00000005"
    last.rename(tmp_path / "away")
    runs.alone(wanted)
    runs.alone(runs.tiny(tmp_path / "whole", train, valid, *ASKED, steps=8))
    assert said(tmp_path / "run") == said(tmp_path / "whole")
    assert [each["step"] for each in said(tmp_path / "run")] == [2, 2, 4, 4, 6, 6, 8, 8]


def test_turns_are_asked_in_the_template_and_answers_end(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]
    rows.write_text((json.dumps({"messages": turns}) + "\n") * 8)
    wanted = ("task.kind=sft", "data.tokenizer=byte", "data.template=alpaca", "model.vocab_size=300")
    sizes = ("model.max_seq_len=256", "train.seq_len=128", "train.global_batch_size=1", "optim.lr=0.03")
    asked = ('observe.sample_prompts=["Hi"]', "observe.sample_tokens=8", "observe.sample_temperature=0")
    when = ("observe.sample_interval=1", "train.eval_interval=40", f"data.valid={rows}")
    runs.alone(runs.tiny(tmp_path / "run", str(rows), *wanted, *sizes, *asked, *when, steps=40))
    assert said(tmp_path / "run") == [{"step": 40, "prompt": "Hi", "text": "Yes."}]


def test_adapters_say_what_they_say_when_merged(data: tuple[str, str], tmp_path: Path) -> None:
    valid, train = data
    runs.alone(runs.tiny(tmp_path / "base", train, "model.vocab_size=300", steps=3))
    more = ("lora.rank=4", f"model.init_from={tmp_path / 'base'}", "observe.sample_temperature=0")
    runs.alone(runs.tiny(tmp_path / "run", train, valid, *ASKED, *more, steps=6))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [[each["prompt"], each["text"]] for each in said(tmp_path / "run")[-2:]] == summary["samples"]


def _one_after_the_other(rank: int, world_size: int, recipes: list[list[str]]) -> None:
    for overrides in recipes:
        runs.run(rank, world_size, overrides)


def test_experts_of_other_ranks_and_later_stages_are_asked_too(data: tuple[str, str], tmp_path: Path) -> None:
    """Dense layouts: `test_layout_runs.py`."""
    valid, train = data
    model = ("model.num_experts=4", "model.top_k=2", "model.mtp_layers=1", "observe.sample_temperature=0")

    def recipe(name: str, *more: str) -> list[str]:
        return runs.tiny(tmp_path / name, train, valid, *ASKED, *model, "checkpoint.interval=0", *more, steps=4)

    layouts = {"ep": ("parallel.ep=2",), "fsdp": ("parallel.ep=2", "parallel.zero=3"), "pp": ("parallel.pp=2",)}
    runs.alone(recipe("alone"))
    run_ranks(_one_after_the_other, 2, [recipe(name, *more) for name, more in layouts.items()])
    for name in layouts:
        assert said(tmp_path / name) == said(tmp_path / "alone"), name


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ((f'observe.sample_prompts=["{"a" * 40}"]',), "a prompt has 40 tokens, and a row of this layout at most 32"),
        (
            ("model.num_experts=2", "model.top_k=1", "model.moe.capacity_factor=2.0"),
            "experts drop tokens beyond their capacity",
        ),
    ],
)
def test_where_there_can_be_none_the_log_says_why(
    more: tuple[str, ...], why: str, data: tuple[str, str], tmp_path: Path
) -> None:
    valid, train = data
    runs.alone(runs.tiny(tmp_path / "run", train, valid, *ASKED, *more, steps=2))
    assert f"no samples at evaluations: {why}" in log_of(tmp_path / "run")
    assert not (tmp_path / "run" / "samples.jsonl").exists()


def test_a_row_has_room_in_a_length_that_a_layout_can_cut(tmp_path: Path) -> None:
    def length(*more: str) -> int:
        return row_length(resolve({}, runs.tiny(tmp_path, "x", *more)).config, [[1] * 7, [1]], 6)

    assert (length(), length("parallel.tp=2"), length("parallel.tp=2", "parallel.cp=2")) == (13, 14, 16)
    assert length("model.max_seq_len=10") == 10
    assert length("model.max_seq_len=15", "parallel.tp=2") == 14


def test_tensorboard_shows_them(data: tuple[str, str], tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    valid, train = data
    runs.alone(runs.tiny(tmp_path / "run", train, valid, *ASKED, "observe.tensorboard=true", steps=2))
    shown = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    for number, each in enumerate(said(tmp_path / "run"), start=1):
        (found,) = shown.Tensors(f"samples/{number}/text_summary")
        text = found.tensor_proto.string_val[0].decode()
        assert found.step == 2 and text.replace("\n    ", "\n") == f"    {each['prompt']}{each['text']}"
