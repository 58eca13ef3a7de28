"""The findings of `explain` connect: whatever has a ``--set`` of a setting that may change becomes a change."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from paceline.config.load import load_recipe
from paceline.explain.cause import Cause
from paceline.tuner.advice import advice_of, changes_in, share_in
from paceline.tuner.neutrality import classes_up_to
from paceline.tuner.settings import TUNABLE
from paceline.tuner.space import Space
from paceline.tuner.trial import Ended, Measurement, Trial
from tests.tuner.simulated import two_h200s

EXPLAIN = Path(__file__).parents[2] / "src" / "paceline" / "explain"
NOT_OF_TRIALS = ("checkpoint.", "data.", "observe.", "model.", "train.eval_", "run.", "cluster.", "optim.")
"""What findings also propose: trials have no checkpoints, data and evaluations, and leave model and training alone."""


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("--set parallel.recompute=selective if memory allows it, or none.", {"parallel.recompute": "selective"}),
        ("--set train.micro_batch_size=4", {"train.micro_batch_size": 4}),
        ("--set parallel.bucket_mb=25: all gradients are in one bucket.", {"parallel.bucket_mb": 25}),
        ("--set train.gc_interval=1000 collects every 1000 steps, on all ranks at once.", {"train.gc_interval": 1000}),
        ("--set parallel.pipeline_layout='[10, 12]'.", {"parallel.pipeline_layout": (10, 12)}),
        (
            "--set parallel.stages_per_rank=2 --set parallel.pipeline_schedule=interleaved_1f1b, or a smaller one.",
            {"parallel.stages_per_rank": 2, "parallel.pipeline_schedule": "interleaved_1f1b"},
        ),
        ("--set checkpoint.interval=20 keeps them under 1 % of the time.", {}),
        ("A smaller parallel.tp: tensor parallelism wants NVLink.", {}),
        ("--set parallel.compile=true.", {"parallel.compile": True}),
    ],
)
def test_changes_in_next_steps(text: str, changes: dict[str, object]) -> None:
    assert changes_in(text) == changes


def test_every_set_that_explain_proposes_is_known_here() -> None:
    """Keys of ``--set`` in the source of `explain`: a trial may change them, or they are listed as not its own."""
    keys: set[str] = set()
    for path in EXPLAIN.glob("*.py"):
        if path.stem in ("megatron_rules", "log_report"):
            continue  # of other programs
        texts = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        for text in texts:
            if isinstance(text, str):
                keys |= set(re.findall(r"--set '?([a-z_]+\.[a-z_.0-9]+)=", text))
    assert len(keys) >= 8, "the source is read"
    assert {key for key in keys if key not in TUNABLE and not key.startswith(NOT_OF_TRIALS)} == set()


def test_shares() -> None:
    assert share_in("25.0 % of the step, 1.33x tokens/s") == 0.25
    assert share_in("223.4 % of the step, 100.00x tokens/s") == 0.5, "no finding is believed to give back more"
    assert share_in("not determined") is None and share_in(None) is None


@pytest.mark.parametrize("share", [0.5, 0.95, 1.091, 40.0])
def test_no_cause_promises_more_than_the_step(share: float) -> None:
    gain = Cause(id="explain.x", subject="", evidence="", next_step="", share=share).finding().gain
    assert gain is not None and float(gain.split(" ")[0]) <= 100
    assert gain.endswith("of the step at most") if share > 0.9 else gain == "50.0 % of the step, 2.00x tokens/s"
    assert share_in(gain) == 0.5


def trial(*findings: dict[str, object]) -> Trial:
    measured = Measurement(seconds_by_step=(1.0,) * 4, peak_bytes=1e9, logged=(), devices="x")
    return Trial(
        number=0, changes={}, outcome="measured", why="", expected=None,
        ended=Ended(seconds=30, measured=measured, findings=findings),
    )  # fmt: skip


def finding(next_step: str, gain: str) -> dict[str, object]:
    return {"id": "explain.x", "severity": "note", "subject": "", "evidence": "", "next_step": next_step, "gain": gain}


def test_advice_becomes_a_point_with_a_price() -> None:
    base = load_recipe("recipes/ladder/naive.toml").config
    space = Space(base=base, machine=two_h200s(), allowed=classes_up_to("chance"))
    found = advice_of(
        space,
        [
            trial(
                finding("--set train.gc_interval=1000 collects every 1000 steps.", "20.0 % of the step, 1.25x"),
                finding("--set parallel.reduce_dtype=bf16 halves the bytes.", "10.0 % of the step, 1.11x"),
                finding("Unset NCCL_DEBUG.", "5.0 % of the step, 1.05x"),
                finding("--set parallel.recompute=full", "not determined"),
            )
        ],
    )
    assert [dict(one.point.changes) for one in found] == [{"train.gc_interval": 1000}], (
        "narrower sums are not allowed, and what has no price is left to the planner"
    )
    assert found[0].log_seconds == pytest.approx(-0.2231, abs=1e-3) and 0.05 < found[0].doubt < 0.5
    assert space.advised["train.gc_interval"] == [1000]
