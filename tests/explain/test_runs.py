"""Run folders, real and simulated: what is wrong is named first, what it costs is right, what is whole is left
alone."""

from __future__ import annotations

import gzip
import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from paceline.errors import ConfigError
from paceline.explain.rules import Diagnosis, diagnose
from paceline.explain.run_folder import read_run
from paceline.explain.run_report import dimensions, run_explanation
from paceline.explain.waterfall import own_parts
from paceline.observe.capture_request import CaptureRequest, trace_path, write_request
from paceline.observe.phases import PHASES
from paceline.observe.telemetry.columns import COLUMNS
from paceline.observe.telemetry.record import FOLDER
from tests.distributed import run as run_ranks
from tests.training import runs

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from synthetic_run import Cluster, truth, write


def told(cluster: Cluster, folder: Path) -> Diagnosis:
    return diagnose(read_run(write(cluster, folder / "run")))


def share_of(found: Diagnosis) -> float:
    """Of the first finding, from its gain."""
    gain = found.findings[0].gain
    assert gain is not None
    return float(gain.split()[0]) / 100


# ---- simulated runs


@pytest.mark.parametrize("shape", [{}, {"dp": 4, "tp": 2}, {"dp": 2, "pp": 2}, {"dp": 1}])
def test_a_healthy_run_has_no_warning_and_its_waterfall_adds_up(shape: dict[str, int], tmp_path: Path) -> None:
    found = told(Cluster(**shape), tmp_path)
    assert [finding for finding in found.findings if finding.severity != "note"] == []
    waterfall = found.waterfall
    assert waterfall is not None and waterfall.estimate is not None
    assert sum(part.seconds for part in waterfall.parts) == pytest.approx(waterfall.step_seconds, rel=0.01)
    # the plan's parts are shown beside, and add up to its step but for what it hides or has no part for
    expected = sum(part.expected or 0 for part in waterfall.parts)
    assert expected == pytest.approx(waterfall.estimate.seconds, rel=0.05)


def test_a_clocked_down_rank_is_named_with_its_clock(tmp_path: Path) -> None:
    cluster = Cluster(seed=1)
    for phase in ("forward", "backward"):
        cluster.own[phase][5] *= 1.2
    cluster.columns["gpu_clock_mhz"][5] = 1460
    found = told(cluster, tmp_path)
    first = found.findings[0]
    assert first.id == "explain.slow-rank" and "rank 5" in first.subject and "clock" in first.subject
    assert "1460 MHz" in first.evidence and "node0" in first.evidence
    assert share_of(found) == pytest.approx(truth(cluster, Cluster(seed=1)), rel=0.1)


@pytest.mark.parametrize("noise", [0.05, 0.15])
def test_a_slow_rank_among_uneven_ones_costs_what_it_comes_after_the_last_of_them(noise: float, tmp_path: Path) -> None:
    """Held against their median it would cost 8 and 26 % more than the truth."""
    cluster = Cluster(dp=4, seed=1, noise=noise)
    cluster.own["forward"][2] += 0.5
    (slow,) = told(cluster, tmp_path).ranks.slow
    assert slow.rank == 2 and slow.share == pytest.approx(truth(cluster, Cluster(dp=4, seed=1, noise=noise)), rel=0.03)


def test_captured_steps_tell_nothing_of_the_usual_speed(tmp_path: Path) -> None:
    """Steps 50 to 52 have the profiler in them, 53 the writing of its traces; 80 and 81 by a request."""
    slowed = Cluster(seed=2)
    slowed.own["other"][:, [49, 50, 51, 52, 79, 80, 81]] += slowed.step_seconds
    folder = write(slowed, tmp_path / "run")
    for step in (50, 80):
        trace_path(folder, 0, step).write_bytes(gzip.compress(b'{"traceEvents": [{"ph": "M", "name": "x"}]}'))
    write_request(folder, CaptureRequest(steps=2, at=80, ranks=(0,)))
    found = diagnose(read_run(folder))
    assert found.view.captured == {50, 51, 52, 53, 80, 81, 82}
    assert [finding for finding in found.findings if finding.severity != "note"] == []
    assert found.waterfall is not None
    assert found.waterfall.step_seconds == pytest.approx(float(Cluster(seed=2).wall()[3:].mean()), rel=0.002)


