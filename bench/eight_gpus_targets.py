"""What the run on eight GPUs is held against, and whether it was reached: judged from the entries, never by hand."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from eight_gpus_jobs import COUNTS, NAIVE, jobs_of
from plan_results import AFTER, PREDICTIONS, Pair, percent

Entries: TypeAlias = Mapping[str, Mapping[str, Any]]

BF16_OVER_NAIVE, BEST_OVER_NAIVE = 2.7, 3.3
SCALING_KEPT = 0.97
TIME_ERROR, FIRST_CHOICE, MEMORY_ERROR = 0.07, 0.03, 0.04
NAIVE_KEY = f"thirteen/{NAIVE}"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One target."""

    what: str
    target: str
    found: str
    met: bool | None
    """None: what it takes has not been measured."""


def figures(entry: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Of a bench or of an explained run; None where there are none."""
    found: Mapping[str, Any] | None = None if entry is None else entry.get("bench") or entry.get("run")
    return found


def pairs(data: Mapping[str, Any], part: str = "") -> Iterator[Pair]:
    """Predictions that stood before their entry was measured; of one part, or of all."""
    for key, entry in data["entries"].items():
        predicted = data.get(PREDICTIONS, {}).get(key)
        if predicted is None or predicted.get(AFTER) or "failed" in entry or not key.startswith(part):
            continue
        yield Pair(key=key, title=entry["title"], predicted=predicted, measured=figures(entry))


def verdicts(data: Mapping[str, Any]) -> list[Verdict]:
    gpus = int(data["gpus"])
    return [
        _over_naive(data["entries"], gpus, "bf16", BF16_OVER_NAIVE),
        _over_naive(data["entries"], gpus, "best precision", BEST_OVER_NAIVE),
        _scaling(data["entries"], gpus),
        _layout_times(data),
        _first_choice(data["entries"], gpus),
        _memory(data),
    ]


def fastest(entries: Entries, keys: Iterator[str]) -> tuple[str, float] | None:
    """Key and tokens/s/GPU."""
    found = [(key, made["tokens_per_second_per_gpu"]) for key in keys if (made := figures(entries.get(key)))]
    return max(found, key=lambda item: item[1], default=None)


def _thirteen_keys(gpus: int, *, bf16_alone: bool) -> Iterator[str]:
    """Entries of the 13B, the naive one aside."""
    for part in ("thirteen", "layouts", "rungs"):
        for job in jobs_of(part, gpus=gpus):
            if job.key != NAIVE_KEY and (job.precision == "bf16" or not bf16_alone):
                yield job.key


def _over_naive(entries: Entries, gpus: int, precision: str, factor: float) -> Verdict:
    naive = figures(entries.get(NAIVE_KEY))
    best = fastest(entries, _thirteen_keys(gpus, bf16_alone=precision == "bf16"))
    what, target = f"gpt_13b on {gpus} GPUs, best over naive, {precision}", f">= {factor} x"
    if naive is None or best is None:
        return Verdict(what=what, target=target, found="", met=None)
    times = best[1] / naive["tokens_per_second_per_gpu"]
    found = f"{times:.2f} x: {best[1]:,.0f} (`{best[0]}`) / {naive['tokens_per_second_per_gpu']:,.0f} tokens/s/GPU"
    return Verdict(what=what, target=target, found=found, met=times >= factor)


def _scaling(entries: Entries, gpus: int) -> Verdict:
    few = COUNTS[-1]
    what, target = f"weak scaling {few} -> {gpus} GPUs, llama3_8b bf16", f">= {percent(SCALING_KEPT)} of tokens/s/GPU"
    ends = [figures(entries.get(f"scaling/8b_bf16_{count}")) for count in (few, gpus)]
    if gpus == few or ends[0] is None or ends[1] is None:
        return Verdict(what=what, target=target, found="", met=None)
    slow, fast = (end["tokens_per_second_per_gpu"] for end in ends if end)
    kept = fast / slow
    return Verdict(
        what=what, target=target, found=f"{percent(kept)}: {fast:,.0f} / {slow:,.0f}", met=kept >= SCALING_KEPT
    )


def _layout_times(data: Mapping[str, Any]) -> Verdict:
    errors = {pair.key: pair.time_error for pair in pairs(data, "layouts/") if pair.time_error is not None}
    asked = len(jobs_of("layouts", gpus=int(data["gpus"])))
    what, target = "`plan`, step time of the layouts", f"MAPE <= {percent(TIME_ERROR)}"
    if not errors:
        return Verdict(what=what, target=target, found="", met=None)
    mean = statistics.fmean(abs(error) for error in errors.values())
    worst = max(errors, key=lambda key: abs(errors[key]))
    found = f"{percent(mean)} over {len(errors)} of {asked} layouts, worst {100 * errors[worst]:+.1f} % (`{worst}`)"
    # a part of them decides nothing, unless it is too far off already
    met = mean <= TIME_ERROR if len(errors) == asked else None
    return Verdict(what=what, target=target, found=found, met=met)


def _first_choice(entries: Entries, gpus: int) -> Verdict:
    """Entries of the same work: the planner looked for the fastest of it in bf16."""
    what, target = "`plan`'s first choice, gpt_13b bf16", f"within {percent(FIRST_CHOICE)} of the best measured"
    keys = [job.key for part in ("thirteen", "layouts", "rungs") for job in jobs_of(part, gpus=gpus) if job.work]
    chosen, best = figures(entries.get("thirteen/planned")), fastest(entries, iter(keys))
    if entries.get("thirteen/planned", {}).get("ran_out"):
        return Verdict(what=what, target=target, found="it ran out of memory", met=False)
    if chosen is None or best is None or len([key for key in keys if figures(entries.get(key))]) < 2:
        return Verdict(what=what, target=target, found="", met=None)
    behind = 1 - chosen["tokens_per_second_per_gpu"] / best[1]
    return Verdict(what=what, target=target, found=f"{percent(behind)} behind `{best[0]}`", met=behind <= FIRST_CHOICE)


def _memory(data: Mapping[str, Any]) -> Verdict:
    found = list(pairs(data))
    what, target = "`plan`, memory of every entry", f"within {percent(MEMORY_ERROR)}"
    ran_out = [pair.key for pair in found if pair.measured is None and pair.predicted["fits"]]
    errors = {pair.key: pair.memory_error for pair in found if pair.memory_error is not None}
    if ran_out:
        return Verdict(what=what, target=target, found=f"said to fit, and ran out: {', '.join(ran_out)}", met=False)
    if not errors:
        return Verdict(what=what, target=target, found="", met=None)
    worst = max(errors, key=lambda key: abs(errors[key]))
    mean = statistics.fmean(abs(error) for error in errors.values())
    said = f"worst {100 * errors[worst]:+.1f} % (`{worst}`), mean {percent(mean)}, {len(errors)} entries"
    return Verdict(what=what, target=target, found=said, met=abs(errors[worst]) <= MEMORY_ERROR)
