"""fp8 products in a plain model: which linears, and when their weights are cast.

The model is changed from outside, as tensor parallelism does it: a sublayer's `project` and the forward of its last
linear become products of `kernels/fp8.py`. Linears of blocks only: embeddings, norms, attention itself, routers,
shared experts and multi-token prediction stay in bf16; so do experts (`expert/fuse.py`) and the head
(`kernels/fp8_head.py`), unless asked for.

Under tensor parallelism the products are those of `linear_fp8.py`, and scales are compared over its ranks.

Weights are cast once for each change, not for each micro-batch: just before a block's forward, outside of what is
compiled or recomputed, if the engine has published weights since the last time. Evaluation, recomputation and all
micro-batches of a step read the same fp8 weights, at 2 bytes an element beside the bf16 ones. Without the cache
(weights that are gathered for each use: `parallel.zero` 2 and 3; or `train.fp8_weight_cache = false`) each use casts.
With `train.fp8_weights_only` the bf16 ones are there only from their gather to that cast, a block or two at a time.

With `train.fp8_scaling = "delayed"` inputs and gradients are cast by scales of earlier steps (`delayed_scales.py`);
weights by their own, once a step.

Frozen linears may have low-rank pairs beside them, which are then part of the product (`kernels/lora_fp8.py`).
With one kernel for casts a gated MLP is one operation (`gated_fp8.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paceline.config.train import TrainConfig
from paceline.costs.placement import placement
from paceline.kernels.fp8 import NO_PLACE, CachedWeight, Cut, cast_weights, fp8_linears, why_not_fp8
from paceline.kernels.fp8_cast import CastKernel, Scaling
from paceline.kernels.fp8_delayed import DelayedPair
from paceline.kernels.lora_fp8 import lora_fp8_linears
from paceline.models.attention import GroupedQueryAttention, LatentAttention
from paceline.models.feed_forward import FeedForward
from paceline.models.lora import AdapterSettings, LoraLinear
from paceline.models.transformer import Transformer
from paceline.parallel.accumulate import Place, place_of
from paceline.parallel.collectives import Axis
from paceline.parallel.delayed_scales import DelayedScales
from paceline.parallel.gated_fp8 import fuse_gated
from paceline.parallel.linear import Meeting, column_products
from paceline.parallel.linear_fp8 import WidestOver, fp8_column_products, fp8_row_product
from paceline.parallel.tensor import Sublayer, meeting_of
from paceline.runtime.log import log_once

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Fp8Options:
    """The fp8 lines of `[train]`."""

    scaling: Scaling = "tensorwise"
    """Of what is cast by its own largest numbers."""
    history: int = 0
    """Steps whose largest numbers scale inputs and gradients; 0: their own do."""
    cached: bool = True
    """Whether fp8 weights are kept between micro-batches."""
    only: bool = False
    """Whether no bf16 weights are kept beside them."""
    kernel: CastKernel = "torch"
    skip_layers: tuple[int, ...] = ()
    skip_linears: tuple[str, ...] = ()
    experts: bool = False

    @classmethod
    def of(cls, train: TrainConfig) -> Fp8Options:
        return cls(
            scaling=train.fp8_own_scaling,
            history=train.fp8_amax_history if train.fp8_scaling == "delayed" else 0,
            cached=train.fp8_weight_cache,
            only=train.fp8_weights_only,
            kernel=train.fp8_cast_kernel,
            skip_layers=train.fp8_skip_layers,
            skip_linears=train.fp8_skip_linears,
            experts=train.fp8_experts,
        )


class JoinedLinears:
    """Linears that read the same input, as one fp8 product. ``cut``: what of it other ranks of tp hold."""

    def __init__(self, linears: Sequence[nn.Linear], options: Fp8Options, cut: Cut | None = None) -> None:
        self.linears = tuple(linears)
        self.scaling, self.kernel, self.cut = options.scaling, options.kernel, cut
        self.cached: CachedWeight | None = None
        self.delayed: DelayedPair | None = None
        self._place: tuple[Tensor | None, Tensor | None] = NO_PLACE
        self.adapter: AdapterSettings | None = None

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        adapter = self.adapter
        if adapter is None or not adapter.switch.on:
            return fp8_linears(x, *self._matrices(), **self._options())
        return lora_fp8_linears(
            x,
            *self._matrices(),
            *self._pairs(),
            adapter.scale,
            scaling=self.scaling,
            cached=self.cached,
            kernel=self.kernel,
            delayed=self.delayed,
        )

    def add_pairs(self, adapter: AdapterSettings) -> None:
        """From now on outputs are with the pairs of these linears, which are frozen and whole on this rank."""
        assert self.frozen and self.cut is None
        self.adapter = adapter

    def _pairs(self) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
        pairs = [(each.lora_a, each.lora_b) if isinstance(each, LoraLinear) else (None, None) for each in self.linears]
        return tuple(down for down, _ in pairs), tuple(up for _, up in pairs)

    def gathered(self, x: Tensor, meeting: Meeting) -> tuple[Tensor, ...]:
        """The same of the parts of ``x`` of all ranks."""
        return fp8_column_products(x, *self._matrices(), meeting, **self._options())

    def scattered(self, x: Tensor, meeting: Meeting) -> Tensor:
        """This rank's part of the sum over ranks, of one linear."""
        (linear,) = self.linears
        return fp8_row_product(x, linear.weight, linear.bias, meeting, **self._options())

    def _matrices(self) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
        return tuple(linear.weight for linear in self.linears), tuple(linear.bias for linear in self.linears)

    def _options(self) -> dict[str, Any]:
        return {
            "scaling": self.scaling,
            "cached": self.cached,
            "kernel": self.kernel,
            "cut": self.cut,
            "delayed": self.delayed,
            "place": self.place,
        }

    @property
    def place(self) -> tuple[Tensor | None, Tensor | None]:
        """Where the next backward adds the gradient of all weights, one under the other, and whether nothing is there
        yet; None: to autograd."""
        return self._place

    def aim(self, place: Place | None) -> None:
        """The next forward's backward adds to ``place``."""
        # .data: see `AccumulatingLinear.aim`
        self._place = NO_PLACE if place is None else (place.gradient.data, place.fresh.data)

    @property
    def frozen(self) -> bool:
        """Nobody updates these weights."""
        return not any(linear.weight.requires_grad for linear in self.linears)

    @torch.no_grad()
    def cast(self) -> None:
        """Takes the weights as they are now. Collective where they are cut."""
        self.cached = cast_weights([linear.weight for linear in self.linears], self.scaling, self.cut)


