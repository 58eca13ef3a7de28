"""The recipe's layout beside the best: what can be told apart, and what is said of an advised layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from paceline.config.load import resolve
from paceline.config.run import RunConfig
from paceline.costs.profiles import PACELINE
from paceline.doctor.layout import judge_layout
from paceline.planner.machines import find_gpu, make_cluster
from paceline.planner.rank import Candidate, estimate_config, rank
from paceline.report.finding import Finding

CONFIG = resolve(
    {
        "model": {"preset": "llama3_8b"},
        "train": {"seq_len": 4096, "global_batch_size": 64},
        "parallel": {"zero": 3, "recompute": "selective", "compile": True},
    }
).config
CLUSTER = make_cluster(find_gpu("H200"), 8)[0]
OWN = estimate_config(CONFIG, CLUSTER, PACELINE)
RANKING = rank(CONFIG, CLUSTER, profile=PACELINE)


def other(faster: float, *, tight: bool = False, **parallel: Any) -> Candidate:
    """As the recipe's own layout, but for what is given."""
    config = CONFIG.model_copy(update={"parallel": CONFIG.parallel.model_copy(update=parallel)})
    speed = OWN.estimate.tokens_per_second_per_gpu * (1 + faster)
    return replace(
        OWN, config=config, estimate=replace(OWN.estimate, tokens_per_second_per_gpu=speed, tight=tight, fits=True)
    )


def judged(monkeypatch: pytest.MonkeyPatch, *fitting: Candidate, warned: Sequence[str] = ()) -> Finding:
    def warns(config: RunConfig) -> list[Finding]:
        own = ["known"] if config.parallel.recompute == "selective" else ["known", *warned]
        return [Finding(id="x.y", severity="warning", subject=each, evidence="", next_step="") for each in own]

    monkeypatch.setattr("paceline.doctor.layout.rank", lambda *_, **__: replace(RANKING, fitting=fitting))
    (finding,) = judge_layout(OWN, CONFIG, CLUSTER, PACELINE, warns)
    return finding


def test_below_one_percent_nothing_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = judged(monkeypatch, other(0.009, recompute="none"))
    assert finding.id == "recipe.layout" and "+0.9%; below 1% two cannot be told apart" in finding.evidence


def test_a_few_percent_are_a_note_with_the_layout_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = judged(monkeypatch, other(0.026, recompute="none"))
    assert (finding.id, finding.severity) == ("recipe.better-layout", "note")
    assert "2.6% faster" in finding.subject and "tight" not in finding.subject + finding.evidence
    assert finding.next_step == "--set parallel.recompute=none: try it for a few steps."


def test_a_tight_layout_is_called_tight_beside_one_with_room(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = judged(monkeypatch, other(0.3, tight=True, recompute="none"), other(0.2, tp=2))
    assert finding.severity == "warning" and "30.0% faster, but tight" in finding.subject
    assert "above 80% of a card" in finding.evidence
    assert "--set parallel.recompute=none; or with room (" in finding.next_step
    assert finding.next_step.endswith("+20.0%): --set parallel.tp=2.")


def test_of_two_that_are_as_fast_the_one_with_room_is_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = judged(monkeypatch, other(0.3, tight=True, recompute="none"), other(0.295, tp=2))
    assert "29.5% faster" in finding.subject and "tight" not in finding.subject + finding.evidence
    assert finding.next_step == "--set parallel.tp=2."


def test_what_would_be_warned_of_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = judged(monkeypatch, other(0.2, recompute="none"), warned=["tp crosses a slow link"])
    assert finding.evidence.endswith("This command would warn of it: tp crosses a slow link.")
    assert "known" not in finding.evidence


def test_ranks_that_are_left_are_not_spelt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "dp_shard" not in judged(monkeypatch, other(0.2, recompute="none", dp_shard=8)).next_step
