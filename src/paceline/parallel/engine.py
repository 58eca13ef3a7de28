"""The data-parallel seam: what the training step, the optimizer and checkpoints see of how a model is spread.

Order of one optimizer step, the same for every engine:

    engine.zero_gradients()
    for index, batch in enumerate(micro_batches):
        with engine.accumulate(last=index == len(micro_batches) - 1):
            output = engine.model(batch.tokens, batch.labels)
            (output.loss_sum / global_tokens).backward()
    engine.reduce_gradients()             # main parameters now hold the SUM over micro-batches and data-parallel ranks
    optimizer.step()                      # over engine.main_parameters(); or skipped: then nothing else is needed
    engine.publish_weights()              # the model computes with the new weights from the next forward on
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from paceline.checkpoint.pieces import ShardedValue
from paceline.models.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class MainParameter:
    """The part of one parameter that this rank's optimizer updates.

    A parameter of which this rank holds no element has no MainParameter here; `Engine.weights()` names it all the same.
    """

    name: str
    """Fully qualified name in the plain model."""
    param: nn.Parameter
    """A plain local fp32 tensor (fp64 in a model of that precision): in the flat engine a 1-D range of the flattened
    parameter, in the FSDP engine the local shard. `Engine.reduce_gradients` sets ``grad``. On the host if offloaded."""
    global_shape: torch.Size
    locate: Callable[[Tensor], ShardedValue]
    """See `pieces`."""

    def pieces(self, local: Tensor) -> ShardedValue:
        """A tensor laid out like ``param`` (a moment, for example) as pieces of a tensor of the global shape.

        The pieces are views: loading writes into ``local``.
        """
        assert local.shape == self.param.shape, f"{self.name}: {tuple(local.shape)} is not {tuple(self.param.shape)}"
        return self.locate(local)


class Engine(Protocol):
    """Owns the memory of parameters and gradients, their precision, and all data-parallel communication."""

    model: Transformer

    def materialize(self, init: Callable[[Transformer], None]) -> None:
        """Gives a model built on the meta device its memory, and weights.

        ``init`` fills the parameters and buffers of the model it is given, by name: the same values on every rank,
        whatever is sharded. It may be called several times, with only some of the parameters there (others are None).
        """

    def main_parameters(self) -> list[MainParameter]:
        """What the optimizer updates, in the order of the model's parameters. The same objects every time."""

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one micro-batch; gradients are sent during the ``last`` one only."""

    def reduce_gradients(self) -> None:
        """After the last micro-batch: every ``grad`` of the main parameters is there, summed, never averaged."""

    def sum_over_shards(self, value: Tensor) -> Tensor:
        """Sum of a tensor over the ranks that hold different parts of the parameters: squared norms, found-inf flags.

        ``value`` may be changed in place. The result is the same on every rank of the mesh.
        """

    def publish_weights(self) -> None:
        """After the update: compute weights follow the main parameters, perhaps not before the next forward."""

    def wait_for_weights(self) -> None:
        """Compute weights are all there: before anything but the model's own forward reads them."""

    def zero_gradients(self) -> None:
        """Before the first micro-batch."""

    def weights(self) -> dict[str, ShardedValue]:
        """Main weights and persistent buffers by name: what a checkpoint stores.

        Every name of the model is there on every rank (tied parameters once), perhaps without pieces. Loading writes
        into the pieces, then calls `publish_weights`.
        """

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes that this engine holds now, from its tensors.

        ``parameters`` (what the model computes with, or its shards), ``gradients``, ``masters`` (fp32 copies that are
        not the parameters themselves): on the model's device; ``host``: in host memory, pinned beside a GPU.
        """
