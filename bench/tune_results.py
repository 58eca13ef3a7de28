"""What `bench/tune.py` keeps between its calls: tune.json, the page of it, and the journals of unfinished tunings."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tune_jobs
from results import Results, head, notes_and_failures
from tune_jobs import Job
from tune_replay import GOAL, WITHIN, replay

FIGURES = ("step_seconds", "peak_memory_gib", "seconds_by_step", "logged", "devices", "tokens_per_second_per_gpu")
KINDS: Mapping[str, type] = {"bench": dict, "ran_out": dict, "tune": dict}
NAIVE_LEAST = 2600.0
"""Tokens/s a GPU of the 13B on two H200s, below which the naive recipe does not count as the base of a ratio."""
GOALS = {False: 2.7, True: 3.2}
"""Ratios aimed at, without and with changes of precision."""
OF_HAND = 0.97
_JOURNAL = ("tune.json", "trials.jsonl")


class TuneResults(Results):
    """tune.json and tune.md, or with ``_one_gpu`` behind the name."""

    def __init__(self, folder: Path, *, one_gpu: bool = False) -> None:
        self.one_gpu = one_gpu
        super().__init__(folder, "tune_one_gpu" if one_gpu else "tune", KINDS, "bench/tune.sh")

    def page(self) -> list[str]:
        return page(self.data, one_gpu=self.one_gpu)

    def pages_of(self, data: dict[str, Any]) -> None:
        page(data, one_gpu=self.one_gpu)

    # ---- tunings that go on in the next call, which may be on another machine of the kind

    def journal(self, job: Job) -> Path:
        return self.folder / f"{self.name}_trials" / job.name

    def restore(self, job: Job, work: Path) -> None:
        """What an earlier call has measured."""
        kept = self.journal(job)
        if kept.is_dir() and not (work / _JOURNAL[1]).exists():
            work.mkdir(parents=True, exist_ok=True)
            for name in _JOURNAL:
                if (kept / name).is_file():
                    shutil.copyfile(kept / name, work / name)

    def keep(self, job: Job, work: Path) -> None:
        kept = self.journal(job)
        kept.mkdir(parents=True, exist_ok=True)
        for name in _JOURNAL:
            if (work / name).is_file():
                shutil.copyfile(work / name, kept / name)


def page(data: dict[str, Any], *, one_gpu: bool = False) -> list[str]:
    jobs = tune_jobs.on_one_gpu if one_gpu else tune_jobs.jobs_of
    entries = data["entries"]
    return [
        *head("`paceline tune`, measured", data),
        *_tunings(jobs("ladder"), jobs("hand"), entries, one_gpu=one_gpu),
        *_sweep(jobs("sweep"), data),
        *notes_and_failures(entries),
    ]


def _tunings(jobs: list[Job], hand: list[Job], entries: dict[str, Any], *, one_gpu: bool) -> list[str]:
    lines = [
        "## From the naive recipe",
        "",
        "`paceline tune recipes/ladder/naive.toml`, at most 20 minutes of trials each; base and best are means of",
        "their repeats. *Of 2,600*: over the larger of the base and 2,600 tokens/s a GPU. *Of the best hand-made*:",
        "recipes as of docs/ladder.md, with the same batch and of the same class of changes.",
        "",
    ]
    if one_gpu:
        lines += ["On one GPU with 8 of 40 layers and half the batch: nothing is sharded or sent.", ""]
    lines += [
        "| tuning | base | best | ratio | of 2,600 | aim | noise | trials | minutes | of the best hand-made |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for job in jobs:
        entry = entries.get(job.key, {})
        if "tune" not in entry:
            lines.append(f"| {job.title} | not measured yet | | | | | | | | |")
            continue
        lines.append(_row(job, entry["tune"], hand, entries, one_gpu=one_gpu))
    for job in jobs:
        if "tune" in entries.get(job.key, {}):
            lines += ["", f"### {job.title[0].upper()}{job.title[1:]}", "", *_ladder(entries[job.key]["tune"])]
    return [*lines, ""]


def _row(job: Job, found: dict[str, Any], hand: list[Job], entries: dict[str, Any], *, one_gpu: bool) -> str:
    base, best = found["base"], found["best"]["tokens_per_second_per_gpu"]
    speed = None if base is None else base["tokens_per_second_per_gpu"]
    ratio = "-" if found["gain"] is None else f"{found['gain']:.2f}x"
    counted = "-" if one_gpu else f"{best / max(speed or 0.0, NAIVE_LEAST):.2f}x"
    aim = "-" if one_gpu else f"{GOALS['precision' in job.allow]}x"
    rivals = [
        entries[one.key]["bench"]["tokens_per_second_per_gpu"]
        for one in hand
        if one.group == job.group and set(one.allow) <= set(job.allow) and "bench" in entries.get(one.key, {})
    ]
    against = f"{best / max(rivals):.1%} (aim {OF_HAND:.0%})" if rivals else "not measured yet"
    noise = f"{found['noise']:.2%}" + ("" if found["repeated"] else ", not repeated")
    return (
        f"| {job.title} | {'does not fit' if speed is None else f'{speed:,.0f}'} | {best:,.0f} | {ratio} | {counted} | "
        f"{aim} | {noise} | {len(found['trials'])} | {found['trial_seconds'] / 60:.1f} | {against} |"
    )


def _ladder(found: dict[str, Any]) -> Iterator[str]:
    yield "| trial | changes | expected | obtained |"
    yield "| ---: | --- | ---: | ---: |"
    for rung in found["ladder"]:
        changes = ", ".join(f"`{one['key']}` = {one['after']} ({one['neutrality']})" for one in rung["changes"])
        expected = "-" if rung["expected"] is None else f"{rung['expected']:.2f}x"
        yield f"| {rung['trial']} | {changes} | {expected} | {rung['obtained']:.2f}x |"
    bad = [trial for trial in found["trials"] if trial["outcome"] != "measured"]
    if bad:
        yield ""
        yield from (f"- trial {trial['number']}: {trial['outcome']}: {trial['reason'][:160]}" for trial in bad)


def _sweep(jobs: list[Job], data: dict[str, Any]) -> list[str]:
    entries = data["entries"]
    done = [job for job in jobs if job.key in entries and "failed" not in entries[job.key]]
    lines = ["## Trials beside an exhaustive sweep", "", f"{len(done)} of {len(jobs)} points are measured.", ""]
    device = next((entries[job.key]["bench"]["devices"] for job in done if "bench" in entries[job.key]), "")
    found = replay(jobs, entries, device.partition(" x ")[2])
    if found is None:
        return lines
    verdict = "the search ended before" if found.needed is None else f"trial {found.needed}"
    return [
        *lines,
        f"The best is `{found.best}`, {found.best_seconds:.4f} s a step; the base takes {found.base_seconds:.4f} s; "
        f"{found.ran_out} points ran out of memory.",
        f"Within {WITHIN:.0%} of the best: **{verdict}** (aim: {GOAL}), of the search run on this table.",
        "",
        "| trial | point | best so far, s |",
        "| ---: | --- | ---: |",
        *(
            f"| {number} | `{name}` | {best:.4f} |"
            for number, (name, best) in enumerate(zip(found.tried, found.path, strict=True), 1)
        ),
    ]  # fmt: skip
