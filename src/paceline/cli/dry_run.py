"""`paceline train --dry-run`: what would each rank hold and do? Arithmetic over the recipe; torch is not loaded."""

from __future__ import annotations

import math

from rich.console import Console

from paceline.cli.cards import asked_card, card_findings, card_lines
from paceline.cli.layout_tables import byte_unit, memory_table, mesh_table, parameters_table, stages_table
from paceline.config.check import check, refuse_errors
from paceline.config.load import Recipe
from paceline.config.plugins import Registry
from paceline.config.run import RunConfig
from paceline.costs.adapters import count_learned, step_flops_per_token
from paceline.costs.layers import Documents, count_parameters
from paceline.costs.memory import MemoryEstimate, estimate_pipeline
from paceline.costs.parameters import Holdings
from paceline.data.indexed import IndexedDataset
from paceline.data.sidecar import read_sidecar
from paceline.doctor.packages import judge_packages
from paceline.errors import ConfigError
from paceline.report import units
from paceline.report.console import make_console, print_findings, print_table
from paceline.report.table import Table, table
from paceline.runtime.launcher import process_info

_KINDS = {
    "weights": "what the model computes with, or its shards",
    "gathered": "weights whole for a while, gradients not yet reduced",
    "gradients": "summed over the micro-batches of a step",
    "masters": "fp32 copies that the optimizer updates",
    "moments": "the optimizer's state",
    "activations": "kept for the backward pass of a micro-batch",
    "logits": "head and loss of a micro-batch",
    "reference": "weights of the reference model",
}


def dry_run(recipe: Recipe, nproc: int | None) -> None:
    """Checks the recipe and prints what a run of it would be. Starts nothing, writes nothing.

    Args:
        nproc: world size; None = what the launcher's environment says, or the machines of `[cluster]`, or the fewest
            ranks that the layout fits.

    Raises:
        ConfigError: the recipe is not usable on so many ranks.
    """
    config = recipe.config
    world_size, reason = _world_size(config, nproc)
    asked_card(config)
    findings = check(config, recipe.registry, world_size)
    refuse_errors(findings)
    rows, documents = _check_data(config, recipe.registry)
    holdings, estimates = Holdings(config, world_size), estimate_pipeline(config, world_size)
    memory = max(estimates, key=lambda found: found.total)
    several = config.parallel.pp > 1
    console = make_console()
    print_table(console, _work(config, world_size, reason, documents))
    for shown in (
        mesh_table(config, holdings.grid),
        *((stages_table(config),) if several else ()),
        parameters_table(config, holdings),
        *((memory_table(estimates),) if several else ()),
        _memory(config, memory),
    ):
        console.print()
        print_table(console, shown)
    if rows:
        console.print()
    for line in rows:
        console.print(line, markup=False, soft_wrap=True)
    findings += [*judge_packages(config), *card_findings(config, memory, world_size)]
    if findings:
        console.print()
        print_findings(console, findings)
    _end(console, config)


def _world_size(config: RunConfig, nproc: int | None) -> tuple[int, str]:
    """The number of ranks, and who says so."""
    info, cluster, parallel = process_info(), config.cluster, config.parallel
    if nproc:
        return nproc, "--nproc"
    if info.launcher != "single":
        return info.world_size, f"the environment of {info.launcher} (or --nproc N)"
    if cluster.nodes:
        reason = f"cluster.nodes {cluster.nodes} x cluster.gpus_per_node {cluster.gpus_per_node}"
        return cluster.nodes * cluster.gpus_per_node, f"{reason} (or --nproc N)"
    fewest = parallel.model_ranks * parallel.dp_replicate * max(1, parallel.dp_shard)
    if not parallel.dp_shard:  # so many more that the experts fold over the ranks of a stage
        fewest = math.lcm(fewest, parallel.pp * parallel.ep * parallel.etp)
    if fewest == 1:
        return 1, "nothing says otherwise: --nproc N plans for N ranks"
    return fewest, "the fewest that the layout fits (or --nproc N)"


