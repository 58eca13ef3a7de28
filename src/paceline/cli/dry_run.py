"""`paceline train --dry-run`: what would each rank hold and do? Arithmetic over the recipe; torch is not loaded."""

from __future__ import annotations

from rich.console import Console

from paceline.cli.layout_tables import holdings_table, mesh_table, stages_table
from paceline.config.check import check, refuse_errors
from paceline.config.load import Recipe
from paceline.config.plugins import Registry
from paceline.config.run import RunConfig
from paceline.costs.hardware import find_hardware, hardware_names
from paceline.costs.layers import count_parameters, training_flops_per_token
from paceline.costs.memory import MemoryEstimate, estimate_pipeline
from paceline.costs.parameters import Holdings
from paceline.data.indexed import IndexedDataset
from paceline.data.sidecar import read_sidecar
from paceline.errors import ConfigError
from paceline.report import units
from paceline.report.console import make_console, print_findings, print_table
from paceline.report.finding import Finding
from paceline.report.table import Table, table
from paceline.runtime.launcher import process_info

SAFE_SHARE = 0.8
"""Estimates up to this share of the memory have not been seen to run out of it (see `costs/memory.py`)."""

_KINDS = {
    "weights": "what the model computes with, or its shards",
    "gathered": "weights whole for a while, gradients not yet reduced",
    "gradients": "",
    "masters": "fp32 copies that the optimizer updates",
    "moments": "the optimizer's state",
    "activations": "kept for the backward pass of a micro-batch",
    "logits": "head and loss of a micro-batch",
}


def dry_run(recipe: Recipe, nproc: int | None) -> None:
    """Checks the recipe and prints what a run of it would be. Starts nothing, writes nothing.

    Args:
        nproc: world size; None = what the launcher's environment says, or the machines of `[cluster]`, or 1.

    Raises:
        ConfigError: the recipe is not usable on so many ranks.
    """
    config = recipe.config
    world_size = nproc or _world_size(config)
    findings = check(config, recipe.registry, world_size)
    refuse_errors(findings)
    _check_data(config, recipe.registry)
    holdings, estimates = Holdings(config, world_size), estimate_pipeline(config, world_size)
    memory = max(estimates, key=lambda found: found.total)
    console = make_console()
    print_table(console, _work(config, world_size))
    for shown in (
        mesh_table(config, holdings.grid),
        *((stages_table(config),) if config.parallel.pp > 1 else ()),
        holdings_table(config, holdings, estimates),
        _memory(memory),
    ):
        console.print()
        print_table(console, shown)
    findings += _fits(config, memory)
    if findings:
        console.print()
        print_findings(console, findings)
    _end(console, config)


def _world_size(config: RunConfig) -> int:
    info, cluster = process_info(), config.cluster
    return cluster.nodes * cluster.gpus_per_node if info.launcher == "single" and cluster.nodes else info.world_size


def _check_data(config: RunConfig, registry: Registry) -> None:
    """Opens every dataset: there, whole, long enough for a sequence, and of a vocabulary that fits the model.

    Raises:
        DataError, ConfigError: as the run itself would.
    """
    for value in (config.data.train, config.data.valid, config.data.test):
        paths = [value] if isinstance(value, str) else [source.path for source in value]
        for path in paths:
            if path in ("", "synthetic") or path.partition(":")[0] in registry.data_sources:
                continue
            tokens = int(IndexedDataset(path).lengths.sum(dtype="int64"))
            sidecar = read_sidecar(path)
            if sidecar is not None and sidecar.vocab_size > config.model.vocab_size:
                raise ConfigError(
                    f"the vocabulary of {path}, {sidecar.vocab_size:,}, is larger than model.vocab_size = "
                    f"{config.model.vocab_size:,}",
                    next_step=f"Set model.vocab_size to at least {sidecar.vocab_size}.",
                )
            if tokens <= config.train.seq_len:
                raise ConfigError(
                    f"{path} holds {tokens:,} tokens, not enough for one sequence of train.seq_len = "
                    f"{config.train.seq_len:,} and its next token",
                    next_step=f"Set train.seq_len below {tokens}, or build a larger dataset.",
                )


def _work(config: RunConfig, world_size: int) -> Table:
    train, count = config.train, count_parameters(config.model)
    tokens = train.global_batch_size * train.seq_len
    micro = train.global_batch_size // (train.micro_batch_size * config.parallel.dp_degree(world_size))
    convention = config.observe.flops_convention
    flops = training_flops_per_token(config.model, train.seq_len, convention)
    parameters = units.count(count.total)
    if config.model.is_moe:
        parameters += f" in all, {units.count(count.active)} active"
    name = f" ({config.model.preset})" if config.model.preset else ""
    rows = [
        ("parameters", f"{parameters}{name}", f"{count.total:,}"),
        ("tokens a step", units.count(tokens), f"{train.global_batch_size} sequences of {train.seq_len}"),
        (
            "micro-batches a step",
            str(micro),
            f"on each rank, of {train.micro_batch_size} sequence{'s' * (train.micro_batch_size > 1)}",
        ),
        ("tokens of the run", units.count(tokens * train.steps), f"{train.steps:,} steps"),
        ("FLOPs a token", f"{units.count(flops)}", f"forward and backward, {convention} attention, no recomputation"),
        ("FLOPs of the run", f"{flops * tokens * train.steps:.3g}", "FLOPs a token x tokens"),
    ]
    return table(("run", "", ""), rows)


def _memory(memory: MemoryEstimate) -> Table:
    sizes = memory.as_dict()
    rows = [(kind, units.gib(sizes[kind]), why) for kind, why in _KINDS.items() if sizes[kind]]
    rows.append(("total", units.gib(memory.total), "on the device"))
    if memory.host:
        rows.append(("host", units.gib(memory.host), "offloaded, in host memory"))
    notes = ("Estimated; not in it: CUDA and its libraries (1-3 GB), buffers of NCCL, fragmentation.",)
    return table(("kind", ">memory", ""), rows, title="Memory of the most loaded rank", notes=notes)


def _fits(config: RunConfig, memory: MemoryEstimate) -> list[Finding]:
    """Whether it fits the GPU that `cluster.gpu` names; nothing where none is named."""
    if not config.cluster.gpu:
        return []
    hardware = find_hardware(config.cluster.gpu)
    if hardware is None:
        raise ConfigError(
            f"cluster.gpu = {config.cluster.gpu!r} is not in the table of hardware",
            evidence=f"It has: {', '.join(hardware_names())}.",
            next_step="Take one of these names, or leave cluster.gpu empty.",
        )
    share = memory.total / (hardware.memory_gb * 1e9)
    if share <= SAFE_SHARE:
        return []
    return [
        Finding(
            id="costs.memory",
            severity="warning",
            subject=f"the estimate is {share:.0%} of the {hardware.memory_gb:g} GB of {hardware.name}",
            evidence=f"Up to {SAFE_SHARE:.0%} is safe; the largest part is {_largest(memory)}.",
            next_step="More ranks with parallel.zero = 1, 2 or 3, a smaller train.micro_batch_size, "
            "parallel.recompute = 'selective' or 'full', or parallel.offload.",
        )
    ]


def _largest(memory: MemoryEstimate) -> str:
    sizes = memory.as_dict()
    kind = max(_KINDS, key=lambda name: sizes[name])
    return f"{kind}, {units.gib(sizes[kind])}"


def _end(console: Console, config: RunConfig) -> None:
    console.print()
    console.print(f"run folder {config.run.folder}; nothing was started or written", markup=False)
