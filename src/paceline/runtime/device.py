"""What does this process compute on, how full is it, and which versions are at work?"""

from __future__ import annotations

import platform
import resource
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch

from paceline.errors import LaunchError
from paceline.runtime.process import ProcessInfo

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class MemoryStats:
    """Bytes. On a GPU what torch's allocator holds; on the CPU the resident memory of the process.

    ``total_bytes`` is the card's (or the host's) size; ``reserved_bytes`` is what the allocator took from the driver.
    """

    allocated_bytes: int
    peak_bytes: int
    reserved_bytes: int
    total_bytes: int

    @property
    def peak_gib(self) -> float:
        return self.peak_bytes / GIB


def choose_device(info: ProcessInfo, kind: Literal["auto", "cuda", "cpu"] = "auto") -> torch.device:
    """The device of this process: GPU number ``local_rank``, or the CPU where no GPU is visible.

    Raises:
        LaunchError: CUDA was asked for and is absent, or the node has fewer GPUs than processes.
    """
    count = torch.cuda.device_count() if kind != "cpu" else 0
    if count == 0:
        if kind == "cuda":
            raise LaunchError(
                "A CUDA device was asked for, but torch sees none.",
                evidence=f"torch {torch.__version__}, built for CUDA {torch.version.cuda or '(none: a CPU build)'}.",
                next_step="Check nvidia-smi, CUDA_VISIBLE_DEVICES and that the installed torch is a CUDA build.",
            )
        return torch.device("cpu")
    if count == 1 and info.launcher == "slurm":
        # srun --gpus-per-task=1 shows each task its own GPU, always as number 0
        return torch.device("cuda", 0)
    if info.local_rank >= count:
        raise LaunchError(
            f"Local rank {info.local_rank} (rank {info.rank}) has no GPU: "
            f"{info.local_world_size} processes run on this node, but {count} GPUs are visible.",
            evidence="Each process needs a GPU of its own.",
            next_step=f"Start at most {count} processes a node (`--nproc {count}`), or look at CUDA_VISIBLE_DEVICES.",
        )
    return torch.device("cuda", info.local_rank)


def device_name(device: torch.device) -> str:
    """``"NVIDIA H200"`` on a GPU; the processor's model name on the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def capability(device: torch.device) -> tuple[int, int] | None:
    """CUDA compute capability: (9, 0) for Hopper; None on the CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def device_uuid(device: torch.device) -> str | None:
    """The GPU's name in NVML, ``"GPU-..."``, whatever number CUDA_VISIBLE_DEVICES gives it; None on the CPU."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def supports_bf16(device: torch.device) -> bool:
    """Whether bf16 matrix products run in hardware (Ampere and newer); true on the CPU, where torch has kernels."""
    found = capability(device)
    return found is None or found >= (8, 0)


def synchronize(device: torch.device) -> None:
    """Waits for everything that was queued on ``device``; does nothing on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory_stats(device: torch.device) -> MemoryStats:
    """Current and peak memory. Asks the allocator's own counters: the GPU is not synchronised."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        return MemoryStats(
            allocated_bytes=stats.get("allocated_bytes.all.current", 0),
            peak_bytes=stats.get("allocated_bytes.all.peak", 0),
            reserved_bytes=stats.get("reserved_bytes.all.current", 0),
            total_bytes=torch.cuda.get_device_properties(device).total_memory,
        )
    import psutil

    resident = psutil.Process().memory_info().rss
    # kilobytes on Linux, bytes on macOS
    unit = 1 if platform.system() == "Darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return MemoryStats(
        allocated_bytes=resident,
        peak_bytes=max(peak, resident),
        reserved_bytes=resident,
        total_bytes=psutil.virtual_memory().total,
    )


def reset_peak_memory(device: torch.device) -> None:
    """Starts a new peak on a GPU. The CPU's peak is the kernel's, over the life of the process, and stays."""
    if device.type == "cuda" and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats(device)


def versions() -> dict[str, str]:
    """What a number or a checkpoint was made with. Parts that are absent here (CUDA on a CPU build) are left out."""
    found: dict[str, str | None] = {
        "paceline": _installed("paceline"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": str(torch.backends.cudnn.version()) if torch.backends.cudnn.is_available() else None,
        "nccl": _nccl_version(),
        "driver": _driver_version(),
    }
    return {name: version for name, version in found.items() if version}


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _nccl_version() -> str | None:
    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def _driver_version() -> str | None:
    # the kernel module says it without starting nvidia-smi: "NVRM version: ... Kernel Module  580.82.07  Release ..."
    file = Path("/proc/driver/nvidia/version")
    if not file.exists():
        return None
    words = file.read_text().partition("Module")[2].split()
    return next((word for word in words if word[0].isdigit() and "." in word), None)
