"""A plugin that breaks a step in one pipeline stage: ``run.name = "KIND:FIRST:LAST:RANK"`` says how, when and where.

| kind | what happens |
| --- | --- |
| loss | the loss, which is in the last stage, is not finite |
| raise | the loss raises |
| name of a module | what this module gives is not finite |
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from paceline.config.plugins import Registry
from paceline.config.run import RunConfig
from paceline.data.batch import Batch
from paceline.models.transformer import Transformer
from paceline.observe.hooks import Hook, RunEnd, RunStart, StepStart
from paceline.tasks.pretrain import Pretrain
from paceline.tasks.task import Forward, LossTerms

WORDS = "the fault that was asked for"


class Fault(Hook):
    """Which step is it, and is the fault due?"""

    def __init__(self, config: RunConfig) -> None:
        self.kind, first, last, rank = config.run.name.split(":")
        self.steps = range(int(first), int(last) + 1)
        self.here = dist.get_rank() == int(rank)
        self.step = 0
        self.stages: dict[nn.Module, str] = {}
        self.handle = register_module_forward_hook(self.after_module) if self.kind.startswith("blocks.") else None

    @property
    def is_due(self) -> bool:
        return self.here and self.step in self.steps

    def on_start(self, start: RunStart) -> None:
        self.step = start.start_step

    def on_step_start(self, start: StepStart) -> None:
        self.step = start.step

    def on_end(self, end: RunEnd) -> None:
        if self.handle is not None:
            self.handle.remove()

    def after_module(self, module: nn.Module, args: object, output: object) -> object:
        """A plugin is not handed the model; it sees a stage when it has passed once."""
        if isinstance(module, Transformer):
            self.stages |= {part: name for name, part in module.named_modules()}
        if self.is_due and self.stages.get(module, "").endswith(self.kind):
            assert isinstance(output, Tensor)
            return output * torch.nan
        return None


class FaultyTask(Pretrain):
    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def loss(self, model: Forward, batch: Batch) -> LossTerms:
        if self.fault.kind == "raise" and self.fault.is_due:
            raise RuntimeError(WORDS)
        terms = super().loss(model, batch)
        if self.fault.kind == "loss" and self.fault.is_due:
            return terms._replace(loss_sum=terms.loss_sum * torch.nan)
        return terms


def register(registry: Registry) -> None:
    faults: list[Fault] = []

    def hook(config: RunConfig) -> Fault:
        return fault_of(config)

    def fault_of(config: RunConfig) -> Fault:
        if not faults:
            faults.append(Fault(config))
        return faults[0]

    registry.hook(hook)
    registry.task("faulty", lambda config: FaultyTask(fault_of(config)))
