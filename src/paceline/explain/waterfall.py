"""From the datasheet's peak down to what was reached: where does a step go, and what did `plan` expect?

Every part is seconds of a mean step, averaged over ranks, and they sum to the step. What is measured is told apart
from what is only split as predicted: phases and waits are measured always; GEMMs, attention and memory-bound
operators within forward and backward only in a capture or a trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from paceline.costs.hardware import Hardware, find_hardware
from paceline.costs.step import StepEstimate, predict
from paceline.costs.workload import INTERCONNECTS, Cluster, Workload
from paceline.errors import PacelineError
from paceline.explain.run_folder import Numbers, RunView
from paceline.explain.shares import Shares, mean_known
from paceline.observe.telemetry.columns import AXES
from paceline.report import units

TERA = 1e12


@dataclass(frozen=True, kw_only=True)
class Part:
    """``expected``: what `plan` predicts for it; None where it does not speak of it."""

    name: str
    seconds: float
    expected: float | None
    measured: bool
    """False: the sum of some parts is measured, the split among them is `plan`'s."""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Waterfall:
    step_seconds: float
    parts: tuple[Part, ...]
    estimate: StepEstimate | None
    basis: str
    """What the peak and the prediction are of."""

    def seconds(self, name: str) -> float:
        return sum(part.seconds for part in self.parts if part.name == name)


def make_waterfall(view: RunView, shares: Shares, kinds: Mapping[str, float] | None = None) -> Waterfall | None:
    """None where there is no record of a settled step.

    Args:
        kinds: seconds of a capture's forward and backward by part (`Attribution.by_part`), where there is one on a GPU.
    """
    if not len(view.shown_steps):
        return None
    step = float(mean_known(shares.wall))
    estimate, card = expectation(view)
    expected = dict(estimate.parts) if estimate else {}
    parts = _compute(view, shares, estimate, card, kinds)
    waiting = _waiting(shares)
    for axis in AXES:
        parts.append(
            _measured(
                f"communication, {axis}" if axis != "rest" else "communication, other",
                waiting[axis],
                expected.get(f"{axis}_communication"),
            )
        )
    parts += [
        _measured(
            "pipeline bubble",
            waiting["pipeline"],
            None if not expected else expected["bubble"] + expected["pp_communication"],
            "waiting for another stage",
        ),
        _measured("stragglers", waiting["stragglers"], 0.0 if expected else None, "waiting for slower ranks"),
        _measured("data", _mean(shares, "data"), 0.0 if expected else None),
        _measured("optimizer", _mean(shares, "optimizer") + _mean(shares, "publish"), expected.get("optimizer")),
        _measured("gradient reduction", _mean(shares, "reduce"), None, "copies and casts around it"),
        _measured("checkpoint", _mean(shares, "checkpoint"), 0.0 if expected else None),
        _measured("evaluation", _mean(shares, "evaluation"), 0.0 if expected else None),
        _measured("logging", _mean(shares, "log"), None),
        _measured("host", _host(shares), expected.get("overhead"), _host_note(shares)),
    ]
    parts.append(_measured("not attributed", step - sum(part.seconds for part in parts), None))
    shown = tuple(part for part in parts if abs(part.seconds) > 1e-4 * step or (part.expected or 0) > 1e-3 * step)
    return Waterfall(step_seconds=step, parts=shown, estimate=estimate, basis=_basis(view, estimate, card))


def expectation(view: RunView) -> tuple[StepEstimate | None, Hardware | None]:
    """`plan`'s step for this recipe on these cards; None where the cards are not in the table."""
    card = find_hardware(str(view.fact("device_name", "")))
    config = view.config
    if config is None or card is None or not view.on_gpu:
        return None, card
    per_node = int(view.fact("local_world_size", 0)) or config.cluster.gpus_per_node
    usual = "ib400" if card.nvlink_gb_per_s else "eth100"
    cluster = Cluster(
        gpu=card,
        gpus=view.world_size,
        gpus_per_node=min(per_node, view.world_size),
        node_gb_per_s=INTERCONNECTS[usual][0],
    )
    try:
        return predict(Workload.of(config), cluster), card
    except PacelineError:
        return None, card