class Castable(Protocol):
    """Weights of which there is an fp8 copy."""

    @property
    def cached(self) -> Sequence[tuple[Tensor, Tensor]] | None:
        """Values and scales of each operand, if they have been cast."""
        ...

    def cast(self) -> None:
        """Takes the weights as they are now."""
        ...


class Fp8Weights:
    """The fp8 copies of a rank's weights; see the head of this file for when they are made."""

    def __init__(self) -> None:
        self._stale: dict[nn.Module, bool] = {}
        self._members: dict[nn.Module, list[Castable]] = {}
        self.on_cast: Callable[[nn.Module], None] | None = None
        """Called with a block whose weights have just been cast."""

    def keep(self, block: nn.Module, members: Sequence[Castable]) -> None:
        """From now on the block's forward finds these weights cast, and those that it did."""
        if block not in self._members:
            # not prepended: after the engine's hook, which waits for the block's new weights
            block.register_forward_pre_hook(self._before_forward)
        self._members.setdefault(block, []).extend(members)
        self._stale[block] = True

    def expire(self) -> None:
        """The weights are about to change."""
        self._stale = dict.fromkeys(self._stale, True)

    def _before_forward(self, block: nn.Module, args: Any) -> None:
        if self._stale[block]:
            self._stale[block] = False
            for joined in self._members[block]:
                # what is frozen was cast once for all, and the weights may be gone
                if not (isinstance(joined, JoinedLinears) and joined.frozen and joined.cached is not None):
                    joined.cast()
            if self.on_cast is not None:
                self.on_cast(block)

    def cast_frozen(self) -> list[nn.Linear]:
        """Casts all that is frozen, block by block, and returns the linears that it was made of. Collective where they
        are cut."""
        found: list[nn.Linear] = []
        for members in self._members.values():
            for joined in members:
                if isinstance(joined, JoinedLinears) and joined.frozen:
                    joined.cast()
                    found += joined.linears
        return found

    @property
    def nbytes(self) -> int:
        """Of all copies that there are at the moment."""
        found = [joined.cached for members in self._members.values() for joined in members]
        return sum(tensor.nbytes for cached in found if cached is not None for operand in cached for tensor in operand)


def use_fp8(
    stage: Transformer,
    options: Fp8Options,
    weights: Fp8Weights,
    *,
    cached: bool,
    axis: Axis | None = None,
    scales: DelayedScales | None = None,
) -> list[JoinedLinears]:
    """Puts the linears of a model's, or a stage's, blocks into fp8, in place; parameters stay what and where they are.

    After tensors are cut, before blocks are wrapped by recomputation and compilation. On the meta device or with
    weights.

    Args:
        weights: the rank's cache, which is to be told when weights change.
        cached: whether weights stay whole between uses, so that a cache makes sense.
        axis: tp, that tensors were cut over.
        scales: where products are to be entered whose scales are of earlier steps.

    Returns:
        the products that are in fp8 now.
    """
    skipped = {index % stage.config.num_layers for index in options.skip_layers}
    found: list[JoinedLinears] = []
    for index, block in stage.blocks.items():
        if int(index) not in skipped:
            members = _change_block(
                f"blocks.{index}", block, _Change(options=options, stage=stage, axis=axis, scales=scales)
            )
            if members and cached and options.cached:
                weights.keep(block, members)
            found += members
    return found


