"""FlashAttention-4 (the package `flash-attn-4`) in the place of the flash kernel that ships in torch.

It is written in CuTe DSL and compiled at its first use; for Hopper and Blackwell. Torch knows where to put it
(`torch.nn.attention.activate_flash_attention_impl`, 2.11 and later), so that a compiled graph, recomputation and
autograd see the flash kernel they know.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor

WIDTHS = (64, 96, 128)
"""Of a head, that are taken: those for which all kernels exist, forward and backward, on each of the devices."""


def why_not_flash4(q_BTHD: Tensor, k_BSGD: Tensor, v_BSGE: Tensor, dropout: float) -> str:
    """The reason why this call cannot take it; empty if it can."""
    if dropout:
        return "FlashAttention-4 has no dropout (model.attention_dropout = 0 allows it)"
    if q_BTHD.dtype not in (torch.bfloat16, torch.float16):
        return "FlashAttention-4 is for bf16 and fp16"
    if q_BTHD.shape[-1] not in WIDTHS or v_BSGE.shape[-1] != q_BTHD.shape[-1]:
        return f"the heads are not {', '.join(map(str, WIDTHS))} wide"
    if q_BTHD.shape[1] != k_BSGD.shape[1]:
        return "there are more keys than queries"
    return ""


@cache
def activate_flash4() -> str:
    """Makes it torch's flash kernel, for the whole process and for good; the reason if that cannot be, or nothing."""
    if not torch.cuda.is_available():
        return "there is no GPU"
    major, minor = torch.cuda.get_device_capability()
    if major not in (9, 10):
        return f"FlashAttention-4 is for Hopper and Blackwell (this is sm_{major}{minor})"
    if importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec("flash_attn.cute") is None:
        return "the package flash-attn-4 is not installed (pip install 'flash-attn-4[cu13]')"
    try:
        torch.nn.attention.activate_flash_attention_impl("FA4")
    except (AttributeError, ImportError, RuntimeError, OSError, ValueError) as error:
        return f"it does not load here ({type(error).__name__}: {error})"
    return ""