_INSIDE = ("gemm", "attention", "memory_bound", "launch", "recompute")
_NAMES = {
    "gemm": "GEMM shapes",
    "attention": "attention",
    "memory_bound": "memory-bound operators",
    "launch": "kernel launches",
    "recompute": "recompute",
}


def _compute(
    view: RunView,
    shares: Shares,
    estimate: StepEstimate | None,
    card: Hardware | None,
    kinds: Mapping[str, float] | None,
) -> list[Part]:
    """Forward and backward without waits: the work at the peak, at the ceiling, and what is above it."""
    inside = float(mean_known(shares.own["forward"] + shares.own["backward"])) - _hidden(shares)
    flops = view.fact("flops_per_token")
    tokens = view.fact("tokens_per_step")
    peak = view.fact("peak_tflops")
    if not (flops and tokens and peak and view.world_size):
        own = own_parts(shares)
        note = _ON_PROCESSOR if _hidden(shares) > 0.005 * inside else ""
        return [_measured(name, float(mean_known(own[name])), None, note) for name in ("forward", "backward")]
    ideal = float(flops) * float(tokens) / view.world_size / (float(peak) * TERA)
    if ideal > inside:
        # faster than the peak: it is another device's, or another precision's; no part of it would mean anything
        return [
            _measured(name, _mean(shares, name), None, "above the peak that is set") for name in ("forward", "backward")
        ]
    share = _ceiling(view, card)
    ceiling = min(ideal / share, max(inside, ideal)) - ideal
    parts = [
        _measured("model FLOPs at the datasheet peak", ideal, ideal, f"{peak:g} TFLOP/s"),
        Part(
            name="datasheet peak to measured ceiling",
            seconds=ceiling,
            expected=ideal / share - ideal,
            measured=False,
            note=f"the best large GEMM reaches {share:.0%} of the peak (table of hardware)",
        ),
    ]
    rest = inside - ideal - ceiling
    if estimate is None and not kinds:
        return [
            *parts,
            _measured(
                "above the ceiling",
                rest,
                None,
                "GEMM shapes, attention, memory-bound operators: measure with --capture",
            ),
        ]
    expected = (
        _beyond_ceiling({name: float(estimate.parts[name]) for name in _INSIDE}, ideal / share) if estimate else {}
    )
    weights = expected
    if kinds and sum(kinds.values()) > 0:
        scale = inside / sum(kinds.values())
        weights = _beyond_ceiling({name: value * scale for name, value in kinds.items()}, ideal + ceiling)
    total = sum(weights.values())
    for name in _INSIDE:
        split = rest * weights.get(name, 0.0) / total if total > 0 else 0.0
        note = "by a capture's kernels" if kinds else ""
        parts.append(
            Part(name=_NAMES[name], seconds=split, expected=expected.get(name), measured=bool(kinds), note=note)
        )
    return parts


def _ceiling(view: RunView, card: Hardware | None) -> float:
    """Share of the peak that the best large product reaches, in this run's precision; 0.8 for an unknown card."""
    if card is None:
        return 0.8
    return card.fp8_matmul_share if view.recipe.get("train.precision") == "fp8" else card.matmul_share


def _beyond_ceiling(seconds: Mapping[str, float], at_ceiling: float) -> dict[str, float]:
    """What GEMMs and attention take beyond the time that all model FLOPs need at the ceiling, and all other parts."""
    products = seconds.get("gemm", 0.0) + seconds.get("attention", 0.0)
    left = max(products - at_ceiling, 0.0) / products if products else 0.0
    return {name: value * (left if name in ("gemm", "attention") else 1.0) for name, value in seconds.items()}


