"""Which variables of the environment may change how fast a run is? For the record; torch-free."""

from __future__ import annotations

import os
from collections.abc import Mapping

PREFIXES = (
    "NCCL_",
    "CUDA_",
    "TORCH_",
    "PYTORCH_",
    "OMP_",
    "MKL_",
    "GLOO_",
    "KMP_",
    "UCX_",
    "TORCHINDUCTOR_",
    "TRITON_",
)
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")


def recorded_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables of the libraries under a run, without anything that looks like a secret."""
    environ = os.environ if environ is None else environ
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(PREFIXES) and not any(word in name for word in _SECRET)
    }
