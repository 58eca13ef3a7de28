"""What the jobs of `bench/eight_gpus.py` left behind: figures of doctor, of a bench, of a run that is explained."""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

from eight_gpus_jobs import Job
from found import an_object, bench_record, metrics, ran_out, wanted_steps

from paceline.config.load import load_recipe
from paceline.costs.layers import training_flops_per_token
from paceline.errors import PacelineError
from paceline.explain.capture_report import captures_of
from paceline.explain.rank_trace import RankTrace, load
from paceline.explain.run_report import explain_run

FIGURES = (
    "step_seconds",
    "step_seconds_min",
    "step_seconds_max",
    "tokens_per_second_per_gpu",
    "tflops_per_gpu",
    "fraction_of_gemm",
    "sustained_gemm_tflops",
    "peak_memory_gib",
    "loss",
)
"""Of the record of `paceline bench`, what the page shows."""


def found_by(job: Job, folder: Path) -> dict[str, Any]:
    """The entry's own part, or that memory ran out.

    Raises:
        OSError, LookupError, TypeError, ValueError: it left nothing usable, and not for lack of memory.
    """
    try:
        if job.kind == "doctor":
            return {"doctor": doctor_figures(folder)}
        if job.kind == "bench":
            return {"bench": bench_record(folder, FIGURES)}
        return {"run": run_figures(job, folder / "run")}
    except OSError:
        if entry := ran_out(folder):
            return entry
        raise


# ---- doctor


def doctor_figures(folder: Path) -> dict[str, Any]:
    """Rates of every GPU, pairs, collectives, links and verdicts of `paceline doctor --measure`.

    Raises:
        OSError, LookupError, TypeError, ValueError: it did not get that far.
    """
    document = an_object((folder / "doctor.json").read_text(encoding="utf-8"))
    measured = document["measured"]
    return {
        "seconds": measured["seconds"],
        "backend": measured["backend"],
        "ranks": [
            {"rank": each["rank"], "device": each["device"], "rates": rounded_rates(each["rates"])}
            for each in measured["ranks"]
        ],
        "pairs": {name: round(rate, 1) for name, rate in measured["pairs"].items()},
        "collectives": measured["collectives"],
        "groups": (document.get("topology") or {}).get("groups", []),
        "findings": [
            {name: each[name] for name in ("id", "severity", "subject")}
            for each in document["findings"]
            if each["severity"] != "note" or each["id"].startswith(("measured.", "topology."))
        ],
        "calibration": document.get("calibration", {}),
        "links_svg": links_picture((folder / "doctor.html").read_text(encoding="utf-8")),
    }


def rounded_rates(rates: dict[str, float]) -> dict[str, float]:
    return {name: round(rate, 1) if rate >= 10 else round(rate, 4) for name, rate in rates.items()}


def links_picture(page: str) -> str:
    """The matrix of links on doctor's page; "" where the machine shows none."""
    found = re.search(r'<svg[^>]*aria-label="Links between GPUs.*?</svg>', page, re.DOTALL)
    return found.group() if found else ""


# ---- an explained run


def run_figures(job: Job, run: Path) -> dict[str, Any]:
    """Steps, memory, waterfall, and what of the communication nothing hid in the captured step.

    Raises:
        OSError, LookupError, TypeError, ValueError: the run did not get that far.
    """
    config = load_recipe(job.recipe, list(job.sets)).config
    # the time between the ends of two steps, from the second step on; the captured one is the last
    seconds = json.loads((run / "step_seconds.json").read_text())
    if len(seconds) != wanted_steps(job) - 1:
        raise ValueError(f"{len(seconds) + 1} of {wanted_steps(job)} steps")
    plain = seconds[job.warm_up - 1 : job.warm_up - 1 + job.steps]
    step_seconds = statistics.median(plain)
    tokens = config.train.global_batch_size * config.train.seq_len / job.processes
    flops = training_flops_per_token(config.model, config.train.seq_len)
    last = metrics(run.parent)[-1]
    return {
        "step_seconds": step_seconds,
        "step_seconds_min": min(plain),
        "step_seconds_max": max(plain),
        "steps": len(plain),
        "tokens_per_second_per_gpu": tokens / step_seconds,
        "tflops_per_gpu": tokens / step_seconds * flops / 1e12,
        "peak_memory_gib": last["memory_gib"],
        "loss": last["loss"] if last["loss"] is None or math.isfinite(last["loss"]) else None,
        **explained(run),
    }


def explained(run: Path) -> dict[str, Any]:
    """The waterfall of `paceline explain`, its dearest findings, and communication by rank of the capture.

    Raises:
        ValueError: explain cannot read the run, or it has no settled step.
    """
    try:
        explanation = explain_run(run).as_dict()
        traces = [load(path) for path in captures_of(run)]
    except PacelineError as error:
        raise ValueError(f"explain: {error}") from error
    if not explanation["waterfall"]:
        raise ValueError("explain: no settled step")
    return {
        "explained_step_seconds": explanation["step_seconds"],
        "waterfall": explanation["waterfall"],
        "findings": [
            {name: each[name] for name in ("id", "subject", "next_step", "gain")}
            for each in explanation["findings"]
            if each["severity"] != "note"
        ][:4],
        "communication": [communication(each) for each in traces if len(each.trace.start)],
    }


def communication(one: RankTrace) -> dict[str, Any]:
    """Of a captured step of one rank, in seconds. Exposed is also what waits for a pipeline's neighbour."""
    made = one.breakdown
    return {
        "rank": one.trace.rank,
        "step": round(made.total, 5),
        "communication": round(made.communication, 5),
        "exposed": round(made.exposed, 5),
        "exposed_by_collective": {kind: round(alone, 5) for kind, (_, alone, _) in one.collectives.items()},
        "idle": round(made.idle, 5),
    }