def _hidden(shares: Shares) -> float:
    """Garbage collection and waiting for a processor that fell into forward and backward: by their share of the step's
    own work, on a CPU. On a GPU the stream's times do not hold them."""
    return 0.0 if shares.on_device else _lost(shares)


def _lost(shares: Shares) -> float:
    return float(mean_known(_lost_in_compute(shares)))


_ON_PROCESSOR = "without garbage collection and waiting for a processor"


def _host_note(shares: Shares) -> str:
    lost = _hidden(shares)
    if lost <= 0:
        return "between phases, garbage collection"
    return (
        f"{units.duration(lost)} of forward and backward in garbage collection or without a processor; between phases"
    )


def own_parts(shares: Shares) -> dict[str, Numbers]:
    """[ranks], seconds of a mean step by part, in the waterfall's sense: on a CPU forward and backward are without
    what was spent in garbage collection and waiting for a processor, which is part of ``host``."""
    found = {"host" if name == "other" else name: mean_known(values, axis=1) for name, values in shares.own.items()}
    if shares.on_device:
        return found
    lost = mean_known(_lost_in_compute(shares), axis=1)
    inside = np.maximum(found["forward"] + found["backward"], 1e-12)
    for name in ("forward", "backward"):
        found[name] = found[name] * (1 - lost / inside)
    return found | {"host": found["host"] + lost}


def _lost_in_compute(shares: Shares) -> Numbers:
    return np.minimum(shares.queue + shares.collections, 0.9 * (shares.own["forward"] + shares.own["backward"]))


def _host(shares: Shares) -> float:
    return _mean(shares, "other") + _hidden(shares)


def _mean(shares: Shares, phase: str) -> float:
    return float(mean_known(shares.own[phase]))


def _waiting(shares: Shares) -> Mapping[str, float]:
    """Waits by axis and in the pipeline, without what the last rank of all does not wait: that is the stragglers'.

    The rank that waits least in a step is the one the others wait for; its waits are communication itself.
    """
    outside = {axis: float(mean_known(values)) for axis, values in shares.axis_waits.items()}
    in_meeting = float(mean_known(shares.phase("sync")))
    pipeline = float(mean_known(shares.phase("pipeline")))
    # collectives within `sync` and `pipeline` are in both counts
    twice = float(mean_known(_meeting_waits(shares)))
    everyone = shares.waits - shares.phase("pipeline")
    least = float(mean_known(everyone.min(axis=0))) if len(everyone) else 0.0
    mean = float(mean_known(everyone))
    stragglers = max(mean - least, 0.0)
    named = sum(outside.values()) - twice + in_meeting
    scale = least / named if named > 0 else 0.0
    found = {axis: value * scale for axis, value in outside.items()}
    found["rest"] += max(in_meeting - twice, 0.0) * scale
    return found | {"pipeline": pipeline, "stragglers": stragglers}


def _meeting_waits(shares: Shares) -> np.ndarray:
    view = shares.view
    both = np.nan_to_num(view.column("blocked_sync_us")) + np.nan_to_num(view.column("blocked_pipeline_us"))
    return both * 1e-6


def _measured(name: str, seconds: float, expected: float | None, note: str = "") -> Part:
    return Part(name=name, seconds=seconds, expected=expected, measured=True, note=note)


def _basis(view: RunView, estimate: StepEstimate | None, card: Hardware | None) -> str:
    name = view.fact("device_name", "an unknown device")
    if not view.on_gpu:
        return f"{name}: a CPU has no peak in the table, and `plan` predicts GPUs only."
    if card is None:
        return f"{name} is not in the table of hardware: no ceiling and no prediction."
    if estimate is None:
        return f"{name}; there is no prediction, since the recipe cannot be read or not be laid out."
    return f"{name}: peak and ceiling from the table of hardware, expected from `plan` ({estimate.convention})."
