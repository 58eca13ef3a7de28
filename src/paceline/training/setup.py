"""The one place where the parts of a run meet: mesh, model, engine, optimizer, task."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.config.lora import LoraConfig
from paceline.config.model import MoESpec
from paceline.config.plugins import Registry
from paceline.config.run import RunConfig
from paceline.config.task import TaskConfig
from paceline.costs.adapters import step_flops_per_token
from paceline.costs.hardware import peak_tflops
from paceline.costs.layers import Documents
from paceline.costs.low_precision import MULTIPLE
from paceline.costs.placement import share
from paceline.costs.stages import cut_stages
from paceline.kernels.attention import attention_core
from paceline.kernels.cross_entropy import ChunkedHeadLoss, PlainHeadLoss
from paceline.kernels.fp8_head import Fp8Head
from paceline.kernels.log_probs import LabelLogProbs
from paceline.models.init import WeightInit
from paceline.models.lora import attach_adapters
from paceline.models.transformer import Transformer
from paceline.observe.experts import ExpertMeter
from paceline.observe.metrics import Meter, Rates
from paceline.optim.build import Optimizer, build_optimizer
from paceline.parallel.apply import parallelize
from paceline.parallel.delayed_scales import DelayedScales
from paceline.parallel.engine import Engine
from paceline.parallel.fp8_device import refuse_without_fp8
from paceline.parallel.frozen import FrozenBase, refuse_without_torchao
from paceline.parallel.low_precision import Fp8Options
from paceline.parallel.mesh import ParallelMesh
from paceline.parallel.pipeline import Pipeline
from paceline.parallel.regions import sum_replicated
from paceline.runtime.device import device_name, device_uuid, memory_stats
from paceline.runtime.energy import EnergyCounter
from paceline.runtime.log import log_once
from paceline.runtime.process import ProcessInfo
from paceline.tasks.documents import SumParts
from paceline.tasks.dpo import Dpo
from paceline.tasks.kto import Kto
from paceline.tasks.orpo import Orpo
from paceline.tasks.pretrain import Pretrain
from paceline.tasks.reward import Reward
from paceline.tasks.sft import Sft
from paceline.tasks.task import Task
from paceline.training.reference import Reference, build_reference
from paceline.training.staged import StagedTask
from paceline.training.step import TrainStep

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A model that is ready to train, and what trains it."""

    config: RunConfig
    info: ProcessInfo
    device: torch.device
    mesh: ParallelMesh
    stages: tuple[Transformer, ...]
    """This rank's parts of the model"""
    engine: Engine
    base: FrozenBase
    """Frozen weights that are kept in fewer bits once they have come"""
    scales: DelayedScales
    """Of fp8 operands, where they are those of earlier steps"""
    optimizer: Optimizer
    staged: StagedTask
    step: TrainStep
    reference: Reference | None = None
    documents: Documents | None = None
    """Of the training data, where rows hold several that do not see each other"""


def build_parts(
    config: RunConfig,
    registry: Registry,
    info: ProcessInfo,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    done: Callable[[str], object] = lambda phase: None,
) -> Parts:
    """Builds the model on the meta device, spreads it, gives it memory and its initial weights. Collective.

    Args:
        dtype: of the main weights; float64 makes a reference that rounding does not blur.
        done: told of each phase that is over.

    Raises:
        ConfigError: the recipe does not fit the number of ranks, or fp8 the device.
    """
    if config.train.precision == "fp8":
        refuse_without_fp8(device, config.train.fp8_own_scaling)
    if config.lora.on and config.lora.base == "nf4":
        refuse_without_torchao()
    mesh = ParallelMesh(config.parallel, world_size=info.world_size, rank=info.rank, device_type=device.type)
    done("mesh")
    plain = build_model(config, dtype=dtype)
    cut = cut_stages(config, config.parallel.stages)
    precision, fp8 = config.train.precision, Fp8Options.of(config.train)
    widen = not config.optim.reads_any_gradient
    options: dict[str, Any] = {"cut": cut, "fp8": fp8, "widen_gradients": widen, "base_in": config.lora.base}
    spread = parallelize(plain, config.parallel, mesh, precision, device, **options)
    engine = spread.engine
    engine.materialize(WeightInit(config.model, config.run.seed, config.lora))
    optimizer = build_optimizer(config.optim, engine, mesh)
    reference = build_reference(
        config,
        stages=spread.stages,
        engine=engine,
        plain=lambda: build_model(config.model_copy(update={"lora": LoraConfig()}), dtype=dtype),
        mesh=mesh,
        device=device,
    )

    def sum_parts(value: Tensor) -> Tensor:
        return sum_replicated(value, mesh["cp"], "cp/task")

    pipeline = Pipeline(spread.stages, engine, mesh, config.parallel)
    done("model")
    staged = StagedTask(
        config,
        task=build_task(config, registry, sum_parts),
        stages=spread.stages,
        pipeline=pipeline,
        mesh=mesh,
        sum_parts=sum_parts,
        reference=reference,
        dtype=dtype,
    )
    return Parts(
        config=config,
        info=info,
        device=device,
        mesh=mesh,
        stages=spread.stages,
        engine=engine,
        base=spread.base,
        scales=spread.scales,
        optimizer=optimizer,
        staged=staged,
        reference=reference,
        step=TrainStep(config, staged=staged, engine=engine, optimizer=optimizer, mesh=mesh, scales=spread.scales),
    )