def test_since_when_a_rank_is_slow_is_told(tmp_path: Path) -> None:
    cluster = Cluster(seed=2, dp=4, tp=2)
    cluster.own["forward"][6, 70:] += 0.1
    (slow,) = told(cluster, tmp_path).ranks.slow
    assert slow.rank == 6 and slow.since is not None and abs(slow.since - 71) < 8 and slow.cause == "forward"


def test_a_slow_host_is_named_as_one(tmp_path: Path) -> None:
    cluster = Cluster(dp=32, seed=3)
    cluster.own["backward"][8:16] += 0.2
    found = told(cluster, tmp_path)
    assert {one.rank for one in found.ranks.slow} == set(range(8, 16))
    assert found.ranks.group == "all 8 ranks of host node1" and "node1" in found.findings[0].evidence


def test_a_slow_link_is_told_from_a_slow_rank(tmp_path: Path) -> None:
    cluster = Cluster(dp=4, tp=2, seed=4)
    cluster.communication["tp"][2:4] *= 5
    found = told(cluster, tmp_path)
    (link,) = found.ranks.links
    assert link.ranks == (2, 3) and link.axis == "tp" and link.times == pytest.approx(5, rel=0.2)
    assert found.findings[0].id == "explain.slow-link" and not found.ranks.slow


def test_one_rank_that_pauses_at_random_steps_is_garbage_collection(tmp_path: Path) -> None:
    """NVIDIA's and torchtitan's stragglers: pytorch/torchtitan#148, pauses of a second on one rank at a time."""
    cluster, chance = Cluster(seed=5), np.random.default_rng(5)
    at = chance.random(cluster.own["other"].shape) < 0.02
    cluster.own["other"] = cluster.own["other"] + 1.3 * at
    cluster.columns["gc_us"] = 1.3e6 * at
    cluster.columns["gc_runs"] = 1.0 * at
    found = told(cluster, tmp_path)
    assert found.findings[0].id == "explain.garbage-collection" and "gc_interval" in found.findings[0].next_step
    assert share_of(found) == pytest.approx(truth(cluster, Cluster(seed=5)), rel=0.1)


def test_pauses_without_a_cause_are_not_determined(tmp_path: Path) -> None:
    cluster, chance = Cluster(seed=6), np.random.default_rng(6)
    cluster.own["other"][2] += 1.5 * (chance.random(cluster.steps) < 0.1)
    first = told(cluster, tmp_path).findings[0]
    assert first.id == "explain.pauses" and first.severity == "note" and "Not determined" in first.next_step


@pytest.mark.parametrize("share", [0.1, 0.3, 0.7])
def test_a_loader_that_is_late_costs_its_share(share: float, tmp_path: Path) -> None:
    """AnswerDotAI/ModernBERT#236: a loader that supplies 30 % leaves 70 % waiting, and 3.3 times the speed to be
    had."""
    cluster = Cluster(seed=7)
    wait = cluster.step_seconds * share / (1 - share)
    cluster.own["data"] = cluster.own["data"] + wait
    cluster.columns["loader_ready"][:] = 0
    found = told(cluster, tmp_path)
    assert found.findings[0].id == "explain.data-loading" and "data.num_workers" in found.findings[0].next_step
    assert share_of(found) == pytest.approx(truth(cluster, Cluster(seed=7)), rel=0.1)
    if share == 0.7:
        gain = found.findings[0].gain
        assert gain is not None and 3.0 < float(gain.split(", ")[1].split("x")[0]) < 3.6


