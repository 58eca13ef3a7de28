"""The one place where the parts of a run meet: mesh, model, engine, optimizer, task."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.config.plugins import Registry
from paceline.config.run import RunConfig
from paceline.costs.hardware import peak_tflops
from paceline.costs.layers import training_flops_per_token
from paceline.kernels.attention import attention_core
from paceline.kernels.cross_entropy import ChunkedHeadLoss, PlainHeadLoss
from paceline.models.init import WeightInit
from paceline.models.transformer import Transformer
from paceline.observe.metrics import Meter, Rates
from paceline.optim.build import Optimizer, build_optimizer
from paceline.parallel.apply import parallelize
from paceline.parallel.engine import Engine
from paceline.parallel.mesh import ParallelMesh
from paceline.runtime.device import device_name, memory_stats
from paceline.runtime.process import ProcessInfo
from paceline.tasks.pretrain import Pretrain
from paceline.tasks.task import Task
from paceline.training.step import TrainStep


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A model that is ready to train, and what trains it."""

    config: RunConfig
    info: ProcessInfo
    device: torch.device
    mesh: ParallelMesh
    model: Transformer
    engine: Engine
    optimizer: Optimizer
    task: Task
    step: TrainStep


def build_parts(config: RunConfig, registry: Registry, info: ProcessInfo, device: torch.device) -> Parts:
    """Builds the model on the meta device, spreads it, gives it memory and its initial weights. Collective.

    Raises:
        ConfigError: the recipe does not fit the number of ranks.
    """
    mesh = ParallelMesh(config.parallel, world_size=info.world_size, rank=info.rank, device_type=device.type)
    plain = build_model(config)
    engine = parallelize(plain, config.parallel, mesh, config.train.precision, device).engine
    engine.materialize(WeightInit(config.model, config.run.seed))
    optimizer = build_optimizer(config.optim, engine, mesh)
    task = build_task(config, registry)
    step = TrainStep(config, task=task, model=engine.stages[0], engine=engine, optimizer=optimizer, mesh=mesh)
    return Parts(
        config=config,
        info=info,
        device=device,
        mesh=mesh,
        model=engine.stages[0],
        engine=engine,
        optimizer=optimizer,
        task=task,
        step=step,
    )


def build_model(config: RunConfig, device: torch.device | str = "meta") -> Transformer:
    """The plain model of the recipe, with the kernels that `[train]` names."""
    train = config.train
    chunked = ChunkedHeadLoss(chunk_tokens=train.loss_chunk_tokens, compiled=config.parallel.compile)
    return Transformer(
        config.model,
        device=device,
        core=attention_core(train.attention_kernel),
        head_loss=PlainHeadLoss() if train.loss_kernel == "plain" else chunked,
    )


def build_task(config: RunConfig, registry: Registry) -> Task:
    """The task that `task.kind` names; `config.check` has refused unknown ones."""
    factory = registry.tasks.get(config.task.kind)
    return Pretrain() if factory is None else factory(config)


def rates(config: RunConfig, device: torch.device) -> Rates:
    """FLOPs of a token and the peak that MFU is measured against; no peak where the device is not in the table."""
    peak = config.observe.peak_tflops
    if not peak and device.type == "cuda":
        peak = peak_tflops(device_name(device), config.train.precision) or 0.0
    convention = config.observe.flops_convention
    return Rates(
        flops_per_token=training_flops_per_token(config.model, config.train.seq_len, convention),
        flops_convention=convention,
        peak_tflops=peak or None,
    )


def build_meter(parts: Parts, *, tokens_before: int = 0, skipped_before: int = 0) -> Meter:
    """What turns steps into records."""
    train, model = parts.config.train, parts.config.model
    extra = [name for name, on in (("aux_loss", model.is_moe), ("mtp_loss", model.mtp_layers > 0)) if on]
    return Meter(
        parts.device,
        rates(parts.config, parts.device),
        tokens_per_step=train.global_batch_size * train.seq_len,
        num_devices=parts.info.world_size,
        memory_bytes=lambda: memory_stats(parts.device).peak_bytes,
        tokens_before=tokens_before,
        skipped_before=skipped_before,
        mean_names=tuple(extra),
    )
