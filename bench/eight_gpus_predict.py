"""Writes what `paceline plan` predicts of the recipes of `bench/eight_gpus.py`, before they are measured.

    python bench/eight_gpus_predict.py                 # of eight GPUs; those that have no prediction yet
    python bench/eight_gpus_predict.py --gpus 4
    python bench/eight_gpus_predict.py --again         # all anew; of what is measured already it shows nothing
    python bench/eight_gpus_predict.py --dry-run DIR   # and keep the record of a --tiny call whose --results was DIR

A prediction that is there stays, whatever the planner says by now; it is made anew if its recipe was changed before it
was measured. Each names the commit whose planner made it. No GPU is needed. bench/eight_gpus.sh calls this.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cut_off
from eight_gpus_jobs import COUNTS, ROOT, Job, all_jobs, tiny
from eight_gpus_report import DRY_RUN
from eight_gpus_results import EightResults
from eight_gpus_targets import figures
from plan_predict import tell
from plan_results import AFTER
from results import OWN, DamagedFileError

from paceline.config.load import load_recipe
from paceline.config.run import RunConfig
from paceline.costs.hardware import Hardware, find_hardware, hardware_names
from paceline.costs.step import predict
from paceline.costs.workload import Cluster


def prediction(job: Job, config: RunConfig, gpu: Hardware, commit: str) -> dict[str, Any]:
    found = predict(config, Cluster(gpu=gpu, gpus=job.processes, gpus_per_node=job.processes))
    return {
        "title": job.title,
        "recipe": job.recipe,
        "sets": list(job.sets),
        "config": digest(config),
        "commit": commit,
        "gpu": f"{job.processes} x {gpu.name}",
        "step_seconds": round(found.seconds, 4),
        "tokens_per_second_per_gpu": round(found.tokens_per_second_per_gpu, 1),
        "memory_gib": round(found.memory_gib, 2),
        "exposed_seconds": round(found.exposed_communication * found.seconds, 4),
        "bubble_seconds": round(found.parts["bubble"], 4),
        "fits": found.fits,
        "tight": found.tight,
        "parts": {name: round(value, 4) for name, value in found.parts.items() if value > 0.0005},
    }


def digest(config: RunConfig) -> str:
    """Of the resolved recipe, whatever file a change of it lies in. A field that the schema gains changes nothing."""
    text = json.dumps(config.model_dump(mode="json", exclude_defaults=True), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def predict_all(jobs: Sequence[Job], results: EightResults, gpu: Hardware, *, again: bool, commit: str) -> list[str]:
    """Keys of what was predicted now. Predictions of jobs that are no more go, unless they were measured."""
    made, keys = [], {job.key for job in jobs}
    for key in [key for key in results.predictions if key not in keys and key not in results.entries]:
        del results.predictions[key]
    for job in jobs:
        config = load_recipe(str(ROOT / job.recipe), list(job.sets)).config
        before, measured = results.predictions.get(job.key), results.is_measured(job)
        if before is not None and not again and (measured or before["config"] == digest(config)):
            continue
        results.predictions[job.key] = prediction(job, config, gpu, commit) | ({AFTER: True} if measured else {})
        made.append(job.key)
    return made


def commit_of() -> str:
    """What the planner is at; "unknown" outside of a checkout, with "changed" where its files differ from it."""
    asked = (
        ["git", "rev-parse", "--short=12", "HEAD"],
        ["git", "status", "--porcelain", "--", "src/paceline", "recipes"],
    )
    try:
        head, changed = (
            subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
            for command in asked
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}, changed" if changed else head


def record_of(folder: Path, gpus: int) -> dict[str, Any]:
    """How every entry of a `--tiny` call ended.

    Raises:
        DamagedFileError: its results cannot be read, or are not of such a call.
    """
    found = EightResults(folder, gpus=gpus)
    if not found.are_tiny or not found.entries:
        step = f"Make it: bench/eight_gpus.sh all --tiny --gpus {gpus} --results {folder} --work {folder}"
        raise DamagedFileError(found.path, "no results of --tiny", step)
    shown, known = {}, {job.key for job in all_jobs(gpus)}
    for key, entry in found.entries.items():
        if key not in known:
            continue  # of a bench that was another then
        made = figures(entry)
        shown[key] = {
            "processes": entry["processes"],
            "seconds": entry["seconds"],
            "ended": "well" if "failed" not in entry else f"failed: {entry['failed'][0]}",
            **({"loss": made["loss"]} if made else {}),
        }
    torch = found.data.get("versions", {}).get("torch", "?")
    # of the checkout that it ran in, whose tiny recipes were predicted there before
    commits = ", ".join(sorted({each["commit"] for each in found.predictions.values()}))
    return {"commit": commits, "devices": found.data.get("devices", "?"), "torch": torch, "entries": shown}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, choices=COUNTS, default=COUNTS[0], help="GPUs of the host")
    parser.add_argument("--gpu", default="H200 SXM", help="name in the hardware table")
    parser.add_argument("--again", action="store_true", help="also what is predicted")
    parser.add_argument("--tiny", action="store_true", help="of the tiny models of bench/eight_gpus.py --tiny")
    parser.add_argument("--dry-run", type=Path, metavar="DIR", help="keep the record of a --tiny call's results")
    parser.add_argument("--results", type=Path, default=OWN, help="folder of eight_gpus.{json,md}")
    options = parser.parse_args()
    gpu = find_hardware(options.gpu)
    if gpu is None:
        parser.error(f"--gpu {options.gpu}: not in the hardware table: {', '.join(hardware_names())}")
    if options.tiny and options.results.resolve() == OWN.resolve():
        parser.error(f"--tiny: its figures mean nothing and do not go to {OWN}: add --results with another folder")
    try:
        results = EightResults(options.results, gpus=options.gpus)
        if options.dry_run:
            results.data[DRY_RUN] = record_of(options.dry_run, options.gpus)
    except DamagedFileError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    if results.predictions and results.are_tiny != options.tiny:
        held = "of --tiny" if results.are_tiny else "without --tiny"
        parser.error(f"{results.path} holds predictions {held}: choose another --results, or move it away")
    results.data["tiny"] = options.tiny
    jobs = [job for job in all_jobs(options.gpus) if job.is_predicted]
    jobs = [tiny(job) for job in jobs] if options.tiny else jobs
    made = predict_all(jobs, results, gpu, again=options.again, commit=commit_of())
    results.write()
    tell(made, results.predictions)


if __name__ == "__main__":
    cut_off.run(main)