@pytest.mark.parametrize(("ready", "advice"), [(1, "more processors, do"), (0, "`paceline data build`")])
def test_where_processors_are_full_no_more_workers_are_advised(ready: int, advice: str, tmp_path: Path) -> None:
    cluster = Cluster(seed=7)
    cluster.own["data"] = cluster.own["data"] + 0.3 * cluster.step_seconds
    cluster.columns["loader_ready"][:] = ready
    cluster.columns["cpu_busy_pct"] = np.full_like(cluster.columns["loader_ready"], 100.0, dtype=float)
    found = next(one for one in told(cluster, tmp_path).findings if one.id == "explain.data-loading")
    assert "data.num_workers=" not in found.next_step
    assert "processors are 100 % busy" in found.next_step and advice in found.next_step


def test_uneven_stages_are_told_with_a_better_cut(tmp_path: Path) -> None:
    cluster = Cluster(dp=2, pp=2, seed=8)
    for phase in ("forward", "backward"):
        cluster.own[phase][:2] *= 0.75
        cluster.own[phase][2:] *= 1.25
    first = told(cluster, tmp_path).findings[0]
    assert first.id == "explain.stage-imbalance" and "stage 1" in first.subject
    layout = json.loads(first.next_step.split("'")[1])
    assert sum(layout) == 32 and layout[0] > layout[1]


def test_fragmentation_is_told_by_the_allocators_retries(tmp_path: Path) -> None:
    cluster, chance = Cluster(seed=9), np.random.default_rng(9)
    at = chance.random(cluster.steps) < 0.3
    cluster.own["forward"][:, at] += 0.4
    cluster.columns["alloc_retries"] = np.cumsum(np.broadcast_to(at, (8, cluster.steps)), axis=1).astype(float)
    found = told(cluster, tmp_path)
    assert found.findings[0].id == "explain.memory-fragmentation"
    assert "expandable_segments" in found.findings[0].next_step
    assert share_of(found) == pytest.approx(truth(cluster, Cluster(seed=9)), rel=0.1)


def test_leftover_variables_are_named(tmp_path: Path) -> None:
    first = told(Cluster(environment={"NCCL_P2P_DISABLE": "1", "NCCL_DEBUG": "INFO"}), tmp_path).findings[0]
    assert first.id == "explain.leftover-variable" and "NCCL_P2P_DISABLE=1" in first.subject


def test_full_recomputation_costs_a_forward(tmp_path: Path) -> None:
    cluster = Cluster(seed=10, recipe=["parallel.recompute=full"])
    cluster.own["backward"] = cluster.own["backward"] + cluster.own["forward"]
    found = told(cluster, tmp_path)
    assert found.findings[0].id == "explain.full-recompute"
    assert share_of(found) == pytest.approx(truth(cluster, Cluster(seed=10)), rel=0.1)


@pytest.mark.slow
def test_thousands_of_ranks_are_read_in_bounded_time_and_memory(tmp_path: Path) -> None:
    import resource

    cluster = Cluster(dp=256, tp=8, steps=60, seed=11)
    cluster.own["backward"][777] += 0.1
    folder = write(cluster, tmp_path / "run")
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = diagnose(read_run(folder))
    assert found.ranks.slow[0].rank == 777 and found.ranks.slow[0].place.endswith("node97")
    # thousands of ranks within a minute and 4 GiB, here with room for a busy machine
    assert time.monotonic() - began < 60 and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**21


def test_ranks_that_are_missing_and_clocks_that_jump_are_survived(tmp_path: Path) -> None:
    cluster = Cluster(seed=12)
    cluster.columns["gpu_clock_mhz"] = np.random.default_rng(0).uniform(200, 1980, cluster.own["data"].shape)
    folder = write(cluster, tmp_path / "run")
    (folder / FOLDER / "rank-00003.0000.csv").unlink()
    (folder / FOLDER / "rank-00004.0000.csv").write_text("")
    found = diagnose(read_run(folder))
    assert found.view.missing_ranks == [3, 4]
    assert any(finding.id == "explain.incomplete" and "3, 4" in finding.evidence for finding in found.findings)


