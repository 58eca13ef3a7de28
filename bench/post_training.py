"""Fine-tuning beside Transformers, PEFT and Liger kernels: LoRA, all weights, mixtures of experts; and a conversion.

    python bench/post_training.py lora                      # what is done is skipped
    python bench/post_training.py lora full --one-gpu       # on one GPU, larger models cut in depth
    python bench/post_training.py full --minutes 8.5        # starts nothing that would not end in time
    python bench/post_training.py lora --only lora_fp8 --again   # one entry anew
    python bench/post_training.py lora --tiny --results DIR # on CPUs, tiny: whether it runs at all
    python bench/post_training.py list                      # every entry with its estimate
    python bench/post_training.py report                    # the page alone, from what is there

With --one-gpu everything goes to post_training_one_gpu.json and .md. Each entry is one start of `paceline train`, or of
bench/post_training_baseline.py, on the conversations that bench/post_training_data.py wrote, in processes of its own.
It is written the moment it ends, failed ones with their last lines; those are tried again, after everything that was
never tried. bench/post_training.sh makes the data and calls this; bench/runner.py runs the jobs.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from dense_table import loss_text
from found import an_object, bench_record, every_step, ran_out, rounded
from post_training_data import write
from post_training_jobs import CORPORA, PARTS, TINY, Job, jobs_of, tiny
from post_training_report import FIGURES, figures, page
from results import Results
from runner import Bench, Found, main

from paceline.config.load import load_recipe

ONE_GPU = "--one-gpu"
KINDS = {"train": dict, "baseline": dict, "convert": dict, "ran_out": dict}


class PostTrainingResults(Results):
    """The results on one and two GPUs, or those on one with models cut in depth."""

    def __init__(self, folder: Path, *, one_gpu: bool) -> None:
        self.one_gpu = one_gpu
        options = f" {ONE_GPU}" if one_gpu else ""
        super().__init__(folder, name_of(one_gpu=one_gpu), KINDS, f"bench/post_training.sh{options}")

    def page(self) -> list[str]:
        return page(self.data, one_gpu=self.one_gpu)

    def pages_of(self, data: dict[str, Any]) -> None:
        page(data, one_gpu=self.one_gpu)


def name_of(*, one_gpu: bool) -> str:
    return "post_training_one_gpu" if one_gpu else "post_training"


def command_of(job: Job, folder: Path) -> list[str]:
    if job.kind == "convert":
        return ["bench/convert.py", f"--folder={folder}/room", *job.sets]
    sets = [f"--set={item}" for item in job.sets]
    if job.kind == "train":
        return ["-m", "paceline", "train", job.recipe, f"--nproc={job.processes}", *sets, f"--set=run.dir={folder}/run"]
    # one process without a launcher, whose own last lines would hide those of what failed
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.processes}"]
    measured = [f"--warm-up={job.warm_up}", f"--steps={job.steps}", f"--gemm-seconds={job.gemm_seconds}"]
    script = ["bench/post_training_baseline.py", job.recipe, f"--recompute={job.recompute}", *measured]
    return [*(several if job.processes > 1 else []), *script, f"--out={folder}/line.jsonl", *sets]


def found_in(job: Job, folder: Path) -> Found:
    """The figures, or that memory ran out.

    Raises:
        OSError, LookupError, TypeError, ValueError: it left nothing usable, and not for lack of memory.
    """
    log = folder / "log"
    try:
        if job.kind == "convert":
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            return {"convert": an_object(next(line for line in reversed(lines) if line.startswith('{"bench"')))}, []
        if job.kind == "baseline":
            return {"baseline": bench_record(folder, FIGURES)}, []
        return {"train": train_figures(job, folder)}, []
    except StopIteration:
        raise ValueError("no line of results") from None
    except (OSError, LookupError, ValueError):
        if entry := ran_out(folder):
            return entry, []
        raise


def train_figures(job: Job, folder: Path) -> dict[str, Any]:
    """Of `paceline train`, by the device's own clock.

    Raises:
        OSError, LookupError, TypeError, ValueError: the run did not get that far.
    """
    records = every_step(job, folder)
    # the time between the ends of two steps, from the second step on
    seconds = json.loads((folder / "run" / "step_seconds.json").read_text())[job.warm_up - 1 :]
    if len(seconds) < job.steps:
        raise ValueError(f"{len(seconds)} of {job.steps} measured steps")
    train = load_recipe(job.recipe, list(job.sets)).config.train
    step_seconds = statistics.median(seconds)
    return {
        "step_seconds": step_seconds,
        "step_seconds_min": min(seconds),
        "step_seconds_max": max(seconds),
        "steps": len(seconds),
        "tokens_per_second_per_gpu": train.global_batch_size * train.seq_len / step_seconds / job.processes,
        "peak_memory_gib": records[-1]["memory_gib"],
        "loss": rounded(records[-1]["loss"], 5),
        "losses": [rounded(record["loss"], 5) for record in records],
    }


def said(job: Job, entry: dict[str, Any]) -> str:
    if "ran_out" in entry:
        return "ran out of memory"
    if "convert" in entry:
        return f"{entry['convert']['hf_to_paceline_share_of_disk']:.2f} of a plain copy"
    made = figures(entry)
    assert made is not None
    return (
        f"{made['step_seconds']:.3f} s a step, {made['tokens_per_second_per_gpu']:,.0f} tokens/s, "
        f"{made['peak_memory_gib']:.1f} GiB, loss {loss_text(made['loss'])}"
    )


def bench_of(*, one_gpu: bool) -> Bench:
    return Bench(
        name=name_of(one_gpu=one_gpu),
        parts=PARTS,
        jobs_of=functools.partial(jobs_of, one_gpu=one_gpu),
        tiny=tiny,
        results=functools.partial(PostTrainingResults, one_gpu=one_gpu),
        command_of=command_of,
        found_in=found_in,
        about=lambda job: {"work": job.work, "precision": job.precision, "layers": job.layers},
        said=said,
        side_by_side=lambda job: False,
        gpus=1 if one_gpu else 0,
    )


def make_data(arguments: list[str]) -> None:
    """The conversations that the parts asked for read."""
    if not {"lora", "full", "moe"} & set(arguments):
        return
    for corpus in (TINY,) if "--tiny" in arguments else CORPORA:
        folder = Path(corpus.folder)
        write(folder, vocab=corpus.vocab, seq_len=corpus.seq_len, rows=corpus.rows, whole=corpus.whole)


if __name__ == "__main__":
    asked_for_one = ONE_GPU in sys.argv
    sys.argv = [item for item in sys.argv if item != ONE_GPU]
    make_data(sys.argv[1:])
    main(bench_of(one_gpu=asked_for_one), __doc__)
