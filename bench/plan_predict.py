"""Writes what `paceline plan` predicts of the recipes of `bench/plan.py` into plan.json, before they are measured.

    python bench/plan_predict.py                     # those that have no prediction yet
    python bench/plan_predict.py --again             # all anew; of what is measured already it shows nothing
    python bench/plan_predict.py --gpu "B200 SXM"    # of other cards than H200s

A prediction that is there stays, whatever the planner says by now; it is made anew if its recipe was changed before it
was measured. No GPU is needed. bench/plan.sh calls this.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cut_off
from plan_jobs import ROOT, Job, all_jobs, tiny
from plan_results import AFTER, PlanResults
from results import OWN, DamagedFileError

from paceline.config.load import load_recipe
from paceline.costs.hardware import Hardware, find_hardware, hardware_names
from paceline.costs.step import predict
from paceline.costs.workload import Cluster


def prediction(job: Job, gpu: Hardware) -> dict[str, Any]:
    config = load_recipe(str(ROOT / job.recipe), list(job.sets)).config
    found = predict(config, Cluster(gpu=gpu, gpus=job.processes, gpus_per_node=max(job.processes, 1)))
    return {
        "title": job.title,
        "recipe": job.recipe,
        "recipe_text": text_of(job),
        "sets": list(job.sets),
        "gpu": f"{job.processes} x {gpu.name}",
        "step_seconds": round(found.seconds, 4),
        "memory_gib": round(found.memory_gib, 2),
        "fits": found.fits,
        "tight": found.tight,
        "parts": {name: round(value, 4) for name, value in found.parts.items() if value > 0.0005},
    }


def text_of(job: Job) -> str:
    """A digest of the recipe's file."""
    return hashlib.sha256((ROOT / job.recipe).read_bytes()).hexdigest()[:16]


def is_predicted(job: Job, results: PlanResults) -> bool:
    """Whether there is a prediction that stands: of this very recipe, or of one that was measured since."""
    found = results.predictions.get(job.key)
    if found is None:
        return False
    return results.is_measured(job) or (found["sets"], found["recipe_text"]) == (list(job.sets), text_of(job))


def predict_all(jobs: Sequence[Job], results: PlanResults, gpu: Hardware, *, again: bool) -> list[str]:
    """Keys of what was predicted now."""
    made = []
    for job in jobs:
        if is_predicted(job, results) and not again:
            continue
        results.predictions[job.key] = prediction(job, gpu) | ({AFTER: True} if results.is_measured(job) else {})
        made.append(job.key)
    return made


def tell(made: Sequence[str], predictions: Mapping[str, Any]) -> None:
    for key in made:
        found = predictions[key]
        fits = "" if found["fits"] else ", does not fit"
        print(f"{key}: {found['step_seconds']:.3f} s, {found['memory_gib']:.1f} GiB{fits}", flush=True)
    print(f"{len(made)} predicted now, {len(predictions)} in all", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="H200 SXM", help="name in the hardware table")
    parser.add_argument("--again", action="store_true", help="also what is predicted")
    parser.add_argument("--tiny", action="store_true", help="of the tiny models of bench/plan.py --tiny")
    parser.add_argument("--results", type=Path, default=OWN, help="folder of plan.{json,md}")
    options = parser.parse_args()
    gpu = find_hardware(options.gpu)
    if gpu is None:
        parser.error(f"--gpu {options.gpu}: not in the hardware table: {', '.join(hardware_names())}")
    if options.tiny and options.results.resolve() == OWN.resolve():
        parser.error(f"--tiny: its figures mean nothing and do not go to {OWN}: add --results with another folder")
    try:
        results = PlanResults(options.results)
    except DamagedFileError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    if results.predictions and results.are_tiny != options.tiny:
        held = "of --tiny" if results.are_tiny else "without --tiny"
        parser.error(f"{results.path} holds predictions {held}: choose another --results, or move it away")
    results.data["tiny"] = options.tiny
    jobs = [tiny(job) for job in all_jobs()] if options.tiny else all_jobs()
    made = predict_all(jobs, results, gpu, again=options.again)
    results.write()
    tell(made, results.predictions)


if __name__ == "__main__":
    cut_off.run(main)
