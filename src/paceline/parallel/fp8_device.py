"""Can this device multiply in fp8?"""

from __future__ import annotations

import logging

import torch

from paceline.errors import ConfigError
from paceline.kernels.fp8_cast import Fp8, Scaling, product
from paceline.runtime.device import capability, device_name
from paceline.runtime.log import log_once

log = logging.getLogger(__name__)


def refuse_without_fp8(device: torch.device, scaling: Scaling) -> None:
    """Before anything is built: fp8 needs tensor cores for it, or a CPU, where torch computes it slowly.

    Raises:
        ConfigError: a GPU without them, or kernels that this torch lacks.
    """
    bf16 = "Set train.precision = 'bf16'."
    if device.type == "cpu":
        log_once(log, logging.WARNING, "fp8 on a CPU is right and slow: there to be tried, not to be trained with")
        if not multiplies(device, scaling):
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


def multiplies(device: torch.device, scaling: Scaling) -> bool:
    """Whether this torch has the products."""
    values = torch.zeros(16, 16, device=device).to(torch.float8_e4m3fn)
    scale = torch.ones((16, 1) if scaling == "rowwise" else (), device=device)
    try:
        product(Fp8(values, scale), Fp8(values, scale), torch.bfloat16, fast=False)
    except (RuntimeError, ValueError):
        return False
    return True