@pytest.mark.parametrize("events", [True, False])
def test_a_run_that_went_on_with_fewer_ranks_is_told_of_those(events: bool, tmp_path: Path) -> None:
    folder = write(Cluster(dp=4, steps=25), tmp_path / "run")
    write(Cluster(dp=1, steps=60), tmp_path / "later")
    lines = (tmp_path / "later" / FOLDER / "rank-00000.0000.csv").read_text().splitlines()
    time_column = COLUMNS.index("time_ms")
    again = [line.split(",") for line in lines[2:] if int(line.split(",")[0]) > 20]
    for cells in again:
        cells[time_column] = str(int(cells[time_column]) + 10**9)
    text = "\n".join([*lines[:2], *(",".join(cells) for cells in again)])
    (folder / FOLDER / "rank-00000.0001.csv").write_text(text + "\n")
    if events:
        began = (int(again[0][time_column]) - 1000) / 1e3
        with (folder / "events.jsonl").open("a") as file:
            file.write(json.dumps({"event": "resume", "step": 20, "world_size": 1, "time": began}) + "\n")
    view = read_run(folder)
    assert view.ranks == (0,) and view.world_size == 1 and not view.missing_ranks
    assert (view.steps[0], view.steps[-1], len(view.steps)) == (1, 60, 60)


def test_lines_of_steps_that_are_run_again_are_left_out(tmp_path: Path) -> None:
    folder = write(Cluster(dp=2, steps=25), tmp_path / "run")
    view = read_run(folder)
    record = folder / FOLDER / "rank-00000.0000.csv"
    last = record.read_text().splitlines()
    again = last[-1].split(",")
    again[0], again[COLUMNS.index("time_ms")] = "11", str(int(view.newest * 1e3) + 60_000)
    (folder / FOLDER / "rank-00000.0001.csv").write_text("\n".join([*last[:2], ",".join(again)]) + "\n")
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": "resume", "step": 10, "time": view.newest + 30}) + "\n")
    assert read_run(folder).steps[-1] == 11


def test_a_cpu_or_an_unknown_card_has_no_ceiling(tmp_path: Path) -> None:
    found = told(Cluster(device_name="NVIDIA Unheard Of"), tmp_path)
    assert found.waterfall is not None and found.waterfall.estimate is None
    assert "not in the table of hardware" in found.waterfall.basis


# ---- real runs


@pytest.mark.slow
def test_a_delayed_rank_of_four_is_found(tmp_path: Path) -> None:
    data = runs.write_dataset(tmp_path / "data")
    folder = tmp_path / "run"
    slow = tmp_path / "slow.py"
    slow.write_text(SLOW_RANK)
    more = (f"run.plugins={slow}", "train.gc_interval=1000", "observe.log_interval=50")
    run_ranks(runs.run, 4, runs.tiny(folder, data, *more, "checkpoint.interval=0", steps=30))
    found = diagnose(read_run(folder))
    assert found.ranks.slow and found.ranks.slow[0].rank == 2
    named = next(finding for finding in found.findings if "rank 2" in finding.subject)
    assert named.severity == "warning"
    assert found.ranks.slow[0].seconds == pytest.approx(0.15, rel=0.3)


SLOW_RANK = """
import time
import torch.distributed as dist
from paceline.observe.hooks import Hook


class Delay(Hook):
    def on_step_start(self, start):
        if dist.get_rank() == 2:
            time.sleep(0.15)


def register(registry):
    registry.hook(lambda config: Delay())
"""


