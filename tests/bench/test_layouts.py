"""What the layout bench runs passes the rules of recipes, and its figures say what they claim."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.config.check import check, refuse_errors
from paceline.config.load import load_recipe

BENCH = Path(__file__).parents[2] / "bench"
sys.path.append(str(BENCH))

import layouts  # noqa: E402
import layouts_jobs  # noqa: E402
import layouts_report  # noqa: E402
import ranks  # noqa: E402
import runner  # noqa: E402
from layouts_jobs import Job  # noqa: E402


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(BENCH.parent)


@pytest.mark.parametrize("part", layouts_jobs.PARTS)
def test_every_job_is_a_recipe_that_may_run(part: str) -> None:
    jobs = layouts_jobs.jobs_of(part)
    assert len({job.key for job in jobs}) == len(jobs)
    for job in jobs:
        for each in (job, layouts_jobs.tiny(job)):
            loaded = load_recipe(str(BENCH.parent / each.recipe), list(each.sets))
            refuse_errors(check(loaded.config, loaded.registry, each.processes))
            assert loaded.config.parallel.compile == each.compiled


@pytest.mark.parametrize("part", ["speed", "curves"])
def test_every_layout_is_in_it_with_its_reference(part: str) -> None:
    jobs = {job.name: job for job in layouts_jobs.jobs_of(part)}
    for layout in layouts_jobs.LAYOUTS:
        job, alone = jobs[layout.name], jobs[layouts_report.REFERENCE[layout.model]]
        assert (job.processes, alone.processes) == (2, 1)
        configs = [load_recipe(str(BENCH.parent / each.recipe), list(each.sets)).config for each in (job, alone)]
        assert configs[0].model == configs[1].model
        # the same work: only the layout differs
        assert configs[0].train == configs[1].train and configs[0].data == configs[1].data


def test_gap_and_band() -> None:
    reference = [5.0, 4.0, 3.0, 2.0, 1.0, 1.0]
    found = layouts_report.gap([5.0, 4.0, 3.5, 2.0, 1.0, 1.0], reference)
    assert found is not None
    assert (found.raw, found.raw_at) == (0.5, 3)
    assert found.smooth == pytest.approx(0.1) and found.last == pytest.approx(0.1)
    assert found.mean == pytest.approx(0.5 / 6)
    same = layouts_report.gap(reference, reference)
    assert layouts_report.band_of([same, found]) == (0.5, pytest.approx(0.1))
    assert layouts_report.band_of([]) is None and layouts_report.band_of([None]) is None
    with pytest.raises(ValueError, match="5 steps beside 6"):
        layouts_report.gap(reference[:5], reference)


def test_page_of_what_is_there() -> None:
    def curve(kind: str, shift: float) -> dict[str, object]:
        losses = [8.0 - step + shift for step in range(6)]
        return {"title": kind, "kind": kind, "model": "dense", "losses": losses}

    entries = {"curves/one": curve("reference", 0), "curves/again": curve("rounding", 0.02)}
    entries |= {"curves/tp2": curve("layout", 0.01), "speed/tp2": {"failed": ["exit code 1", "out of memory"]}}
    text = "\n".join(layouts_report.page({"command": "x", "entries": entries}))
    assert "| **band: rounding** (1 runs) | **0.0200** |" in text
    assert "0.50 (0.50)" in text and "`speed/tp2`: exit code 1; out of memory" in text


def test_skipped_steps_are_left_out_of_differences() -> None:
    reference: list[float | None] = [5.0, 4.0, 3.0, None, 1.0, 1.0]
    found = layouts_report.gap([None, 4.0, 3.5, 2.0, 1.0, 1.0], reference)
    assert found is not None
    assert (found.raw, found.raw_at) == (0.5, 3) and found.mean == pytest.approx(0.125)
    assert layouts_report.gap([None] * 6, reference) is None
    entries = {
        f"curves/{name}": {"title": name, "kind": kind, "model": "dense", "losses": losses}
        for name, kind, losses in (("one", "reference", reference), ("tp2", "layout", [None] * 6))
    }
    text = "\n".join(layouts_report.page({"command": "x", "entries": entries}))
    assert "| tp2 | no step with a loss in both |" in text
    assert "left out of every difference: one 1, tp2 6." in text


# ---- ranks that share a GPU

RECORD = dict.fromkeys(layouts_report.FIGURES, 2.5) | {"recipe": {}}


class Scripted:
    """Stands in for `paceline`: every rank writes its environment; the first, the line of a bench too."""

    script = f"""
import json, os, pathlib, sys
folder, rank = pathlib.Path(sys.argv[1]), os.environ.get("RANK", "0")
(folder / f"environment{{rank}}.json").write_text(json.dumps(dict(os.environ)))
if rank == "0":
    (folder / "line.jsonl").write_text(json.dumps({RECORD!r}) + "\\n")
