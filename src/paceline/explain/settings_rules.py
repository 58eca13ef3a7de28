"""Which settings of the recipe and the environment make the step longer than it need be?

A price comes from what was measured where that tells it (the forward that full recomputation repeats), else from the
ratio of two predictions of `plan`; where neither can speak, the price is "not determined" and the way to measure it is
named.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from paceline.config.run import RunConfig
from paceline.costs.adapters import count_learned
from paceline.costs.hardware import find_hardware
from paceline.costs.layers import training_flops_per_token
from paceline.costs.step import predict
from paceline.costs.workload import Cluster, Workload
from paceline.errors import PacelineError
from paceline.explain.cause import Cause
from paceline.explain.run_folder import RunView
from paceline.explain.shares import Shares, mean_known
from paceline.explain.waterfall import Waterfall
from paceline.observe.telemetry.columns import AXES

LEFTOVERS = {
    "CUDA_LAUNCH_BLOCKING": ("1", "every kernel waits for the one before and the host for all of them"),
    "NCCL_P2P_DISABLE": ("1", "GPUs of a node talk through host memory instead of NVLink or PCIe"),
    "NCCL_IB_DISABLE": ("1", "nodes talk over TCP sockets instead of InfiniBand or RoCE"),
    "NCCL_SHM_DISABLE": ("1", "processes of a node talk over the network"),
    "NCCL_NVLS_ENABLE": ("0", "NVSwitch does not reduce"),
    "NCCL_NET_GDR_LEVEL": ("LOC|0", "network cards copy through host memory"),
    "NCCL_DEBUG": ("TRACE", "every call is written to the log"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "every collective is checked among ranks before it runs"),
    "TORCH_CPP_LOG_LEVEL": ("INFO", "torch logs every collective"),
    "NCCL_BLOCKING_WAIT": ("1", "the host waits in every collective"),
    "TORCH_NCCL_BLOCKING_WAIT": ("1", "the host waits in every collective"),
    "NCCL_MAX_NCHANNELS": ("1|2", "collectives use a fraction of the links"),
    "NCCL_ALGO": ("Tree|TREE|Ring|RING", "NCCL may not choose the algorithm by size"),
    "NCCL_PROTO": ("LL|Simple|SIMPLE|LL128", "NCCL may not choose the protocol by size"),
}
"""What a person sets to find a fault and forgets: values, and what it costs. `paceline doctor` knows all variables."""

_OF_COMMUNICATION = frozenset(name for name in LEFTOVERS if name.startswith("NCCL_"))


def settings_causes(view: RunView, shares: Shares, waterfall: Waterfall) -> Iterator[Cause]:
    """From recipe and environment, priced by the record."""
    yield from _leftovers(view, shares, waterfall)
    config = view.config
    if config is None:
        return
    yield from _recomputation(view, shares, config)
    # one of NCCL's variables has its price already
    if not any(name in _OF_COMMUNICATION for name, *_ in leftovers(view)):
        yield from _exposed(view, shares, config)
    if view.on_gpu:
        yield from _predicted(view, waterfall, config)


def _leftovers(view: RunView, shares: Shares, waterfall: Waterfall) -> Iterator[Cause]:
    """What a variable of NCCL costs is at most the communication that nothing hides, beyond what `plan` expects."""
    exposed = of_communication(shares)
    expected = 0.0
    if waterfall.estimate is not None:
        expected = waterfall.estimate.seconds * waterfall.estimate.exposed_communication
    step = max(float(mean_known(shares.wall)), 1e-12)
    share = max(exposed - expected, 0.0) / step
    for name, value, effect in leftovers(view):
        priced = name in _OF_COMMUNICATION and view.world_size > 1 and share > 0
        yield Cause(
            id="explain.leftover-variable",
            subject=f"{name}={value} is set, which looks like a leftover of debugging",
            evidence=f"With it {effect}."
            + (f" Collectives hold ranks up for {exposed / step:.0%} of the step." if priced else ""),
            next_step=f"Unset {name} (`unset {name}`), or say why it is needed; `paceline doctor` explains it.",
            share=share if priced else None,
            severity="warning",
            gain=f"{share:.1%} of the step at most" if priced else "",
        )


def leftovers(view: RunView) -> list[tuple[str, str, str]]:
    """(name, value, what it does)"""
    environment = view.fact("environment", {})
    return [
        (name, str(environment[name]), effect)
        for name, (values, effect) in LEFTOVERS.items()
        if re.fullmatch(values, str(environment.get(name, "")))
    ]


def of_communication(shares: Shares) -> float:
    """Seconds that collectives hold up the rank that waits least: what they take by themselves."""
    together = sum(np.nan_to_num(values) for values in shares.axis_waits.values())
    return float(np.mean(np.min(together, axis=0))) if np.size(together) else 0.0


def _recomputation(view: RunView, shares: Shares, config: RunConfig) -> Iterator[Cause]:
    modes = config.parallel.recompute
    each = modes if isinstance(modes, tuple) else (modes,)
    full = sum(mode == "full" for mode in each) / len(each)
    if not full:
        return
    forward = float(np.nanmean(np.max(shares.own["forward"], axis=0)))
    step = float(mean_known(shares.wall))
    free = _free_memory(view)
    room = "" if free is None else f" At the peak {free:.0%} of the card's memory are free."
    yield Cause(
        id="explain.full-recompute",
        subject="every block's forward is computed a second time in backward",
        evidence=f"parallel.recompute = {'full' if full == 1 else f'full in {full:.0%} of the layers'}; a "
        "step's forward "
        f"takes {forward * 1e3:.1f} ms of {step * 1e3:.1f} ms, and about as much again in backward.{room}",
        next_step="--set parallel.recompute=selective if memory allows it, or none; `paceline plan` says what fits.",
        share=full * forward * _blocks_share(config) / step,
    )


def _blocks_share(config: RunConfig) -> float:
    """Of a forward's FLOPs; the head is not computed again."""
    model = config.model
    head = 2.0 * model.hidden_size * model.vocab_size
    forward = training_flops_per_token(model, config.train.seq_len) / 3
    return max(0.0, 1 - head / forward)


