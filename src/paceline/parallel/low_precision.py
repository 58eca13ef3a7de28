"""fp8 products in a plain model: which linears, and when their weights are cast.

The model is changed from outside, as tensor parallelism does it: a sublayer's `project` and the forward of its last
linear become products of `kernels/fp8.py`. Linears of blocks only: the head, embeddings, norms, attention itself,
routers, experts (shared ones too) and multi-token prediction stay in bf16.

Weights are cast once for each change, not for each micro-batch: just before a block's forward, outside of what is
compiled or recomputed, if the engine has published weights since the last time. Evaluation, recomputation and all
micro-batches of a step read the same fp8 weights, at 2 bytes an element beside the bf16 ones. Without the cache
(weights that are gathered for each use: `parallel.zero` 2 and 3; or `train.fp8_weight_cache = false`) each use casts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.config.train import TrainConfig
from paceline.errors import ConfigError
from paceline.kernels.fp8 import CachedWeight, cast_weights, fp8_linears, why_not_fp8
from paceline.kernels.fp8_cast import CastKernel, Fp8, Scaling, product
from paceline.models.attention import GroupedQueryAttention, LatentAttention
from paceline.models.feed_forward import FeedForward
from paceline.models.transformer import Transformer
from paceline.runtime.device import capability, device_name
from paceline.runtime.log import log_once

log = logging.getLogger(__name__)

Sublayer = GroupedQueryAttention | LatentAttention | FeedForward


@dataclass(frozen=True, kw_only=True)
class Fp8Options:
    """The fp8 lines of `[train]`."""

    scaling: Scaling = "tensorwise"
    cached: bool = True
    """Whether fp8 weights are kept between micro-batches."""
    kernel: CastKernel = "torch"
    skip_layers: tuple[int, ...] = ()
    skip_linears: tuple[str, ...] = ()

    @classmethod
    def of(cls, train: TrainConfig) -> Fp8Options:
        return cls(
            scaling=train.fp8_scaling,
            cached=train.fp8_weight_cache,
            kernel=train.fp8_cast_kernel,
            skip_layers=train.fp8_skip_layers,
            skip_linears=train.fp8_skip_linears,
        )


class JoinedLinears:
    """Linears that read the same input, as one fp8 product."""

    def __init__(self, linears: Sequence[nn.Linear], options: Fp8Options) -> None:
        self.linears = tuple(linears)
        self.scaling, self.kernel = options.scaling, options.kernel
        self.cached: CachedWeight | None = None

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        return fp8_linears(
            x,
            tuple(linear.weight for linear in self.linears),
            tuple(linear.bias for linear in self.linears),
            scaling=self.scaling,
            cached=self.cached,
            kernel=self.kernel,
        )

    @torch.no_grad()
    def cast(self) -> None:
        """Takes the weights as they are now."""
        self.cached = cast_weights([linear.weight for linear in self.linears], self.scaling, self.kernel)


class Fp8Weights:
    """The fp8 copies of a rank's weights; see the head of this file for when they are made."""

    def __init__(self) -> None:
        self._stale: dict[nn.Module, bool] = {}
        self._members: dict[nn.Module, list[JoinedLinears]] = {}

    def keep(self, block: nn.Module, members: list[JoinedLinears]) -> None:
        """From now on the block's forward finds these linears' weights cast."""
        self._members[block], self._stale[block] = members, True
        # not prepended: after the engine's hook, which waits for the block's new weights
        block.register_forward_pre_hook(self._before_forward)

    def expire(self) -> None:
        """The weights are about to change."""
        self._stale = dict.fromkeys(self._stale, True)

    def _before_forward(self, block: nn.Module, args: Any) -> None:
        if self._stale[block]:
            self._stale[block] = False
            for joined in self._members[block]:
                joined.cast()

    @property
    def nbytes(self) -> int:
        """Of all copies that there are at the moment."""
        found = [joined.cached for members in self._members.values() for joined in members]
        return sum(tensor.nbytes for cached in found if cached is not None for operand in cached for tensor in operand)


def use_fp8(stage: Transformer, options: Fp8Options, weights: Fp8Weights, *, cached: bool) -> None:
    """Puts the linears of a model's, or a stage's, blocks into fp8, in place; parameters stay what and where they are.

    After tensors are cut, before blocks are wrapped by recomputation and compilation. On the meta device or with
    weights.

    Args:
        weights: the rank's cache, which is to be told when weights change.
        cached: whether weights stay whole between uses, so that a cache makes sense.
    """
    skipped = {index % stage.config.num_layers for index in options.skip_layers}
    for index, block in stage.blocks.items():
        if int(index) not in skipped:
            members = _change_block(f"blocks.{index}", block, options, rotary=stage.rope is not None)
            if members and cached and options.cached:
                weights.keep(block, members)


