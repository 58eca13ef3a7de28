"""How fast could this device be? Published peaks, dense, by the name under which the device reports itself.

A device that is not in the table has no peak: MFU is then "not available", never a guess. Sparse (2:4) and
fp16-accumulating marketing figures are not used anywhere.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from paceline.errors import ConfigError

PeakDtype = Literal["bf16", "fp16", "fp8", "fp32", "tf32"]


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One product. Rates are dense, per GPU; links are per direction; None where no figure is known."""

    name: str
    bf16: float | None
    """TFLOP/s, fp32 accumulation; as all peaks here."""
    fp8: float | None
    memory_gb: float
    """As it is sold; see `memory_bytes`."""
    memory_tb_per_s: float
    nvlink_gb_per_s: float | None
    """NVLink or xGMI, all links of one GPU together."""
    pcie_gb_per_s: float | None
    fp16: float | None = None
    """Only where it is not bf16's."""
    fp32: float | None = None
    """Outside tensor cores: what torch does unless TF32 is allowed."""
    tf32: float | None = None
    fp4: float | None = None
    is_ultra: bool = False
    """Blackwell Ultra: the same peaks in bf16 and fp8 as Blackwell, at higher limits of power."""
    multiprocessors: int = 132
    """SMs or CUs; tiles of a matrix product are dealt out to them."""
    matmul_share: float = 0.8
    """Of the bf16 peak, reached by the best large matrix product (MAMF of stas00/ml-engineering; 0.8 where it has
    none)."""
    fp8_matmul_share: float = 0.72
    """Of the fp8 peak; of the fp4 peak where there is one, 0.85 of this (no measured figure; scales of 16 elements)."""
    patterns: tuple[str, ...]
    """Regular expressions for the whole name as CUDA or ROCm reports it. MIG slices, laptop parts and other boards of
    the same chip must not match: they have other peaks."""
    source: str
    memory_share: float = 0.985
    """What the driver leaves of `memory_gb` GiB to programs; less where error correction takes a part of it."""

    @property
    def memory_bytes(self) -> float:
        """That programs can have. "80 GB" are GiB, but for what the driver keeps (torch sees 79.1 to 79.3 GiB of an
        A100 or H100 of 80, 23.6 of an RTX 4090, 139 of an H200 of 141)."""
        return self.memory_gb * self.memory_share * 2**30

    def peak_tflops(self, dtype: PeakDtype) -> float | None:
        if dtype == "fp16":
            return self.fp16 or self.bf16
        value: float | None = getattr(self, dtype)
        return value


_STAS = "stas00/ml-engineering, accelerator tables"
_AIC = "aiconfigurator systems/*.yaml"
_HOPPER = "fp32 and TF32: glennklockwood.com/garden/processors/h100"
_MEMORY = "general knowledge, not verified"

