"""In which precision do sums and exponentials happen?"""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_fp32(x: Tensor) -> Tensor:
    """``x`` in fp32, or in its own dtype if that is wider: a float64 model is float64 everywhere."""
    return x.to(wide_dtype(x.dtype))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32, or ``dtype`` if that is wider."""
    return torch.promote_types(dtype, torch.float32)
