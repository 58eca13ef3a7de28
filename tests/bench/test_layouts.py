"""What the layout bench runs passes the rules of recipes, and its figures say what they claim."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.config.check import check, refuse_errors
from paceline.config.load import load_recipe

BENCH = Path(__file__).parents[2] / "bench"
sys.path.append(str(BENCH))

import layouts_jobs  # noqa: E402
import layouts_report  # noqa: E402


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
    assert (found.raw, found.raw_at) == (0.5, 3)
    assert found.smooth == pytest.approx(0.1) and found.last == pytest.approx(0.1)
    assert found.mean == pytest.approx(0.5 / 6)
    same = layouts_report.gap(reference, reference)
    assert layouts_report.band_of([same, found]) == (0.5, pytest.approx(0.1))
    assert layouts_report.band_of([]) is None
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