def _change_block(prefix: str, block: nn.Module, options: Fp8Options, *, rotary: bool) -> list[JoinedLinears]:
    members = []
    for name, module in block.named_children():
        # a mixture of experts is neither: its experts stay in bf16
        if isinstance(module, GroupedQueryAttention | LatentAttention | FeedForward):
            changed = list(_change_sublayer(f"{prefix}.{name}", module, options))
            if isinstance(module, GroupedQueryAttention) and (rotary or module.q_norm is not None):
                _set_values_apart(module, changed)
            members += changed
    return members


def _change_sublayer(prefix: str, sublayer: Sublayer, options: Fp8Options) -> Iterator[JoinedLinears]:
    names = {module: name for name, module in sublayer.named_children()}
    first = sublayer.in_projs
    joined = _join(prefix, [linear for linear in first if names[linear] not in options.skip_linears], names, options)
    if joined is not None:
        in_fp8 = tuple(linear in joined.linears for linear in first)
        sublayer.project = _project(joined, in_fp8, sublayer)  # type: ignore[method-assign, assignment]
        yield joined
    for module, name in names.items():
        if isinstance(module, nn.Linear) and module not in first and name not in options.skip_linears:
            alone = _join(prefix, [module], names, options)
            if alone is not None:
                module.forward = _forward(alone)  # type: ignore[method-assign, assignment]
                yield alone


def _join(
    prefix: str, linears: Sequence[nn.Linear], names: dict[nn.Module, str], options: Fp8Options
) -> JoinedLinears | None:
    if not linears:
        return None
    reason = why_not_fp8([linear.weight for linear in linears])
    if reason is None:
        return JoinedLinears(linears, options)
    asked = " and ".join(names[linear] for linear in linears)
    # without the layer's number: once for all layers alike
    kind = prefix.rpartition(".")[2]
    log_once(log, logging.WARNING, "%s of %s stays in bf16: %s. fp8 products need that.", asked, kind, reason)
    return None


def _project(
    joined: JoinedLinears, in_fp8: tuple[bool, ...], sublayer: Sublayer
) -> Callable[[Tensor], tuple[Tensor, ...]]:
    def project(x: Tensor) -> tuple[Tensor, ...]:
        outputs = iter(joined(x))
        return tuple(
            next(outputs) if is_fp8 else proj(x) for proj, is_fp8 in zip(sublayer.in_projs, in_fp8, strict=True)
        )

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


def _forward(alone: JoinedLinears) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        return alone(x)[0]

    return forward


# ---- can this machine?


def refuse_without_fp8(device: torch.device, scaling: Scaling) -> None:
    """Before anything is built: fp8 needs tensor cores for it, or a CPU, where torch computes it slowly.

    Raises:
        ConfigError: a GPU without them, or kernels that this torch lacks.
    """
    bf16 = "Set train.precision = 'bf16'."
    if device.type == "cpu":
        log_once(log, logging.WARNING, "fp8 on a CPU is right and slow: there to be tried, not to be trained with")
        if not _multiplies(device, scaling):
            raise ConfigError(
                f"train.fp8_scaling = {scaling!r} has no CPU kernel in torch {torch.__version__}",
                evidence="torch 2.13 has one; on GPUs 2.11 has too.",
                next_step="Set train.fp8_scaling = 'tensorwise', or train.precision = 'bf16'.",
            )
        return
    if torch.version.hip is not None:
        raise ConfigError(
            "train.precision = 'fp8' is not available on AMD GPUs in this version",
            evidence=f"{device_name(device)}: some of them have other fp8 formats, and none has been tested.",
            next_step=bf16,
        )
    found = capability(device)
    if found is not None and found < (8, 9):
        raise ConfigError(
            f"train.precision = 'fp8' needs a GPU with fp8 tensor cores, which {device_name(device)} has not",
            evidence=f"Its compute capability is {found[0]}.{found[1]}; fp8 came with 8.9 (Ada) and 9.0 (Hopper).",
            next_step=bf16,
        )


def _multiplies(device: torch.device, scaling: Scaling) -> bool:
    values = torch.zeros(16, 16, device=device).to(torch.float8_e4m3fn)
    scale = torch.ones((16, 1) if scaling == "rowwise" else (), device=device)
    try:
        product(Fp8(values, scale), Fp8(values, scale), torch.bfloat16, fast=False)
    except (RuntimeError, ValueError):
        return False
    return True
