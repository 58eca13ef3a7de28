"""All variables that we know, and which is meant by a name that we do not."""

from __future__ import annotations

import difflib
import re

from paceline.doctor.variables.nccl import NCCL
from paceline.doctor.variables.others import CUDA, OTHERS, TORCH
from paceline.doctor.variables.variable import Variable

KNOWN: dict[str, Variable] = {variable.name: variable for variable in (*NCCL, *CUDA, *TORCH, *OTHERS)}

FAMILIES = (
    *("NCCL_", "CUDA_", "TORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCHELASTIC_", "PYTORCH_", "OMP_", "NVTE_"),
    *("UCX_", "GLOO_", "CUBLAS_", "CUBLASLT_", "CUDNN_", "NVSHMEM_", "TRITON_", "FI_EFA_"),
)
"""Every variable that starts so is looked at, known or not."""


def names_a_version(name: str) -> bool:
    """Set by images to say what is in them (``NCCL_VERSION``); no library reads it."""
    return name.startswith(FAMILIES) and name.endswith(("_VERSION", "_BUILD_NUMBER", "_BUILD_VERSION"))


def belongs(name: str) -> bool:
    """Whether a variable is ours to judge: known, of a family, or a misspelling of one that is."""
    return name in KNOWN or name.startswith(FAMILIES) or meant_by(name) is not None


def meant_by(name: str) -> str | None:
    """The known variable that an unknown name misspells, if there is little doubt: ``CUDA__VISIBLE_DEVICES``."""
    if name in KNOWN or names_a_version(name):
        return None
    squeezed = re.sub(r"[_\-]+", "", name).upper()
    for known in KNOWN:
        if re.sub("_", "", known) == squeezed:
            return known
    if "_" not in name or len(name) < 8:
        return None
    near = difflib.get_close_matches(name.upper(), KNOWN, n=1, cutoff=0.9)
    return near[0] if near else None


def nearest(name: str) -> list[str]:
    """Known names that resemble an unknown one, for a sentence."""
    family = name.split("_", 1)[0]
    return difflib.get_close_matches(name, [known for known in KNOWN if known.startswith(family)], n=2, cutoff=0.6)
