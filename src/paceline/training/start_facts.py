"""What is told of a run before its first step: model, batch, layout, device."""

from __future__ import annotations

from pathlib import Path

from paceline.costs.layers import count_parameters
from paceline.observe.hooks import RunStart
from paceline.report import units
from paceline.runtime.device import device_name
from paceline.training.adapters import adapter_facts
from paceline.training.setup import Parts


def run_start(parts: Parts, folder: Path, start_step: int) -> RunStart:
    """For `Hook.on_start`. ``start_step``: steps that are done already."""
    config, info = parts.config, parts.info
    count = count_parameters(config.model)
    parameters = units.count(count.total)
    if config.model.is_moe:
        parameters += f", {units.count(count.active)} active"
    train = config.train
    micro = train.global_batch_size // (train.micro_batch_size * parts.mesh.dp_size)
    facts = {
        "model": f"{parameters} parameters" + (f" ({config.model.preset})" if config.model.preset else ""),
        "batch": f"{train.global_batch_size} sequences of {train.seq_len} tokens, "
        f"{micro} micro-batch{'es' * (micro > 1)} a rank",
        "layout": f"{info.world_size} rank{'s' * (info.world_size > 1)}, {_degrees(parts)}"
        f"zero {config.parallel.zero} ({config.parallel.engine} engine), "
        f"{train.precision}, gradients reduced in {config.parallel.reduce_dtype}",
        "device": device_name(parts.device),
        **adapter_facts(config),
        "run folder": str(folder),
    }
    return RunStart(
        run_name=config.run.name,
        run_dir=folder,
        start_step=start_step,
        total_steps=train.steps,
        rank=info.rank,
        world_size=info.world_size,
        device=str(parts.device),
        recipe=config.model_dump(mode="json"),
        facts=facts,
    )


def _degrees(parts: Parts) -> str:
    """The axes along which there is more than one rank, as "tp 2, pp 4, "; with the schedule of a pipeline."""
    parallel = parts.config.parallel
    sizes = {axis: parts.mesh.size(axis) for axis in ("tp", "pp", "cp", "ep", "etp", "dp")}
    more = {"pp": f" ({parallel.pipeline_schedule})", "cp": f" ({parallel.cp_method})"}
    return "".join(f"{axis} {size}{more.get(axis, '')}, " for axis, size in sizes.items() if size > 1)