def build_model(
    config: RunConfig, device: torch.device | str = "meta", *, dtype: torch.dtype = torch.float32
) -> Transformer:
    """The plain model of the recipe, with the kernels that `[train]` names and the adapters that `[lora]` does."""
    train = config.train
    compiled, fp8 = config.parallel.compile, _fp8_head(config)
    chunked = ChunkedHeadLoss(chunk_tokens=train.loss_chunk_tokens, compiled=compiled, fp8=fp8)
    model = Transformer(
        config.model,
        dtype=dtype,
        device=device,
        core=attention_core(train.attention_kernel),
        head_loss=PlainHeadLoss() if train.loss_kernel == "plain" else chunked,
        log_probs=LabelLogProbs(
            chunk_tokens=0 if train.loss_kernel == "plain" else train.loss_chunk_tokens, compiled=compiled, fp8=fp8
        ),
    )
    attach_adapters(model, config.lora)
    return model


def _fp8_head(config: RunConfig) -> Fp8Head | None:
    """How the head is multiplied in fp8; None if it is not. Of the plain model: tp tells it what it cuts."""
    train, model, tp = config.train, config.model, config.parallel.tp
    if train.precision != "fp8" or not train.fp8_head:
        return None
    rows = {stop - start for start, stop in (share(model.vocab_size, tp, index) for index in range(tp))}
    odd = [size for size in (*rows, model.hidden_size) if size % MULTIPLE]
    if not odd:
        return Fp8Head(scaling=train.fp8_own_scaling, kernel=train.fp8_cast_kernel)
    text = "the head stays in bf16: of its sizes (a rank's rows, hidden_size) %d is not a multiple of %d, as fp8 needs"
    log_once(log, logging.WARNING, text, odd[0], MULTIPLE)
    return None


def build_task(config: RunConfig, registry: Registry, sum_parts: SumParts) -> Task:
    """The task that `task.kind` names; `config.check` has refused unknown ones."""
    kind = config.task.kind
    if kind in registry.tasks:
        found: Task = registry.tasks[kind](config)
        return found
    of_tokens: dict[str, Callable[[], Task]] = {"pretrain": Pretrain, "sft": Sft}
    if kind in of_tokens:
        return of_tokens[kind]()
    of_answers: dict[str, Callable[[TaskConfig, SumParts], Task]] = {
        "dpo": Dpo,
        "orpo": Orpo,
        "kto": Kto,
        "reward": Reward,
    }
    return of_answers[kind](config.task, sum_parts)


def rates(config: RunConfig, device: torch.device, documents: Documents | None) -> Rates:
    """FLOPs of a token and the peak that MFU is measured against; no peak where the device is not in the table.

    Attention counts within ``documents``, where rows hold several.
    In fp8 the peak is fp8's for all FLOPs, also those of attention and the head, which run in bf16.
    """
    peak = config.observe.peak_tflops
    if not peak and device.type == "cuda":
        peak = peak_tflops(device_name(device), config.train.precision) or 0.0
    convention = config.observe.flops_convention
    return Rates(
        flops_per_token=step_flops_per_token(config, convention, documents),
        flops_convention=convention if documents is None else f"{convention} within documents",
        peak_tflops=peak or None,
    )


def build_meter(parts: Parts, *, tokens_before: int = 0, skipped_before: int = 0) -> Meter:
    """What turns steps into records."""
    train, model = parts.config.train, parts.config.model
    extra = [name for name, on in (("aux_loss", model.is_moe), ("mtp_loss", model.mtp_layers > 0)) if on]
    extra += parts.staged.traits.means
    return Meter(
        parts.device,
        rates(parts.config, parts.device, parts.documents),
        tokens_per_step=train.global_batch_size * train.seq_len,
        num_devices=parts.info.world_size,
        memory_bytes=lambda: memory_stats(parts.device).peak_bytes,
        joules=energy_reader(parts.device),
        tokens_before=tokens_before,
        skipped_before=skipped_before,
        mean_names=tuple(extra),
    )


def energy_reader(device: torch.device) -> Callable[[], float | None]:
    """Gives the joules that this rank's device has used; None each time where that is not known."""
    uuid = device_uuid(device)
    counter = None if uuid is None else EnergyCounter.open(uuid)
    return (lambda: None) if counter is None else counter.joules


def build_expert_meter(config: RunConfig, device: torch.device) -> ExpertMeter | None:
    """What counts the load of experts; None for a dense model."""
    names = {f"blocks.{spec.index}": spec for spec in config.model.blocks()}
    names |= {f"mtp.{depth}.block": spec for depth, spec in enumerate(config.model.mtp_blocks(), start=1)}
    layers = [name for name, spec in names.items() if isinstance(spec.feed_forward, MoESpec)]
    return ExpertMeter(device, layers, config.model.num_experts) if layers else None
