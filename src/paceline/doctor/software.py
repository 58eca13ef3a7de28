"""Do driver, CUDA, torch and its libraries agree, and what lacks for the fast paths on this card? Torch-free.

Versions are what packages say of themselves (and what torch says, where the caller asked it). A pair is judged only
where both are known.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata

from paceline.config.run import RunConfig
from paceline.report.finding import Finding, Severity
from paceline.report.table import Table, table

MINIMUM_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
"""Of any CUDA of that generation. Source: NVIDIA's CUDA compatibility guide and release notes."""

MINIMUM_CUDA = {(8, 9): (11, 8), (9, 0): (11, 8), (10, 0): (12, 8), (10, 3): (12, 9), (12, 0): (12, 8)}
"""That compiles for a compute capability. Source: CUDA release notes (Ada and Hopper 11.8, Blackwell 12.8)."""

DROPPED = {13: (7, 5)}
"""The least compute capability that a generation of CUDA still compiles for. Source: CUDA 13.0 release notes."""

_LIBRARIES = ("nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "triton",
              "nvidia-cublas-cu12", "nvidia-cublas")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Software:
    """What is installed; empty where it is not known."""

    driver: str = ""
    driver_cuda: str = ""
    """The newest CUDA that the driver knows."""
    torch: str = ""
    cuda: str = ""
    """That torch was built for; empty of a CPU build or where it is not known."""
    nccl: str = ""
    """That torch has loaded."""
    cudnn: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Installed, by name."""
    wanted: Mapping[str, str] = field(default_factory=dict)
    """Exact versions that torch asks for, by name."""
    capability: tuple[int, int] | None = None
    flash_attention_4: bool | None = None
    compiler: bool | None = None
    """A C compiler, which Triton needs."""


def read_software(loaded: Mapping[str, str] | None = None, **known: object) -> Software:
    """This Python's packages.

    Args:
        loaded: what torch says of itself (`runtime.device.versions`), where it was asked.
        known: further fields, such as ``driver``.
    """
    found = dict(loaded or {})
    torch = found.get("torch") or _version("torch")
    built_for = re.search(r"\+cu(\d+)(\d)$", torch)
    fields: dict[str, object] = {
        "driver": found.get("driver", ""),
        "torch": torch,
        "cuda": found.get("cuda") or (f"{built_for[1]}.{built_for[2]}" if built_for else ""),
        "nccl": found.get("nccl", ""),
        "cudnn": _cudnn(found.get("cudnn", "")),
        "packages": {name: version for name in _LIBRARIES if (version := _version(name))},
        "wanted": _pins("torch"),
        "flash_attention_4": _has_flash_attention_4(),
        "compiler": any(shutil.which(name) for name in ("gcc", "cc", "clang")),
    }
    return Software(**{**fields, **{name: value for name, value in known.items() if value}})  # type: ignore[arg-type]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _pins(package: str) -> dict[str, str]:
    try:
        asked = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return {}
    pins = (re.match(r"([\w\-]+)\s*==\s*([\w.]+)", line) for line in asked)
    return {match[1]: match[2] for match in pins if match}


def _has_flash_attention_4() -> bool:
    try:
        # the second imports the package itself, which may be FlashAttention-2 for another torch, and fail in any way
        return bool(importlib.util.find_spec("flash_attn") and importlib.util.find_spec("flash_attn.cute"))
    except Exception:  # noqa: BLE001
        return False


def _cudnn(number: str) -> str:
    """91900 is 9.19.0; before cuDNN 9, 8907 is 8.9.7."""
    if not number.isdecimal():
        return number
    value = int(number)
    parts = (
        (value // 10000, value // 100 % 100, value % 100)
        if value >= 90000
        else (value // 1000, value // 100 % 10, value % 100)
    )
    return ".".join(map(str, parts))


def software_table(found: Software) -> Table:
    rows = [
        ("driver", found.driver or "not known"),
        ("CUDA of the driver", found.driver_cuda or "not known"),
        ("torch", found.torch or "not installed"),
        ("CUDA of torch", found.cuda or "none (a CPU build), or not known"),
        ("NCCL", found.nccl or _of(found, "nccl") or "not known"),
        ("cuDNN", found.cudnn or _of(found, "cudnn") or "not known"),
        ("triton", found.packages.get("triton", "not installed")),
        ("flash-attn-4", {True: "installed", False: "not installed", None: "not known"}[found.flash_attention_4]),
    ]
    return table(("", ""), rows, title="Software")


def _of(found: Software, library: str) -> str:
    return next((version for name, version in found.packages.items() if library in name), "")


def judge_software(found: Software, *, config: RunConfig | None = None, gpus: int = 0) -> list[Finding]:
    """Findings about pairs that do not agree, and fast paths that are missing."""
    return [
        *_build(found, gpus),
        *_driver(found),
        *_architecture(found),
        *_pinned(found),
        *_nccl(found),
        *_fast_paths(found, config),
    ]


def _finding(
    id: str, severity: Severity, subject: str, evidence: str, next_step: str, gain: str | None = None
) -> Finding:
    return Finding(
        id=f"software.{id}", severity=severity, subject=subject, evidence=evidence, next_step=next_step, gain=gain
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _build(found: Software, gpus: int) -> Iterator[Finding]:
    if not found.torch:
        yield _finding(
            "no-torch",
            "error",
            "torch is not installed in this Python",
            "Checks of recipes and plans do without it; training does not.",
            "pip install torch, or start the Python that has it.",
        )
    elif gpus and found.torch.endswith("+cpu"):
        yield _finding(
            "cpu-build",
            "error",
            f"torch {found.torch} is a CPU build, on a machine with {gpus} GPUs",
            "It sees no GPU.",
            "Install a CUDA build of the same version from PyTorch's own index.",
        )


def _driver(found: Software) -> Iterator[Finding]:
    cuda, driver = _numbers(found.cuda), _numbers(found.driver)
    if not cuda or not driver:
        if found.cuda and not found.driver:
            yield _finding(
                "no-driver",
                "note",
                f"whether the driver suits CUDA {found.cuda} is not determined: no driver is seen here",
                "/proc/driver/nvidia/version is missing and nvidia-smi does not answer.",
                "Ask on the machine that trains: nvidia-smi.",
            )
        return
    least = MINIMUM_DRIVER.get(cuda[0])
    if least and driver[:2] < least:
        yield _finding(
            "driver",
            "error",
            f"driver {found.driver} is too old for torch's CUDA {found.cuda}",
            f"CUDA {cuda[0]} needs driver {least[0]}.{least[1]} or later; torch then says 'the NVIDIA driver on your "
            "system "
            "is too old' and sees no GPU.",
            f"A driver of branch {least[0]} or later, or a torch for CUDA {cuda[0] - 1}.",
        )
    elif (own := _numbers(found.driver_cuda)) and own[:2] < cuda[:2]:
        yield _finding(
            "driver-minor",
            "note",
            f"the driver knows CUDA {found.driver_cuda}, torch is built for {found.cuda}",
            "That works within a generation (minor version compatibility), without what is new in the newer one.",
            "A newer driver, if kernels fail with 'PTX was compiled with an unsupported toolchain'.",
        )


def _architecture(found: Software) -> Iterator[Finding]:
    cuda, capability = _numbers(found.cuda), found.capability
    if not cuda or capability is None:
        return
    least = MINIMUM_CUDA.get(capability)
    if least and cuda[:2] < least:
        yield _finding(
            "architecture",
            "error",
            f"torch for CUDA {found.cuda} has no kernels for this card (sm_{capability[0]}{capability[1]})",
            f"They come with CUDA {least[0]}.{least[1]}: 'no kernel image is available for execution on the device'.",
            f"A torch for CUDA {least[0]}.{least[1]} or later.",
        )
    oldest = DROPPED.get(cuda[0])
    if oldest and capability < oldest:
        yield _finding(
            "architecture",
            "error",
            f"CUDA {cuda[0]} no longer compiles for this card (sm_{capability[0]}{capability[1]})",
            f"The oldest is sm_{oldest[0]}{oldest[1]}.",
            f"A torch for CUDA {cuda[0] - 1}.",
        )


def _pinned(found: Software) -> Iterator[Finding]:
    for name, wanted in found.wanted.items():
        version = found.packages.get(name)
        if version and _numbers(version) != _numbers(wanted):
            yield _finding(
                "pin",
                "warning",
                f"{name} {version} is installed; torch {found.torch} asks for {wanted}",
                "Torch is tested with that version alone; kernels that it generates or loads may fail or be slow.",
                f"pip install {name}=={wanted}",
            )


def _nccl(found: Software) -> Iterator[Finding]:
    package = _of(found, "nccl")
    if package and found.nccl and _numbers(package) != _numbers(found.nccl):
        yield _finding(
            "nccl",
            "warning",
            f"torch has loaded NCCL {found.nccl}; the package is {package}",
            "Another libnccl comes first: from LD_PRELOAD, LD_LIBRARY_PATH or the system. Nodes with different ones "
            "hang "
            "or fail at the start.",
            "Unset LD_PRELOAD and LD_LIBRARY_PATH, or make sure that all nodes load the same.",
        )
    versions = [name for name in found.packages if "nccl" in name]
    if len(versions) > 1:
        yield _finding(
            "two-nccls",
            "warning",
            f"two NCCL packages are installed: {' and '.join(versions)}",
            "They write into the same folder; which one is loaded depends on the order of installation.",
            f"pip uninstall {versions[0]}, if torch is built for the other.",
        )


def _fast_paths(found: Software, config: RunConfig | None) -> Iterator[Finding]:
    capability = found.capability
    if capability is None:
        return
    shown = f"sm_{capability[0]}{capability[1]}"
    asked_fp8 = config is not None and config.train.precision == "fp8"
    if capability < (8, 9):
        yield _finding(
            "fp8",
            "error" if asked_fp8 else "note",
            f"this card ({shown}) has no fp8" + (", which the recipe asks for" if asked_fp8 else ""),
            "fp8 products need compute capability 8.9 (Ada) or later.",
            "--set train.precision=bf16" if asked_fp8 else "Nothing.",
        )
    if capability < (8, 0):
        yield _finding(
            "bf16",
            "warning",
            f"this card ({shown}) has no bf16 matrix products",
            "bf16 needs Ampere or later; here it is emulated and slow.",
            "Train in fp32, or on a newer card.",
        )
    if "triton" not in found.packages:
        compiles = config is not None and config.parallel.compile
        yield _finding(
            "triton",
            "error" if compiles else "warning",
            "Triton is not installed" + (", and the recipe asks for compiled blocks" if compiles else ""),
            "Without it there are no compiled blocks and no fused kernels for fp8, experts and AdamW.",
            f"pip install triton{'==' + found.wanted['triton'] if 'triton' in found.wanted else ''}",
        )
    elif found.compiler is False:
        yield _finding(
            "compiler",
            "error",
            "Triton is there, but no C compiler (gcc, clang)",
            "It compiles a small launcher at the first use of each kernel, and fails without one.",
            "Install gcc in the image.",
        )
    if capability[0] in (9, 10) and found.flash_attention_4 is False:
        asked = config is not None and config.train.attention_kernel == "flash4"
        yield _finding(
            "flash-attention-4",
            "warning" if asked else "note",
            "FlashAttention-4 is not installed"
            + ("; the recipe asks for it, and gets what 'auto' takes" if asked else ""),
            f"It is written for this card ({shown}); which attention is faster for your shapes is to be measured.",
            "pip install 'flash-attn-4[cu13]', and --set train.attention_kernel=flash4.",
        )
