"""Where does each random number come from, and can it be drawn again?

Nothing draws from one seed shared by all. Each *stream* (weights, dropout, data order, ...) has a name and the mesh
coordinates that it should depend on, so whoever draws decides who draws the same: dropout on an activation that is
replicated over tensor parallelism names ``dp`` only, dropout on a sharded one names ``tp`` too.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Mapping, MutableMapping

import numpy as np
import torch
from torch import Tensor

from paceline.errors import LaunchError


def stream_seed(seed: int, name: str, **coordinate: int) -> int:
    """A seed in ``[0, 2**63)`` for the stream ``name`` at ``coordinate``.

    The same on every machine, Python and order of the keyword arguments; unrelated for any two different inputs
    (BLAKE2b). A coordinate of 0 is not the same as a coordinate left out.
    """
    parts = [str(seed), name, *(f"{axis}={index}" for axis, index in sorted(coordinate.items()))]
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(device: torch.device | str, seed: int, name: str, **coordinate: int) -> torch.Generator:
    """A generator of its own for a stream: drawing from it does not move the process-wide ones."""
    made = torch.Generator(device=device)
    made.manual_seed(stream_seed(seed, name, **coordinate))
    return made


def seed_all(seed: int, **coordinate: int) -> None:
    """Seeds the process-wide generators (torch on CPU and GPU, NumPy, Python), which dropout and plugins draw from."""
    torch.manual_seed(stream_seed(seed, "torch", **coordinate))
    np.random.seed(stream_seed(seed, "numpy", **coordinate) % 2**32)
    random.seed(stream_seed(seed, "python", **coordinate))


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """The state of the process-wide generators as CPU tensors, so that a checkpoint needs no pickle for it.

    ``torch_cuda`` is there only if ``device`` is a GPU.
    """
    _, words, gauss = random.getstate()[0], random.getstate()[1], random.getstate()[2]
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    twister = numpy_state["state"]
    state = {
        "torch_cpu": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor(float("nan") if gauss is None else gauss, dtype=torch.float64),
        "numpy": torch.from_numpy(twister["key"].astype(np.int64)),
        "numpy_position": torch.tensor([twister["pos"], numpy_state["has_gauss"]], dtype=torch.int64),
        "numpy_gauss": torch.tensor(numpy_state["gauss"], dtype=torch.float64),
    }
    if device.type == "cuda":
        state["torch_cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Puts back what ``rng_state`` captured. A GPU's state is skipped on the CPU, and kept as it is when absent."""
    torch.set_rng_state(state["torch_cpu"])
    gauss = float(state["python_gauss"])
    random.setstate((3, tuple(state["python"].tolist()), None if gauss != gauss else gauss))
    position, has_gauss = state["numpy_position"].tolist()
    key = state["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, position, has_gauss, float(state["numpy_gauss"])))
    if device.type == "cuda" and "torch_cuda" in state:
        torch.cuda.set_rng_state(state["torch_cuda"], device)


def set_deterministic(enabled: bool, environ: MutableMapping[str, str] | None = None) -> None:
    """Makes two runs of the same recipe bit-identical, or makes the operation that cannot be raise.

    Call before anything runs on the GPU: cuBLAS reads its workspace setting when it starts.

    Raises:
        LaunchError: CUDA has already started without CUBLAS_WORKSPACE_CONFIG.
    """
    environ = os.environ if environ is None else environ
    if enabled and environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):
        if torch.cuda.is_initialized():
            raise LaunchError(
                "Deterministic mode was asked for after CUDA started.",
                evidence="cuBLAS is repeatable only with CUBLAS_WORKSPACE_CONFIG set before its first call.",
                next_step="Set CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment of the process.",
            )
        environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(enabled)
    torch.backends.cudnn.deterministic = enabled
    if enabled:
        # its trials may choose another algorithm in every process
        torch.backends.cudnn.benchmark = False
