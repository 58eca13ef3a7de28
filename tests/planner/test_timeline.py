"""A timeline takes as long as predicted, and a slow part costs what it must."""

from __future__ import annotations

from itertools import pairwise

import pytest

from paceline.config.load import resolve
from paceline.config.run import RunConfig
from paceline.costs.step import StepEstimate
from paceline.errors import ConfigError
from paceline.planner.machines import find_gpu, make_cluster
from paceline.planner.rank import estimate_config
from paceline.planner.timeline import Slow, perfetto, slow_parts, timeline


def estimated(**parallel: object) -> tuple[RunConfig, StepEstimate]:
    tables = {
        "model": {"preset": "llama2_7b"},
        "train": {"seq_len": 2048, "global_batch_size": 64},
        "parallel": {"pp": 4, **parallel},
    }
    config = resolve(tables).config
    cluster, _ = make_cluster(find_gpu("A100-80"), 8)
    return config, estimate_config(config, cluster).estimate


SCHEDULES = [
    {},
    {"pipeline_schedule": "interleaved_1f1b", "stages_per_rank": 2},
    {"pipeline_schedule": "zero_bubble"},
    {"pipeline_schedule": "zbv", "stages_per_rank": 2},
    {"pp": 1},
]


@pytest.mark.parametrize("parallel", SCHEDULES)
def test_the_timeline_takes_as_long_as_predicted(parallel: dict[str, object]) -> None:
    config, estimate = estimated(**parallel)
    found = timeline(config, estimate)
    assert found.seconds == pytest.approx(estimate.seconds, rel=1e-3)
    assert len(found.busy) == config.parallel.pp
    for rank in range(config.parallel.pp):  # no two things at a time
        spans = sorted((span for span in found.spans if span.rank == rank), key=lambda span: span.start)
        assert all(a.start + a.seconds <= b.start + 1e-9 for a, b in pairwise(spans))


def test_split_backward_passes_idle_as_little_as_published() -> None:
    """(p - 1)(F + I - W) beside (p - 1)(F + I + W) of 1F1B: a third if all three are equal (arXiv:2401.10241, table 1),
    somewhat more here, since attention has no part in W. The same in the prediction and on its timeline."""
    shares = {}
    for name in ("1f1b", "zero_bubble"):
        config, estimate = estimated(pipeline_schedule=name)
        found = timeline(config, estimate)
        tail = sum(estimate.parts[part] for part in ("dp_communication", "optimizer", "offload", "overhead"))
        on_timeline = 1 - max(found.busy) / (found.seconds - tail)  # of the slowest position
        shares[name] = estimate.bubble
        assert on_timeline == pytest.approx(estimate.bubble, abs=0.03)
    assert 1 / 3 < shares["zero_bubble"] / shares["1f1b"] < 0.5


def test_a_slow_rank_slows_its_position_and_all_wait() -> None:
    config, estimate = estimated()
    slow, told = slow_parts(config, 8, ["2:1.5"], [])
    assert slow.positions == {1: 1.5}  # two ranks a position
    assert "position 1" in told[0]
    plain, found = timeline(config, estimate), timeline(config, estimate, slow)
    assert found.busy[1] == pytest.approx(1.5 * plain.busy[1], rel=1e-6)
    assert found.busy[2] == pytest.approx(plain.busy[2], rel=1e-6)
    gain = found.seconds - plain.seconds
    # less than all of it: the last position, with the head, was the slowest
    assert 0.3 * plain.busy[1] < gain <= 0.5 * plain.busy[1] + 1e-9


def test_slow_links_belong_to_an_axis() -> None:
    config, estimate = estimated(tp=2)
    slow, _ = slow_parts(config, 8, [], ["0-1:4"])
    assert slow.axes == {"tp": 4.0}
    assert timeline(config, estimate, slow).seconds >= timeline(config, estimate).seconds
    slow, _ = slow_parts(config, 8, [], ["0-2:10"])
    assert slow.hops == {(0, 1): 10.0}
    with pytest.raises(ConfigError, match="never talk"):
        slow_parts(config, 8, [], ["0-3:2"])


@pytest.mark.parametrize("text", ["9:1.2", "1:0.5", "1", "a:2", "1-2:2"])
def test_ranks_that_there_are_not_are_told(text: str) -> None:
    config, _ = estimated()
    with pytest.raises(ConfigError, match="--slow-rank"):
        slow_parts(config, 8, [text], [])


def test_the_trace_holds_every_span() -> None:
    config, estimate = estimated()
    found = timeline(config, estimate, Slow())
    events = perfetto(found, "x")["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(found.spans)
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(1e6 * found.seconds, rel=1e-6)
    assert {event["pid"] for event in events} == set(range(4))


def test_a_dense_model_has_no_groups_of_experts() -> None:
    """Ranks 0 and 9 of tp 8: other tensor groups, and other places in them."""
    config = resolve(
        {"model": {"preset": "llama3_8b"}, "parallel": {"tp": 8}, "train": {"global_batch_size": 64}}
    ).config
    with pytest.raises(ConfigError, match="never talk to each other"):
        slow_parts(config, 64, (), ("0-9:3",))
    _, told = slow_parts(config, 64, (), ("0-8:3",))
    assert "in a group of dp," in told[0]