def _free_memory(view: RunView) -> float | None:
    card = find_hardware(str(view.fact("device_name", "")))
    if card is None or not view.knows("peak_mb"):
        return None
    return 1 - float(np.nanmax(view.column("peak_mb"))) * 2**20 / card.memory_bytes


_ADVICE = {
    "dp": "--set parallel.reduce_dtype=bf16 halves the bytes, more micro-batches a step hide more, and a smaller "
    "parallel.bucket_mb starts earlier",
    "tp": "a smaller parallel.tp: tensor parallelism wants NVLink, and only as much as memory needs",
    "cp": "a smaller parallel.cp, or --set parallel.cp_method=ulysses",
    "ep": "a smaller parallel.ep, or --set parallel.expert_dispatch=all_gather for few ranks",
    "pp": "fewer, larger messages: a larger train.micro_batch_size",
    "rest": "it is not ours: look at a capture",
}


def _exposed(view: RunView, shares: Shares, config: RunConfig) -> Iterator[Cause]:
    """Collectives that nothing hides, without waiting for late ranks: the rank that waits least pays them alone."""
    step = max(float(mean_known(shares.wall)), 1e-12)
    for axis in AXES[:-1]:
        waits = shares.axis_waits[axis]
        if not waits.size or not np.nansum(waits):
            continue
        seconds = float(np.mean(np.nanmin(waits, axis=0)))
        sent = float(np.nanmean(view.column(f"sent_{axis}_kb"))) * 1024
        one_bucket = axis == "dp" and in_one_bucket(config)
        advice = _ADVICE[axis]
        if one_bucket:
            advice = "--set parallel.bucket_mb=25: all gradients are in one bucket, so none travels during backward"
        yield Cause(
            id="explain.exposed-communication",
            subject=f"{seconds / step:.0%} of the step is communication of {axis} that nothing hides",
            evidence=f"{seconds * 1e3:.1f} ms a step on the rank that waits least, {sent / 1e6:.1f} MB of tensors: "
            f"{sent / max(seconds, 1e-9) / 1e9:.2f} GB/s while exposed.",
            next_step=f"{advice[0].upper()}{advice[1:]}.",
            share=seconds / step,
            certain=one_bucket or view.on_gpu,
        )


