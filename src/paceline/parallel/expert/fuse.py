"""Puts the experts of a stage on kernels of ours, in place (`parallel.expert_kernels`)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Literal

import torch

from paceline.kernels.experts import GROUPED, TRITON, ExpertKernels, has_triton
from paceline.models.moe import Experts
from paceline.models.transformer import Transformer

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
        if isinstance(module, Experts):
            reason = _why_not(precision, device) or module.why_not_fused()
            if reason:
                reasons[reason] = None
            else:
                module.kernels = KERNELS[choice]
    for reason in reasons:
        log.info(f"experts take the plain path in spite of parallel.expert_kernels = {choice!r}, because {reason}")


def _why_not(precision: str, device: torch.device) -> str:
    if device.type != "cuda":
        return ""  # the kernels' twins in operations of torch
    if precision == "fp32":
        return "the kernels are for bf16 (train.precision = 'fp32')"
    return "" if has_triton() else "Triton is not installed"