"""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpus: int) -> None:
        self.monkeypatch, self.folder = monkeypatch, tmp_path
        self.started: list[str] = []
        monkeypatch.setattr(runner, "machine", lambda: ({}, gpus))

    def command(self, job: Job, folder: Path) -> list[str]:
        self.started.append(job.name)
        return ["-c", self.script, str(folder), f"--nproc={job.processes}"]

    def run(self, *arguments: str) -> dict[str, Any]:
        self.started = []
        line = ["layouts.py", *arguments, "--results", str(self.folder), "--work", str(self.folder / "work")]
        self.monkeypatch.setattr(sys, "argv", line)
        runner.main(replace(layouts.BENCH, command_of=self.command), "")
        found: dict[str, Any] = json.loads((self.folder / "layouts.json").read_text())["entries"]
        return found


def test_ranks_share_the_one_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NCCL_NSOCKS_PERTHREAD", "2")
    bench = Scripted(monkeypatch, tmp_path, 1)
    entries = bench.run("speed", "long", "--share-gpu", "--only", "one", "tp2", "ring_full")
    assert bench.started == ["one", "tp2", "ring_full"]
    assert not entries["speed/one"].get("shared_gpu") and entries["speed/tp2"]["shared_gpu"]
    assert "--nproc=1" in entries["speed/one"]["command"] and "--nproc" not in entries["speed/tp2"]["command"]
    each = [json.loads((tmp_path / f"work/speed/tp2/environment{rank}.json").read_text()) for rank in range(2)]
    assert [found["RANK"] for found in each] == [found["GROUP_RANK"] for found in each] == ["0", "1"]
    for found in each:
        assert (found["WORLD_SIZE"], found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == ("2", "0", "1")
        assert found["CUDA_VISIBLE_DEVICES"] == "0" and found["NCCL_SOCKET_IFNAME"] == "lo"
        assert found["NCCL_NSOCKS_PERTHREAD"] == "2", "what the caller has set stays"
    assert each[0]["NCCL_HOSTID"] != each[1]["NCCL_HOSTID"] and each[0]["MASTER_PORT"] == each[1]["MASTER_PORT"]
    page = (tmp_path / "layouts.md").read_text()
    assert "their step times mean nothing" in page
    assert "| tensor + sequence, tp 2 | 2 ranks on 1 | yes | shared |  |  |  |  | 2.5 | 2.5000 |" in page
    assert "speed/tp2: 2.5 GiB, loss 2.5000, on a shared GPU" in capsys.readouterr().out
    # what two GPUs measured is not measured again, what one has is
    bench.run("speed", "--share-gpu", "--only", "one", "tp2")
    assert bench.started == []
    assert "speed/tp2" in bench.run("speed", "--only", "one", "tp2") and bench.started == []
    bench = Scripted(monkeypatch, tmp_path, 2)
    assert "shared_gpu" not in bench.run("speed", "--only", "one", "tp2")["speed/tp2"]
    assert bench.started == ["tp2"]
    bench.run("speed", "--share-gpu", "--only", "tp2")
    assert bench.started == []


def test_shared_ranks_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes of `paceline train` without a launcher, one run folder."""
    monkeypatch.setattr(runner, "machine", lambda: ({}, 0))
    sets = ["speed", "--tiny", "--share-gpu", "--only", "tp2"]
    line = ["layouts.py", *sets, "--results", str(tmp_path), "--work", str(tmp_path / "work")]
    monkeypatch.setattr(sys, "argv", line)
    runner.main(layouts.BENCH, "")
    entry = json.loads((tmp_path / "layouts.json").read_text())["entries"]["speed/tp2"]
    assert entry["bench"]["loss"] > 0, entry.get("failed")
    assert entry["bench"]["devices"].startswith("2 x ") and entry["shared_gpu"]


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    script = "import os, time; rank = os.environ['RANK']; print(rank, flush=True); time.sleep(60 * (rank == '0'))"
    environments = ranks.sharing_one_gpu(os.environ, 2)
    started, began = ranks.Ranks(["-c", script + "; raise SystemExit(3)"], environments, tmp_path / "log"), time.time()
    try:
        while (code := started.poll()) is None:
            assert time.time() - began < 30
            time.sleep(0.05)
    finally:
        started.stop()
    assert code == 3 and time.time() - began < 30
    assert sorted("".join((tmp_path / "log").read_text().split())) == ["0", "1"]


def test_a_damaged_file_of_results_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "layouts.json").write_text('{"entries": {"speed/one": {"title": "a", "bench": {}}}}')
    with pytest.raises(SystemExit):
        Scripted(monkeypatch, tmp_path, 0).run("report")
    said = capsys.readouterr().err
    assert said.startswith(f"layouts.py: {tmp_path / 'layouts.json'}: ") and "Move it away" in said