def in_one_bucket(config: RunConfig) -> bool:
    """Whether all large gradients of a rank, of what learns, are reduced together at the end of a step."""
    parallel = config.parallel
    width = 2 if parallel.accumulate_dtype == "bf16" else 4
    elements = count_learned(config) / (parallel.tp * parallel.pp)
    # small gradients are bound by latency: cutting them up would not help
    return parallel.engine == "flat" and 2**26 < elements * width <= parallel.bucket_mb * 2**20


def _predicted(view: RunView, waterfall: Waterfall, config: RunConfig) -> Iterator[Cause]:
    """Changes that `plan` says are faster on these cards."""
    card = find_hardware(str(view.fact("device_name", "")))
    if card is None:
        return
    per_node = int(view.fact("local_world_size", 0)) or config.cluster.gpus_per_node
    cluster = Cluster(gpu=card, gpus=view.world_size, gpus_per_node=min(per_node, view.world_size))
    work = Workload.of(config)

    def saved(changed: Workload) -> float | None:
        """Share of the step; None where it cannot be laid out or does not fit."""
        try:
            now, then = predict(work, cluster), predict(changed, cluster)
        except PacelineError:
            return None
        return 1 - then.seconds / now.seconds if then.fits else None

    if work.precision == "fp32":
        share = saved(replace(work, precision="bf16"))
        yield Cause(
            id="explain.fp32",
            subject="matrix products run in fp32, outside the tensor cores",
            evidence=f"train.precision = fp32; {card.name} has {card.fp32 or '?'} TFLOP/s in fp32 and "
            f"{card.bf16} in bf16.",
            next_step="--set train.precision=bf16 (masters, moments and the loss stay in fp32).",
            share=share,
        )
    doubled = work.micro_batch_size * 2
    if work.micro_batches(cluster.gpus) >= 2 and config.parallel.pp == 1:
        best, size = 0.0, 0
        while work.global_batch_size % (work.dp(cluster.gpus) * doubled) == 0 and doubled <= 64:
            share = saved(replace(work, micro_batch_size=doubled))
            if share is not None and share > best + 0.01:
                best, size = share, doubled
            doubled *= 2
        if size:
            yield Cause(
                id="explain.small-micro-batch",
                subject=f"micro-batches of {work.micro_batch_size} are too small for this card",
                evidence=f"{work.micro_batches(cluster.gpus)} micro-batches a step; `plan` predicts {best:.0%} "
                "less time "
                f"with {size}, and that it fits.",
                next_step=f"--set train.micro_batch_size={size}",
                share=best,
            )
    if not work.fused_attention:
        yield Cause(
            id="explain.plain-attention",
            subject="attention materialises its scores",
            evidence=f"train.attention_kernel = {config.train.attention_kernel}.",
            next_step="--set train.attention_kernel=auto",
            share=saved(replace(work, fused_attention=True)),
        )
    if not work.compile and config.parallel.pp == 1:
        share = saved(replace(work, compile=True))
        yield Cause(
            id="explain.not-compiled",
            subject="blocks are not compiled",
            evidence="parallel.compile = false: element-wise operators run one by one.",
            next_step="--set parallel.compile=true",
            share=share,
            certain=False,
        )
