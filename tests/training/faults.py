"""A plugin that breaks a step: ``run.name = "KIND:FIRST:LAST:RANK"`` says how, in which steps and on which rank.

| kind | what is not finite |
| --- | --- |
| loss | the loss, and so every gradient |
| constant | the loss alone: it has nan added that no gradient passes |
| module | the output of the last block's feed-forward matrix |
| gradient | the gradient of one parameter |
| once | as `loss`, but not when the step is run again |
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.config.plugins import Registry
from paceline.config.run import RunConfig
from paceline.data.batch import Batch
from paceline.observe.hooks import Hook, StepStart
from paceline.tasks.pretrain import Pretrain
from paceline.tasks.task import Forward, LossTerms

MODULE = "blocks.1.feed_forward.down_proj"
PARAMETER = "blocks.0.attention.q_proj.weight"


class Now(Hook):
    """Which step is it?"""

    step = 0

    def on_step_start(self, start: StepStart) -> None:
        self.step = start.step


class Faulty(Pretrain):
    def __init__(self, config: RunConfig, now: Now) -> None:
        self.kind_of_fault, first, last, rank = config.run.name.split(":")
        self.steps = range(int(first), int(last) + 1)
        self.here = dist.get_rank() == int(rank)
        self.now = now
        self.hooked = False
        self.done: set[int] = set()

    @property
    def is_due(self) -> bool:
        return self.here and self.now.step in self.steps

    def loss(self, model: Forward, batch: Batch) -> LossTerms:
        assert isinstance(model, nn.Module)
        if not self.hooked:
            self.hooked = True
            if self.kind_of_fault == "module":
                model.get_submodule(MODULE).register_forward_hook(lambda module, inputs, output: self.spoil(output))
            if self.kind_of_fault == "gradient":
                model.get_parameter(PARAMETER).register_hook(self.spoil)
        terms = super().loss(model, batch)
        if not self.is_due:
            return terms
        if self.kind_of_fault == "constant":
            return terms._replace(loss_sum=terms.loss_sum + torch.tensor(torch.nan))
        if self.kind_of_fault == "loss" or (self.kind_of_fault == "once" and self.now.step not in self.done):
            self.done.add(self.now.step)
            return terms._replace(loss_sum=terms.loss_sum * torch.nan)
        return terms

    def spoil(self, tensor: Tensor) -> Tensor:
        return tensor * torch.nan if self.is_due else tensor


def register(registry: Registry) -> None:
    now = Now()
    registry.hook(lambda config: now)
    registry.task("faulty", lambda config: Faulty(config, now))
