"""Puts the experts of a stage on kernels of ours, in place (`parallel.expert_kernels`), and into fp8."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from paceline.kernels.expert_fp8 import why_not_fp8
from paceline.kernels.experts import GROUPED, TRITON, ExpertKernels, cast_matrices
from paceline.kernels.triton_found import has_triton
from paceline.models.moe import Experts
from paceline.models.router import Router
from paceline.models.transformer import Transformer
from paceline.parallel.low_precision import Fp8Options, Fp8Weights
from paceline.runtime.log import log_once

log = logging.getLogger(__name__)

KERNELS: Mapping[str, ExpertKernels] = {"grouped": GROUPED, "triton": TRITON}


def fuse_experts(
    stage: Transformer, choice: Literal["grouped", "triton"], precision: str, device: torch.device
) -> None:
    """After experts are spread over ranks, before `accumulate_products`. What cannot be fused stays as it is, and the
    log says why.

    Args:
        precision: `train.precision`.
    """
    reasons: dict[str, None] = {}
    for module in stage.modules():
        if isinstance(module, Router):
            module.split = True
        if isinstance(module, Experts):
            reason = _why_not(precision, device) or module.why_not_fused()
            if reason:
                reasons[reason] = None
            else:
                module.kernels = KERNELS[choice]
    for reason in reasons:
        text = "experts take the plain path in spite of parallel.expert_kernels = %r, because %s"
        log_once(log, logging.INFO, text, choice, reason)


class CastExperts:
    """Experts as `Fp8Weights` keeps them."""

    def __init__(self, experts: Experts) -> None:
        self._experts = experts

    @property
    def cached(self) -> Sequence[tuple[Tensor, Tensor]] | None:
        fp8 = self._experts.fp8
        return None if fp8 is None else list(zip(fp8[::2], fp8[1::2], strict=True))

    @torch.no_grad()
    def cast(self) -> None:
        self._experts.fp8 = cast_matrices(self._experts.up_weight, self._experts.down_weight)


def put_experts_in_fp8(stage: Transformer, options: Fp8Options, weights: Fp8Weights, *, cached: bool) -> None:
    """The experts that `fuse_experts` took: their products for outputs and for gradients of activations.

    Args:
        weights, cached: as in `use_fp8`.
    """
    skipped = {index % stage.config.num_layers for index in options.skip_layers}
    for index, block in stage.blocks.items():
        for experts in block.modules():
            if int(index) in skipped or not isinstance(experts, Experts) or experts.kernels is None:
                continue
            _, hidden, width = experts.down_weight.shape
            reason = why_not_fp8(hidden, width)
            if reason:
                log_once(log, logging.WARNING, "experts stay in bf16: %s. fp8 products need that.", reason)
                continue
            experts.in_fp8 = True
            if cached and options.cached:
                weights.keep(block, [CastExperts(experts)])


def _why_not(precision: str, device: torch.device) -> str:
    if device.type != "cuda":
        return ""  # the kernels' twins in operations of torch
    if precision == "fp32":
        return "the kernels are for bf16 (train.precision = 'fp32')"
    return "" if has_triton() else "Triton is not installed"