_TABLE = (
    Hardware(
        name="V100 SXM 32", bf16=None, fp16=125, fp8=None, memory_gb=32, memory_tb_per_s=0.90, nvlink_gb_per_s=150,
        pcie_gb_per_s=16, fp32=15.7, patterns=(r"Tesla V100-SXM[23]-32GB(-LS)?",),
        multiprocessors=80, matmul_share=0.8, source=f"{_STAS}; fp32 and NVLink: {_MEMORY}",
    ),
    Hardware(
        name="A100 SXM 40", bf16=312, fp8=None, memory_gb=40, memory_tb_per_s=1.555, nvlink_gb_per_s=300,
        pcie_gb_per_s=31, fp32=19.5, tf32=156, patterns=(r"(NVIDIA )?A100-SXM4-40GB",),
        multiprocessors=108, matmul_share=0.87, source=f"{_STAS}; fp32 and TF32: NVIDIA's data sheet, {_MEMORY}",
    ),
    Hardware(
        name="A100 SXM 80", bf16=312, fp8=None, memory_gb=80, memory_tb_per_s=2.0, nvlink_gb_per_s=300,
        pcie_gb_per_s=31, fp32=19.5, tf32=156, patterns=(r"(NVIDIA )?A100-SXM4-80GB",),
        multiprocessors=108, matmul_share=0.87, source=f"{_STAS}; fp32 and TF32: NVIDIA's data sheet, {_MEMORY}",
    ),
    Hardware(
        name="A100 PCIe 80", bf16=312, fp8=None, memory_gb=80, memory_tb_per_s=1.94, nvlink_gb_per_s=300,
        pcie_gb_per_s=31, fp32=19.5, tf32=156, patterns=(r"NVIDIA A100 80GB PCIe",),
        multiprocessors=108, matmul_share=0.81,
        source=f"{_STAS}; NVLink only to the bridged neighbour; fp32 and TF32: NVIDIA's data sheet, {_MEMORY}",
    ),
    Hardware(
        name="A800 SXM", bf16=312, fp8=None, memory_gb=80, memory_tb_per_s=2.0, nvlink_gb_per_s=200,
        pcie_gb_per_s=31, patterns=(r"NVIDIA A800-SXM4-80GB",), multiprocessors=108, matmul_share=0.87, source=_MEMORY,
    ),
    Hardware(
        name="H100 SXM", bf16=989, fp8=1979, memory_gb=80, memory_tb_per_s=3.35, nvlink_gb_per_s=450,
        pcie_gb_per_s=63, fp32=66.9, tf32=494.7, patterns=(r"NVIDIA H100 80GB HBM3", r"NVIDIA H100 SXM5?"),
        matmul_share=0.80, fp8_matmul_share=0.71, source=f"{_STAS}; {_AIC}; {_HOPPER}",
    ),
    Hardware(
        name="H100 PCIe", bf16=756, fp8=1513, memory_gb=80, memory_tb_per_s=2.0, nvlink_gb_per_s=300,
        pcie_gb_per_s=63, fp32=51.2, patterns=(r"NVIDIA H100 PCIe",),
        multiprocessors=114, source=f"{_STAS}; NVLink only to the bridged neighbour; fp32: hmc-tech.com",
    ),
    Hardware(
        name="H100 SXM 96", bf16=989, fp8=1979, memory_gb=96, memory_tb_per_s=2.4, nvlink_gb_per_s=450,
        pcie_gb_per_s=63, fp32=66.9, tf32=494.7, patterns=(r"NVIDIA H100 96GB HBM2e",), matmul_share=0.72,
        fp8_matmul_share=0.62,
        source=f"{_STAS}; the part of torchtitan's tables, at 500 W: its shares of the peak are guessed "
        f"from the power; {_MEMORY}",
    ),
    Hardware(
        name="H800 SXM", bf16=989, fp8=1979, memory_gb=80, memory_tb_per_s=3.35, nvlink_gb_per_s=200,
        pcie_gb_per_s=63, patterns=(r"NVIDIA H800",), source=_MEMORY,
    ),
    Hardware(
        name="H20", bf16=148, fp8=296, memory_gb=96, memory_tb_per_s=4.0, nvlink_gb_per_s=450, pcie_gb_per_s=63,
        patterns=(r"NVIDIA H20",), multiprocessors=78,
        source=f"Hugging Face hardware page (bf16, memory); rest: {_MEMORY}",
    ),
    Hardware(
        name="H200 SXM", bf16=989, fp8=1979, memory_gb=141, memory_tb_per_s=4.8, nvlink_gb_per_s=450,
        pcie_gb_per_s=63, fp32=66.9, tf32=494.7, patterns=(r"NVIDIA H200",),
        matmul_share=0.80, fp8_matmul_share=0.73, source=f"{_STAS}; {_AIC}; {_HOPPER}",
    ),
    Hardware(
        name="GH200 96", bf16=989, fp8=1979, memory_gb=96, memory_tb_per_s=4.0, nvlink_gb_per_s=450,
        pcie_gb_per_s=None, fp32=66.9, tf32=494.7, patterns=(r"NVIDIA GH200 (480GB|120GB|96GB HBM3)",),
        matmul_share=0.84, source=f"{_STAS}; {_HOPPER}",
    ),
    Hardware(
        name="GH200 141", bf16=989, fp8=1979, memory_gb=141, memory_tb_per_s=4.8, nvlink_gb_per_s=450,
        pcie_gb_per_s=None, fp32=66.9, tf32=494.7, patterns=(r"NVIDIA GH200 (144G|141GB) HBM3e",),
        matmul_share=0.84, source=f"{_STAS}; {_HOPPER}",
    ),
    Hardware(
        name="B200 SXM", bf16=2250, fp8=4500, memory_gb=180, memory_tb_per_s=8.0, nvlink_gb_per_s=900,
        pcie_gb_per_s=63, patterns=(r"NVIDIA B200",),
        fp4=9000, multiprocessors=148, matmul_share=0.78, fp8_matmul_share=0.76,
        source=f"{_STAS}; {_AIC}",
    ),
    Hardware(
        name="B300 SXM", bf16=2250, fp8=4500, memory_gb=288, memory_tb_per_s=8.0, nvlink_gb_per_s=900,
        pcie_gb_per_s=63, patterns=(r"NVIDIA B300( SXM6)?( AC)?",),
        fp4=13500, is_ultra=True, multiprocessors=148, matmul_share=0.79, fp8_matmul_share=0.76,
        source=_STAS,
    ),
    Hardware(
        name="GB200", bf16=2500, fp8=5000, memory_gb=186, memory_tb_per_s=8.0, nvlink_gb_per_s=900,
        pcie_gb_per_s=None, patterns=(r"NVIDIA GB200",),
        fp4=10000, multiprocessors=148, matmul_share=0.73, fp8_matmul_share=0.72,
        source=f"{_STAS}; {_AIC}",
    ),
    Hardware(
        name="GB300", bf16=2500, fp8=5000, memory_gb=288, memory_tb_per_s=8.0, nvlink_gb_per_s=900,
        pcie_gb_per_s=None, patterns=(r"NVIDIA GB300",),
        fp4=15000, is_ultra=True, multiprocessors=148, matmul_share=0.73, fp8_matmul_share=0.72,
        source=f"{_STAS}; rest: {_MEMORY}",
    ),
    Hardware(
        name="L40S", bf16=362, fp8=733, memory_gb=48, memory_tb_per_s=0.864, nvlink_gb_per_s=None, pcie_gb_per_s=31,
        memory_share=0.925, patterns=(r"NVIDIA L40S",), multiprocessors=142, source=f"{_STAS}; {_AIC}",
    ),
    Hardware(
        name="L40", bf16=181, fp8=362, memory_gb=48, memory_tb_per_s=0.864, nvlink_gb_per_s=None, pcie_gb_per_s=31,
        fp32=90.5, tf32=90.5, memory_share=0.925, patterns=(r"NVIDIA L40",), multiprocessors=142,
        source=f"NVIDIA's data sheet of the L40, half of its sparse figures; {_MEMORY}",
    ),
    Hardware(
        name="RTX 6000 Ada", bf16=364, fp8=728, memory_gb=48, memory_tb_per_s=0.96, nvlink_gb_per_s=None,
        pcie_gb_per_s=31, fp32=91.1, patterns=(r"NVIDIA RTX 6000 Ada Generation",), multiprocessors=142,
        source=f"NVIDIA's data sheet of the RTX 6000 Ada Generation: fp8 half of its 1,457 sparse, bf16 half of that; "
        f"{_MEMORY}",
    ),
    Hardware(
        name="L4", bf16=121, fp8=242.5, memory_gb=24, memory_tb_per_s=0.30, nvlink_gb_per_s=None, pcie_gb_per_s=31,
        fp32=30.3, tf32=60, memory_share=0.925, patterns=(r"NVIDIA L4",), multiprocessors=58,
        source=f"NVIDIA's data sheet, half of its sparse figures; at 72 W; {_MEMORY}",
    ),
    Hardware(
        name="A10", bf16=125, fp8=None, memory_gb=24, memory_tb_per_s=0.60, nvlink_gb_per_s=None, pcie_gb_per_s=31,
        fp32=31.2, tf32=62.5, memory_share=0.925, patterns=(r"(NVIDIA )?A10",), multiprocessors=72,
        source=f"NVIDIA's data sheet; at 150 W; {_MEMORY}",
    ),
    Hardware(
        name="A10G", bf16=70, fp8=None, memory_gb=24, memory_tb_per_s=0.60, nvlink_gb_per_s=None, pcie_gb_per_s=31,
        fp32=35, tf32=35, memory_share=0.925, patterns=(r"(NVIDIA )?A10G",), multiprocessors=80,
        source=f"NVIDIA's data sheet of the A10G (AWS G5), dense figures; {_MEMORY}",
    ),
    Hardware(
        name="T4", bf16=None, fp16=65, fp8=None, memory_gb=16, memory_tb_per_s=0.32, nvlink_gb_per_s=None,
        pcie_gb_per_s=16, fp32=8.1, memory_share=0.92, patterns=(r"(Tesla|NVIDIA) T4",), multiprocessors=40,
        source=f"NVIDIA's data sheet of the T4, peaks at boost; 70 W hold less; {_MEMORY}",
    ),
    Hardware(
        name="RTX A5000", bf16=111.1, fp8=None, memory_gb=24, memory_tb_per_s=0.768, nvlink_gb_per_s=None,
        pcie_gb_per_s=31, fp32=27.8, patterns=(r"(NVIDIA )?RTX A5000",), multiprocessors=64,
        source=f"NVIDIA's data sheet, half of its sparse figure; NVLink only to a bridged neighbour; {_MEMORY}",
    ),
    Hardware(
        name="RTX 3090", bf16=71, fp8=None, memory_gb=24, memory_tb_per_s=0.936, nvlink_gb_per_s=None,
        pcie_gb_per_s=31, fp32=35.6, tf32=35.6, patterns=(r"(NVIDIA )?GeForce RTX 3090",), multiprocessors=82,
        source="NVIDIA's GA102 whitepaper, fp32 accumulation; NVLink only to a bridged neighbour; "
        f"fp32 and TF32: {_MEMORY}",
    ),
    Hardware(
        name="RTX 4090", bf16=165.2, fp8=330, memory_gb=24, memory_tb_per_s=1.008, nvlink_gb_per_s=None,
        pcie_gb_per_s=31, patterns=(r"NVIDIA GeForce RTX 4090",), multiprocessors=128,
        source="waredb and hmc-tech.com; fp32 accumulation",
    ),
    Hardware(
        name="RTX 5090", bf16=209.5, fp8=419, memory_gb=32, memory_tb_per_s=1.792, nvlink_gb_per_s=None,
        pcie_gb_per_s=63, patterns=(r"NVIDIA GeForce RTX 5090",),
        multiprocessors=170, source=f"spheron and pocketmags (memory); peaks with fp32 accumulation: {_MEMORY}",
    ),
    Hardware(
        name="MI300X", bf16=1307, fp8=2610, memory_gb=192, memory_tb_per_s=5.3, nvlink_gb_per_s=448,
        pcie_gb_per_s=63, patterns=(r"AMD Instinct MI300X( OAM)?",), multiprocessors=304, matmul_share=0.51,
        source=f"{_STAS}; xGMI: {_MEMORY}",
    ),
    Hardware(
        name="MI325X", bf16=1300, fp8=2610, memory_gb=256, memory_tb_per_s=6.0, nvlink_gb_per_s=448,
        pcie_gb_per_s=63, patterns=(r"AMD Instinct MI325X( OAM)?",), multiprocessors=304, matmul_share=0.60,
        source=f"{_STAS}; xGMI: {_MEMORY}",
    ),
    Hardware(
        name="MI355X", bf16=2500, fp8=5000, memory_gb=288, memory_tb_per_s=8.0, nvlink_gb_per_s=538,
        pcie_gb_per_s=63, patterns=(r"AMD Instinct MI355X( OAM)?",), multiprocessors=256, matmul_share=0.63,
        source=f"{_STAS}; xGMI: {_MEMORY}",
    ),
)  # fmt: skip


