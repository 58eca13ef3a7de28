"""Runs this rank's stages through the micro-batches of a step, in the order of `costs/pipeline.py`.

One runtime executes every schedule's action lists. The library's schedule objects (`torch.distributed.pipelining`,
2.11 - 2.13) are not used, because they cannot do what a step of ours needs:

| needed | the library's schedules |
| --- | --- |
| router losses back-propagated on the stage that made them | a loss on the last stage only |
| losses already divided by counts of the global batch | one loss function, called without knowing its micro-batch |
| dropout seeded by micro-batch | no moment at which a stage knows its micro-batch |
| gradient hooks of the flat engine in W | W computes with `autograd.grad`, which runs no hooks of parameters |
| any number of micro-batches | interleaved ones: only in rounds of one size |
| two stages that share an embedding | refused, or left to the caller |

Without pipeline parallelism this is the plain loop: forward, backward, forward, backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from paceline.config.parallel import ParallelConfig
from paceline.costs.pipeline import Action, Actions, schedule, stages_of, why_not
from paceline.models.transformer import Transformer
from paceline.observe.phases import NO_PHASES, Phases
from paceline.parallel.channels import Exchange, Links, Message, Sent, message_after, sent_between_ranks
from paceline.parallel.deferred import DeferredWeights, Product, deliver
from paceline.parallel.engine import Engine
from paceline.parallel.mesh import ParallelMesh

HOST_RUNS = 2
"""Runs of each kind, training and evaluation, whose messages go through the host (see `channels`). The second one too:
torch.compile may compile anew when gradients and optimizer have been there once."""


class Forwarded(NamedTuple):
    """What the forward pass of a stage gives."""

    hidden: Tensor | None
    """[B, T_local, C] for the stage after; None from the last."""
    loss: Tensor | None
    """Scalar to back-propagate on this stage, already divided; None if it has none."""


Forward = Callable[[int, int, Tensor | None], Forwarded]
"""(stage as an index on this rank, micro-batch, hidden state from the stage before) -> `Forwarded`."""


class Pipeline:
    """This rank's part of the pipeline. Making one is collective over all ranks of the world.

    Args:
        stages: of this rank, in the order of the model.
    """

    def __init__(
        self, stages: Sequence[Transformer], engine: Engine, mesh: ParallelMesh, config: ParallelConfig
    ) -> None:
        self._engine, self._rank = engine, mesh["pp"].index
        self._name, self._ranks, self._per_rank = config.pipeline_schedule, config.pp, len(stages)
        own = stages_of(self._name, self._ranks, self._per_rank, self._rank)
        self._local = {stage: index for index, stage in enumerate(own)}
        self._last_stage = self._ranks * self._per_rank - 1
        self._plans: dict[tuple[int, bool], _Plan] = {}
        channels = {each.channel for each in self._plan(2 * self._ranks, training=True).sent}
        self._links = Links(mesh, config, channels)
        self._runs = {True: 0, False: 0}
        """So far, training and not."""
        self.deferred = DeferredWeights()
        self.phases: Phases = NO_PHASES
        self.peak_in_flight = 0
        """Most (stage, micro-batch) pairs whose activations this rank held at a time in the last `train`."""

    def train(self, micro_batches: int, hidden_shape: torch.Size, dtype: torch.dtype, forward: Forward) -> None:
        """Forward and backward of all micro-batches: their gradients are in the engine, not yet reduced.

        Args:
            hidden_shape: [B, T_local, C] of what one stage gives the next.
            dtype: of the same.
            forward: runs a stage. Called for each stage of this rank and each micro-batch once, in the order of the
                schedule; layers that recompute run again in backward without it.
        """
        plan = self._plan(micro_batches, training=True)
        run = self._begin(plan, hidden_shape, dtype, forward, training=True)
        for index, action in enumerate(plan.actions):
            stage = self._local[action.stage]
            with self._engine.accumulate(last=index == plan.last_of_stage[action.stage], stage=stage):
                self.phases.mark("forward" if action.kind == "F" else "backward")
                if action.kind == "F":
                    run.forward(action)
                elif action.kind == "W":
                    run.weight_gradients(action)
                else:
                    run.backward(action)
        self.phases.mark("pipeline")
        run.finish()
        self.peak_in_flight = run.peak

    @torch.no_grad()
    def evaluate(self, micro_batches: int, hidden_shape: torch.Size, dtype: torch.dtype, forward: Forward) -> None:
        """Forward passes alone; nothing is kept of a micro-batch once it has gone on."""
        plan = self._plan(micro_batches, training=False)
        run = self._begin(plan, hidden_shape, dtype, forward, training=False)
        for action in plan.actions:
            run.forward_only(action)
        run.finish()

    def _begin(
        self, plan: _Plan, hidden_shape: torch.Size, dtype: torch.dtype, forward: Forward, *, training: bool
    ) -> _Run:
        through_host = self._runs[training] < HOST_RUNS
        self._runs[training] += 1
        return _Run(self, plan, self._links.begin(plan.sent, hidden_shape, dtype, through_host=through_host), forward)

    def _plan(self, micro_batches: int, *, training: bool) -> _Plan:
        key = (micro_batches, training)
        if key not in self._plans:
            reason = why_not(self._name, self._ranks, self._per_rank, micro_batches)
            assert not reason, reason
            lists = schedule(self._name, self._ranks, self._per_rank, micro_batches)
            if not training:
                lists = tuple(tuple(action for action in actions if action.kind == "F") for actions in lists)
            self._plans[key] = _Plan(
                actions=lists[self._rank], last_stage=self._last_stage, sent=tuple(sent_between_ranks(lists))
            )
        return self._plans[key]

    def local_index(self, stage: int) -> int:
        return self._local[stage]


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """One rank's actions, and all messages between ranks."""

    actions: Actions
    last_stage: int
    sent: tuple[Sent, ...]

    @cached_property
    def splits(self) -> bool:
        """Whether weight gradients have actions of their own."""
        return any(action.kind == "W" for action in self.actions)

    @cached_property
    def last_of_stage(self) -> dict[int, int]:
        """By stage: the index of the action that brings its last gradients (in its list, backward comes last)."""
        return {action.stage: index for index, action in enumerate(self.actions)}

    @cached_property
    def leaving(self) -> frozenset[Message]:
        """Messages that go to another rank, or come from one; all others stay on this rank."""
        return frozenset(each.message for each in self.sent)