def test_a_run_folder_is_read_at_any_time(tmp_path: Path) -> None:
    data = runs.write_dataset(tmp_path / "data")
    folder = tmp_path / "run"
    runs.alone(runs.tiny(folder, data, steps=20))
    whole = diagnose(read_run(folder))
    assert whole.view.end == "end" and whole.waterfall is not None
    parts = sum(part.seconds for part in whole.waterfall.parts)
    assert parts == pytest.approx(whole.waterfall.step_seconds, rel=0.01)
    assert len(dimensions(whole.view)) >= 5  # of a second or less: the sampler may have seen nothing yet
    # being written: the last line of every file is cut
    for file in (*(folder / FOLDER).iterdir(), folder / "metrics.jsonl", folder / "events.jsonl"):
        file.write_bytes(file.read_bytes()[:-7])
    cut = diagnose(read_run(folder))
    assert cut.view.end == "" and cut.waterfall is not None and len(cut.view.steps) == 19
    # damaged: each part that goes is named, the rest is told
    (folder / "recipe.toml").write_text("[model\n")
    (folder / "metrics.jsonl").write_text("{}\n")
    told = diagnose(read_run(folder))
    assert told.waterfall is not None
    evidence = next(finding.evidence for finding in told.findings if finding.id == "explain.incomplete")
    assert "recipe.toml" in evidence and "metrics.jsonl" in evidence
    for file in (folder / FOLDER).iterdir():
        file.unlink()
    empty = diagnose(read_run(folder))
    assert empty.waterfall is None and run_explanation(empty).page().startswith("<!doctype html>")


def test_ranks_and_waterfall_mean_the_same_by_forward(tmp_path: Path) -> None:
    """On a CPU: what a thread waits for a processor is no forward, in either table."""
    folder = write(Cluster(dp=2, steps=40), tmp_path / "run")
    for path in (folder / FOLDER).glob("rank-*.csv"):
        head, names, *lines = path.read_text().splitlines()
        rows = [dict(zip(names.split(","), map(int, line.split(",")), strict=True)) for line in lines]
        head = head.replace('"peak_tflops": 989.0', '"peak_tflops": null')
        for row in rows:
            row |= {f"device_{phase}_us": -1 for phase in PHASES}
            inside = row["host_forward_us"] + row["host_backward_us"]
            row["thread_queue_us"] = inside // (2 if "00000" in path.name else 4)
        text = "\n".join(",".join(str(row[name]) for name in names.split(",")) for row in rows)
        path.write_text(f"{head}\n{names}\n{text}\n")
    found = diagnose(read_run(folder))
    parts = own_parts(found.shares)
    assert found.waterfall is not None and not found.shares.on_device
    assert float(parts["host"].mean()) == pytest.approx(found.waterfall.seconds("host"), rel=1e-6)
    assert float(parts["forward"].mean()) == pytest.approx(found.waterfall.seconds("forward"), rel=1e-6)
    assert sum(float(seconds.mean()) for seconds in parts.values()) == pytest.approx(
        float(found.shares.work.mean()), rel=1e-6
    )
    told = next(finding for finding in found.findings if finding.id == "explain.cpu-contention")
    assert "on the rank that waited longest" in told.evidence and "ms on average" in told.evidence


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run folder"):
        read_run(tmp_path)


def test_the_page_and_the_data_hold_everything(tmp_path: Path) -> None:
    cluster = Cluster(seed=13)
    cluster.own["data"] = cluster.own["data"] + 0.3
    shown = run_explanation(told(cluster, tmp_path))
    data = json.loads(json.dumps(shown.as_dict()))
    assert data["findings"][0]["id"] == "explain.data-loading"
    assert set(data["findings"][0]) == {"id", "severity", "subject", "evidence", "next_step", "gain"}
    assert sum(part["seconds"] for part in data["waterfall"]) == pytest.approx(data["step_seconds"], rel=0.01)
    assert len(data["dimensions"]) >= 8
    page = shown.page()
    assert "explain.data-loading" in page and "<svg" in page and "http" not in page.replace("http://www.w3.org", "")