_COMMON = ("RTX 4090", "A100 SXM 40", "L40S", "A100 SXM 80", "H100 SXM", "H200 SXM", "B200 SXM", "MI300X")
"""By memory: cards that most people ask about."""


def common_hardware() -> tuple[Hardware, ...]:
    """A few products that stand for the sizes of memory there are, the smallest first."""
    return tuple(sorted((entry for entry in _TABLE if entry.name in _COMMON), key=lambda entry: entry.memory_gb))


def hardware_names() -> tuple[str, ...]:
    """The names that `cluster.gpu` takes."""
    return tuple(entry.name for entry in _TABLE)


def find_hardware(name: str) -> Hardware | None:
    """The product of that name: ours ("H100 SXM", in any case) or the device's own ("NVIDIA H100 80GB HBM3")."""
    for entry in _TABLE:
        if name.lower() == entry.name.lower() or any(re.fullmatch(pattern, name) for pattern in entry.patterns):
            return entry
    return None


def peak_tflops(name: str, dtype: PeakDtype = "bf16") -> float | None:
    """Dense peak in TFLOP/s, or None for a device or a precision that the table does not have."""
    entry = find_hardware(name)
    return None if entry is None else entry.peak_tflops(dtype)


def mfu(tflops: float, peak: float | None) -> float | None:
    """Model FLOPs utilisation, 0 ... 1: achieved TFLOP/s over the peak; None without a peak.

    Raises:
        ConfigError: more than 100 %, so the peak, the FLOP count or the timing is wrong.
    """
    if peak is None:
        return None
    if tflops > peak:
        raise ConfigError(
            f"MFU would be {tflops / peak:.1%}: {tflops:.4g} TFLOP/s against a peak of {peak:.4g}",
            evidence="No device is faster than its peak: this is the peak of another device or precision, the FLOPs "
            "are counted for another model, or the time is too short (not synchronised).",
            next_step="Compare cluster.gpu with the device, and train.precision with the peak that was used.",
        )
    return tflops / peak