def _check_data(config: RunConfig, registry: Registry) -> tuple[list[str], Documents | None]:
    """Opens every dataset: there, whole, long enough for a sequence, and of a vocabulary that fits the model.

    Returns:
        Where data are rows, what they come to: examples, sequences, epochs; and the documents of a sequence.
    Raises:
        DataError, ConfigError: as the run itself would.
    """
    if (
        config.data.reads_rows(config.task.kind)
        and str(config.data.train).partition(":")[0] not in registry.data_sources
    ):
        return _rows(config)
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
    return [], None


def _rows(config: RunConfig) -> tuple[list[str], Documents | None]:
    from paceline.data.document_lengths import document_lengths
    from paceline.data.example_files import RowRequest
    from paceline.data.example_sets import build_row_datasets

    samples = config.train.steps * config.train.global_batch_size
    found = build_row_datasets(config.data, RowRequest.of(config, keep_tokens=False), train_samples=samples)
    lengths = document_lengths(found.train.source)
    documents = None if lengths is None else Documents(counts=lengths.counts, tokens=lengths.tokens)
    return [str(report) for report in found.reports], documents


def _work(config: RunConfig, world_size: int, reason: str, documents: Documents | None) -> Table:
    train, count = config.train, count_parameters(config.model)
    tokens = train.global_batch_size * train.seq_len
    micro = train.global_batch_size // (train.micro_batch_size * config.parallel.dp_degree(world_size))
    convention = config.observe.flops_convention
    flops = step_flops_per_token(config, convention, documents)
    seen = f"{convention} attention{' within documents' if documents else ''}"
    parameters = units.count(count.total)
    if config.model.is_moe:
        parameters += f", {units.count(count.active)} active"
    lora, learned = config.lora, count_learned(config)
    name = f" ({config.model.preset})" if config.model.preset else ""
    rows = [
        ("ranks", f"{world_size:,}", reason),
        ("parameters", parameters, f"{count.total:,}{name}"),
        *([("that learn", units.count(learned), f"{learned:,}, adapters of rank {lora.rank}")] if lora.on else []),
        ("tokens a step", units.count(tokens), f"{train.global_batch_size} sequences of {train.seq_len}"),
        (
            "micro-batches a step",
            str(micro),
            f"on each rank, of {train.micro_batch_size} sequence{'s' * (train.micro_batch_size > 1)}",
        ),
        ("tokens of the run", units.count(tokens * train.steps), f"{train.steps:,} steps"),
        *([] if documents is None else [_document_row(documents)]),
        ("FLOPs a token", f"{units.count(flops)}", f"forward and backward, {seen}, no recomputation"),
        ("FLOPs of the run", f"{flops * tokens * train.steps:.3g}", "FLOPs a token x tokens"),
    ]
    return table(("run", "", ""), rows)


def _document_row(documents: Documents) -> tuple[str, str, str]:
    around = documents.tokens_around
    return "a token's document", f"{around:,.0f} tokens", f"in the mean; for plan: data.document_tokens={around:.0f}"


def _memory(config: RunConfig, memory: MemoryEstimate) -> Table:
    sizes, (unit, divisor) = memory.as_dict(), byte_unit(memory.total)
    rows = [(kind, f"{sizes[kind] / divisor:.2f} {unit}", why) for kind, why in _KINDS.items() if sizes[kind]]
    rows.append(("total", f"{memory.total / divisor:.2f} {unit}", "on the device"))
    if memory.host:
        rows.append(("host", units.size(memory.host), "offloaded, in host memory"))
    notes = ("Estimated; not in it: CUDA and its libraries (1-3 GB), buffers of NCCL, fragmentation.",)
    title = "Memory of a rank" + (", the most loaded one" if config.parallel.pp > 1 else "")
    return table(("kind", ">memory", ""), rows, title=title, notes=(*notes, *card_lines(config, memory)))


def _end(console: Console, config: RunConfig) -> None:
    console.print()
    console.print(f"run folder {config.run.folder}; nothing was started or written", markup=False)
