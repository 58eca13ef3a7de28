"""Adapters in a model that is trained: products joined, and what the ranks of tp do.

`models/lora.py` has put pairs of matrices beside linears. Tensor parallelism and fp8 have then given sublayers products
of their own, which know nothing of pairs: here the pairs are put around whatever a sublayer's first products, and the
forward of its other linears, have become. So every way to multiply frozen weights can have adapters.

| | tp = 1 | tp > 1 |
| --- | --- | --- |
| first linears | h = x A (all pairs at once), + h B | h = x A of own tokens, gathered (R numbers a token), + h B_part |
| last linear | h = x A, + h B | h = x A_part, summed and scattered, + h B on own tokens |

With tp the second matrix of the first linears is cut by outputs and the first matrix of the last one by inputs, as
their frozen matrices are; the other halves are whole, and the gradient of each rank is of its own tokens, or heads, and
summed (`Shard.replicas`).

With tp = 1, where nothing is dropped and rows have no lengths of their own (DoRA), frozen products and pairs are one
operation: `kernels/lora.py` where the products are plain ones in the dtype that the model computes in, and
`kernels/lora_fp8.py` where they are in fp8. There a whole gated MLP may be one: `gated_fp8.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from paceline.kernels.lora import lora_linears
from paceline.models.attention import GroupedQueryAttention, LatentAttention
from paceline.models.feed_forward import FeedForward
from paceline.models.lora import LoraLinear, narrow_products, square_norms, with_adapter
from paceline.models.transformer import Transformer
from paceline.parallel.collectives import Axis
from paceline.parallel.linear import Meeting
from paceline.parallel.low_precision import JoinedLinears
from paceline.parallel.regions import gather_sequence, scatter_sum, sum_replicated
from paceline.parallel.tensor import Sublayer, meeting_of

Products = Callable[[Tensor], tuple[Tensor, ...]]


def join_adapters(stage: Transformer, axis: Axis, in_fp8: Sequence[JoinedLinears] = ()) -> None:
    """Puts the pairs of a stage's linears around its products, in place. After everything that changes these; before
    recomputation and compilation.

    Args:
        axis: tp, over which tensors were cut.
        in_fp8: the products of the stage that are in fp8, as `low_precision.use_fp8` gives them.
    """
    if axis.size == 1:
        for products in in_fp8:
            _join_in_fp8(products)
    for name, module in stage.named_modules():
        if isinstance(module, GroupedQueryAttention | LatentAttention | FeedForward):
            meeting = None
            if axis.size > 1:
                meeting = meeting_of(module, axis, "tp/shared_experts" if name.endswith(".shared") else "")
            _join_first(module, meeting)
            _join_others(module, meeting)


def _join_in_fp8(products: JoinedLinears) -> None:
    """As one operation with the pairs, where that can be."""
    adapted = [linear for linear in products.linears if isinstance(linear, LoraLinear)]
    if not adapted or not products.frozen or not _plain(adapted):
        return
    products.add_pairs(adapted[0].adapter)
    for linear in adapted:
        linear.joined = True


def _plain(adapted: Sequence[LoraLinear]) -> bool:
    """Nothing but a pair of matrices."""
    return not adapted[0].adapter.dropout and all(linear.lora_magnitude is None for linear in adapted)


def _join_first(sublayer: Sublayer, meeting: Meeting | None) -> None:
    linears = sublayer.in_projs
    adapted = [linear for linear in linears if isinstance(linear, LoraLinear) and not linear.joined]
    if any(isinstance(linear, LoraLinear) and linear.joined for linear in linears):
        # in fp8 with their pairs; the sublayer's products ask those that are not one by one
        for linear in adapted:
            _join_one(linear, None)
        return
    if not adapted:
        return
    replaced = "project" in vars(sublayer)
    frozen: Products = sublayer.project
    for linear in adapted:
        linear.joined = True
    switch, settings = adapted[0].adapter.switch, adapted[0].adapter
    plain = not replaced and _plain(adapted)

    def project(x: Tensor) -> tuple[Tensor, ...]:
        if not switch.on:
            return frozen(x)
        if plain and not any(_quantized(linear) for linear in linears):
            return _in_one(x, linears, settings.scale)
        narrow = iter(_gathered(narrow_products(x, adapted), meeting))
        return tuple(
            with_adapter(linear, base, next(narrow), _norms(linear)) if isinstance(linear, LoraLinear) else base
            for linear, base in zip(linears, frozen(x), strict=True)
        )

    sublayer.project = project  # type: ignore[method-assign]


def _in_one(x: Tensor, linears: tuple[nn.Linear, ...], scale: float) -> tuple[Tensor, ...]:
    pairs = [(linear.lora_a, linear.lora_b) if isinstance(linear, LoraLinear) else (None, None) for linear in linears]
    return lora_linears(
        x,
        [linear.weight for linear in linears],
        [linear.bias for linear in linears],
        [down for down, _ in pairs],
        [up for _, up in pairs],
        scale,
    )


def _quantized(linear: nn.Linear) -> bool:
    """Whether the layer's own forward is no product with its weight as it lies."""
    return "forward" in vars(linear)


def _gathered(narrow: tuple[Tensor, ...], meeting: Meeting | None) -> tuple[Tensor, ...]:
    """Of the tokens of all ranks."""
    if meeting is None:
        return narrow
    joined = narrow[0] if len(narrow) == 1 else torch.cat(narrow, dim=-1)
    whole = gather_sequence(joined, meeting.axis, meeting.name, dim=meeting.dim)
    return whole.split([part.shape[-1] for part in narrow], dim=-1)


def _join_others(sublayer: Sublayer, meeting: Meeting | None) -> None:
    last = sublayer.down_proj if isinstance(sublayer, FeedForward) else sublayer.o_proj
    first = sublayer.in_projs
    for linear in sublayer.children():
        if isinstance(linear, LoraLinear) and linear not in first and not linear.joined:
            _join_one(linear, meeting if linear is last else None)


def _join_one(linear: LoraLinear, meeting: Meeting | None) -> None:
    """A linear by itself. ``meeting``: where its output is summed over ranks, if it is."""
    replaced = "forward" in vars(linear)
    frozen: Callable[[Tensor], Tensor] = linear.forward
    linear.joined = True
    settings = linear.adapter
    plain = not replaced and _plain([linear])

    def forward(x: Tensor) -> Tensor:
        if not settings.switch.on:
            return frozen(x)
        if plain:
            return _in_one(x, (linear,), settings.scale)[0]
        (narrow,) = narrow_products(x, [linear])
        if meeting is not None:
            narrow = scatter_sum(narrow, meeting.axis, meeting.name, dim=meeting.dim)
        return with_adapter(linear, frozen(x), narrow, _norms(linear, meeting))

    linear.forward = forward  # type: ignore[method-assign, assignment]


@torch.no_grad()
def _norms(linear: LoraLinear, meeting: Meeting | None = None) -> Tensor | None:
    """With DoRA: the lengths of rows. ``meeting``: ranks hold parts of each row."""
    if linear.lora_magnitude is None:
        return None
    squares = square_norms(linear)
    if meeting is not None:
        squares = sum_replicated(squares, meeting.axis, f"{meeting.name}/norms")
    return squares.sqrt()