@dataclass(frozen=True, kw_only=True)
class _Change:
    """What every layer of a stage is changed by."""

    options: Fp8Options
    stage: Transformer
    axis: Axis | None
    scales: DelayedScales | None = None

    def meeting(self, sublayer: Sublayer) -> Meeting | None:
        return meeting_of(sublayer, self.axis) if self.axis is not None and self.axis.size > 1 else None

    def cut(self, prefix: str, named: Mapping[str, nn.Linear], meeting: Meeting | None) -> Cut | None:
        """What other ranks hold of linears that read the same input."""
        if meeting is None:
            return None
        names = {f"{prefix}.{name}.weight": linear.weight for name, linear in named.items()}
        dims = {cut.dim for name, weight in names.items() for cut in placement(name, weight.shape, self.stage.config)}
        if not dims:
            return None
        (dim,) = dims
        widen = WidestOver(axis=meeting.axis, name=f"{meeting.name}/scales")
        return Cut(over="outputs" if dim == 0 else "inputs", widen=widen)


def _change_block(prefix: str, block: nn.Module, change: _Change) -> list[JoinedLinears]:
    members = []
    for name, module in block.named_children():
        # a mixture of experts is neither: its experts stay in bf16
        if isinstance(module, GroupedQueryAttention | LatentAttention | FeedForward):
            changed = list(_change_sublayer(f"{prefix}.{name}", module, change))
            turns = change.stage.rope is not None
            if isinstance(module, GroupedQueryAttention) and (turns or module.q_norm is not None):
                _set_values_apart(module, changed)
            members += changed
    return members


def _change_sublayer(prefix: str, sublayer: Sublayer, change: _Change) -> Iterator[JoinedLinears]:
    names = {module: name for name, module in sublayer.named_children()}
    skip, meeting = change.options.skip_linears, change.meeting(sublayer)
    first = sublayer.in_projs
    named = {names[linear]: linear for linear in first if names[linear] not in skip}
    joined = _join(prefix, named, change, meeting)
    if joined is not None:
        sublayer.project = _project(joined, sublayer, meeting)  # type: ignore[method-assign, assignment]
        yield joined
    last = sublayer.down_proj if isinstance(sublayer, FeedForward) else sublayer.o_proj
    behind: JoinedLinears | None = None
    for module, name in names.items():
        if isinstance(module, nn.Linear) and module not in first and name not in skip:
            alone = _join(prefix, {name: module}, change, meeting)
            if alone is not None:
                scatters = meeting if module is last else None
                module.forward = _forward(alone, scatters)  # type: ignore[method-assign, assignment]
                behind = alone if module is last else behind
                yield alone
    if isinstance(sublayer, FeedForward) and joined is not None and behind is not None:
        fuse_gated(sublayer, joined, behind, change.stage.config.activation)


def _join(
    prefix: str, named: Mapping[str, nn.Linear], change: _Change, meeting: Meeting | None
) -> JoinedLinears | None:
    linears = tuple(named.values())
    if not linears:
        return None
    reason = why_not_fp8([linear.weight for linear in linears])
    if reason is None:
        joined = JoinedLinears(linears, change.options, change.cut(prefix, named, meeting))
        if change.scales is not None:
            change.scales.add(f"{prefix}.{'+'.join(named)}", joined)
        return joined
    # without the layer's number: once for all layers alike
    kind = prefix.rpartition(".")[2]
    text = "%s of %s stays in bf16: %s. fp8 products need that."
    log_once(log, logging.WARNING, text, " and ".join(named), kind, reason)
    return None


def _project(
    joined: JoinedLinears, sublayer: Sublayer, meeting: Meeting | None
) -> Callable[[Tensor], tuple[Tensor, ...]]:
    in_fp8 = tuple(linear in joined.linears for linear in sublayer.in_projs)
    others = tuple(linear for linear in sublayer.in_projs if linear not in joined.linears)

    def products(x: Tensor) -> tuple[Tensor, ...]:
        """In bf16."""
        if meeting is None:
            return tuple(proj(x) for proj in others)
        weights, biases = tuple(proj.weight for proj in others), tuple(proj.bias for proj in others)
        places = tuple(place_of(proj) for proj in others)
        return column_products(x, weights, biases, meeting.axis, meeting.name, dim=meeting.dim, places=places)

    def project(x: Tensor) -> tuple[Tensor, ...]:
        outputs = iter(joined(x) if meeting is None else joined.gathered(x, meeting))
        left = iter(products(x) if others else ())
        return tuple(next(outputs) if is_fp8 else next(left) for is_fp8 in in_fp8)

    return project


def _set_values_apart(attention: GroupedQueryAttention, products: Sequence[JoinedLinears]) -> None:
    """Values in memory of their own. Attention keeps them as they are, and as a part of the joined output they would
    keep all of it, also queries and keys as they were before positions were put into them."""
    if not any(attention.v_proj in each.linears and len(each.linears) > 1 for each in products):
        return
    joined = attention.project

    def project(x: Tensor) -> tuple[Tensor, ...]:
        *others, values = joined(x)
        return (*others, values.clone())

    attention.project = project  # type: ignore[method-assign, assignment]


def _forward(alone: JoinedLinears, scatters: Meeting | None) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        return alone(x)[0] if scatters is None else alone.scattered(x, scatters)

    return forward
