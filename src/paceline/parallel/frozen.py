"""In what are frozen linears kept? (`lora.base`)

| | weights | read by |
| --- | --- | --- |
| bf16 | as the engine has them | every product |
| fp8 | e4m3 as they lie and transposed, cast once: 2 bytes an element; the bf16 ones are given up | fp8 products |
| nf4 | 4 bits, quantised once; the bf16 ones are given up | products that widen them (`kernels/nf4.py`) |

A weight that was given up leaves its parameter behind, of the same shape and dtype, as one number that is no number:
whoever reads it after all sees that at once.

Under tp each rank quantises its own part of a matrix, in its own blocks: results differ between layouts as other
roundings do. Products then gather and scatter as in `tensor.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import ConfigError, to_install
from paceline.kernels.nf4 import Nf4Weight, nf4_linear, quantizer, why_not_nf4
from paceline.models.attention import GroupedQueryAttention, LatentAttention
from paceline.models.feed_forward import FeedForward
from paceline.models.transformer import Transformer
from paceline.parallel.collectives import Axis
from paceline.parallel.linear import Meeting
from paceline.parallel.low_precision import Fp8Weights
from paceline.parallel.regions import gather_sequence, scatter_sum
from paceline.parallel.tensor import Sublayer, meeting_of
from paceline.runtime.log import log_once

log = logging.getLogger(__name__)


def refuse_without_torchao() -> None:
    """Before anything is built for NF4.

    Raises:
        ConfigError: torchao is missing.
    """
    try:
        quantizer()
    except ImportError as error:
        raise ConfigError(
            "lora.base = 'nf4' needs torchao",
            evidence=f"It cannot be imported here: {error}.",
            next_step=f"Set lora.base = 'bf16', or {to_install('qlora')}.",
        ) from error


class FrozenBase:
    """The frozen linears of a rank, in what they are kept once their weights have come."""

    def __init__(self) -> None:
        self._nf4: list[Nf4Linear] = []
        self._fp8: Fp8Weights | None = None

    def add(self, linears: Sequence[Nf4Linear]) -> None:
        self._nf4 += linears

    def keep_fp8(self, weights: Fp8Weights) -> None:
        """These copies, without what they were made of."""
        self._fp8 = weights

    @torch.no_grad()
    def settle(self) -> None:
        """The weights are there: quantises or casts them, matrix by matrix, and gives them up. Collective with tp."""
        for kept in self._nf4:
            kept.settle()
        if self._fp8 is not None:
            for linear in self._fp8.cast_frozen():
                give_up(linear)

    @property
    def nbytes(self) -> int:
        """Of what is kept in place of weights that were given up."""
        return sum(linear.nbytes for linear in self._nf4) + (0 if self._fp8 is None else self._fp8.nbytes)


def give_up(linear: nn.Linear) -> None:
    """The memory of a weight; its shape and dtype stay."""
    weight = linear.weight
    nothing = torch.full((1,), torch.nan, dtype=weight.dtype, device=weight.device).expand(weight.shape)
    linear._parameters["weight"] = nn.Parameter(nothing, requires_grad=False)


class Nf4Linear:
    """A frozen linear whose weight, once it is there, is kept in NF4."""

    def __init__(self, linear: nn.Linear) -> None:
        self._linear = linear
        self._kept: Nf4Weight | None = None

    def __call__(self, x: Tensor, *, bias: bool = True) -> Tensor:
        """``bias``: False leaves it to the caller."""
        added = self._linear.bias if bias else None
        if self._kept is None:
            return F.linear(x, self._linear.weight, added)
        return nf4_linear(x, self._kept, added)

    def settle(self) -> None:
        self._kept = Nf4Weight(self._linear.weight)
        give_up(self._linear)

    @property
    def nbytes(self) -> int:
        return 0 if self._kept is None else self._kept.nbytes


def keep_in_nf4(stage: Transformer, axis: Axis) -> list[Nf4Linear]:
    """Frozen linears of a stage's blocks multiply by NF4 once `settle` was called, in place. After tensors were cut
    over ``axis`` (tp), before adapters are joined."""
    found = []
    for name, module in stage.blocks.named_modules():
        if isinstance(module, GroupedQueryAttention | LatentAttention | FeedForward):
            meeting = None
            if axis.size > 1:
                meeting = meeting_of(module, axis, "tp/shared_experts" if name.endswith(".shared") else "")
            found += _change(module, meeting)
    return found


def _change(sublayer: Sublayer, meeting: Meeting | None) -> list[Nf4Linear]:
    kept: dict[nn.Linear, Nf4Linear] = {}
    for name, linear in sublayer.named_children():
        if isinstance(linear, nn.Linear):
            reason = why_not_nf4(linear.weight)
            if reason is None:
                kept[linear] = Nf4Linear(linear)
            else:
                log_once(log, logging.WARNING, "%s stays in bf16: %s. NF4 needs that.", name, reason)
    last = sublayer.down_proj if isinstance(sublayer, FeedForward) else sublayer.o_proj
    if meeting is not None:
        sublayer.project = _gathered(sublayer, kept, meeting)  # type: ignore[method-assign, assignment]
    for linear, product in kept.items():
        changed = product if meeting is None or linear is not last else _scattered(linear, product, meeting)
        linear.forward = changed  # type: ignore[method-assign, assignment]
    return list(kept.values())


def _gathered(
    sublayer: Sublayer, kept: dict[nn.Linear, Nf4Linear], meeting: Meeting
) -> Callable[[Tensor], tuple[Tensor, ...]]:
    def project(x: Tensor) -> tuple[Tensor, ...]:
        whole = gather_sequence(x, meeting.axis, meeting.name, dim=meeting.dim)
        return tuple(
            kept[linear](whole) if linear in kept else F.linear(whole, linear.weight, linear.bias)
            for linear in sublayer.in_projs
        )

    return project


def _scattered(linear: nn.Linear, product: Nf4Linear, meeting: Meeting) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        out = scatter_sum(product(x, bias=False), meeting.axis, meeting.name, dim=meeting.dim)
        # once for each token: after the sum
        return out if linear.bias is None else out + linear.bias

    return forward