@dataclass
class _InFlight:
    """What a stage keeps of a micro-batch between its forward and its backward."""

    hidden_in: Tensor | None
    output: GradientEdge | None
    """Where its output hangs in the graph: the values themselves have gone on."""
    loss: Tensor | None
    products: list[Product] = field(default_factory=list)
    """Between I and W."""


class _Run:
    """One step through the lists: what is in flight now."""

    def __init__(self, pipeline: Pipeline, plan: _Plan, exchange: Exchange, forward: Forward) -> None:
        self._pipeline, self._plan, self._exchange, self._forward = pipeline, plan, exchange, forward
        self._handed: dict[Message, Tensor] = {}
        """Between two stages on this rank."""
        self._in_flight: dict[tuple[int, int], _InFlight] = {}
        self.peak = 0

    def forward(self, action: Action) -> None:
        hidden = self._take("forward", action) if action.stage > 0 else None
        if hidden is not None:
            hidden.requires_grad_()
        with self._pipeline.deferred.deferring() if self._plan.splits else nullcontext():
            result = self._forward(self._pipeline.local_index(action.stage), action.micro_batch, hidden)
        assert (result.hidden is None) == (action.stage == self._plan.last_stage), (
            f"{action}: every stage but the last gives hidden states"
        )
        output = None
        if result.hidden is not None:
            output = get_gradient_edge(result.hidden)
            self._pass_on(action, result.hidden.detach())
        kept = _InFlight(hidden_in=hidden, output=output, loss=result.loss)
        self._in_flight[action.stage, action.micro_batch] = kept
        self.peak = max(self.peak, len(self._in_flight))

    def backward(self, action: Action) -> None:
        """The whole backward (B), or all of it but the products for weights (I)."""
        key = (action.stage, action.micro_batch)
        kept = self._in_flight[key]
        roots: list[Any] = []  # tensors and edges: autograd takes both together, its annotation does not
        seeds: list[Tensor] = []
        if kept.output is not None:
            roots.append(kept.output)
            seeds.append(self._take("backward", action))
        if kept.loss is not None and kept.loss.requires_grad:
            roots.append(kept.loss)
            # 1, or nan where the loss is not finite: then every gradient is; see training/step.py
            seeds.append(kept.loss.detach() * 0 + 1)
        kept.output = kept.loss = None
        if action.kind == "I":
            kept.products = self._pipeline.deferred.backward(roots, seeds)
        else:
            torch.autograd.backward(roots, seeds)
            del self._in_flight[key]
        hidden, kept.hidden_in = kept.hidden_in, None
        if hidden is not None:
            assert hidden.grad is not None, f"{action}: the stage does not depend on its input"
            self._pass_on(action, hidden.grad)

    def weight_gradients(self, action: Action) -> None:
        deliver(self._in_flight.pop((action.stage, action.micro_batch)).products)

    def forward_only(self, action: Action) -> None:
        hidden = self._take("forward", action) if action.stage > 0 else None
        result = self._forward(self._pipeline.local_index(action.stage), action.micro_batch, hidden)
        if result.hidden is not None:
            self._pass_on(action, result.hidden)

    def finish(self) -> None:
        assert not self._in_flight and not self._handed, "a micro-batch is not through"
        self._exchange.finish()

    def _take(self, way: str, action: Action) -> Tensor:
        message = Message("forward" if way == "forward" else "backward", action.stage, action.micro_batch)
        if message not in self._plan.leaving:
            return self._handed.pop(message)
        self._pipeline.phases.mark("pipeline")
        received = self._exchange.receive(message)
        self._pipeline.phases.mark(message.way)
        return received

    def _pass_on(self, action: Action, tensor: Tensor) -> None:
        message = message_after(action, self._plan.last_stage)
        assert message is not None
        if message in self._plan.leaving:
            self._exchange.send(message, tensor)
        else:
            self._handed[message] = tensor
