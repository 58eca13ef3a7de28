"""What the interpreter cannot tell: that kernels compile for Hopper, and into code that the assembler builds rightly.

This needs no GPU. Triton 3.6's assembler takes a register apart before it is set (`kernels/turned_triton.py`) where
results of casts to fp8 are both packed and taken apart. So a kernel that stores them packed may not take them apart.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

triton = pytest.importorskip("triton")

_CAST = re.compile(r"cvt\.rn\.satfinite\.(?:relu\.)?e\dm\dx2\.f32\s+(%rs\d+),")
_PACKED = re.compile(r"mov\.b32\s+%r\d+, \{(%rs\d+), (%rs\d+)\}")


def ptx_of(kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int = 4) -> str:
    """Compiled as for large tensors: every pointer and size divides by 16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: types.get(name, "constexpr" if name in constants else "i32") for name in kernel.arg_names}
    aligned: dict[Any, Any] = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if name not in constants and not signature[name].startswith("tensordesc")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    text: str = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm["ptx"]
    return text


def taken_apart(ptx: str) -> set[str]:
    """Registers with two fp8 numbers that are both packed and read by something else."""
    casts = set(_CAST.findall(ptx))
    packed = {name for pair in _PACKED.findall(ptx) for name in pair}
    found = set()
    for line in ptx.splitlines():
        if _CAST.search(line) or _PACKED.search(line):
            continue
        found |= casts & packed & set(re.findall(r"%rs\d+\b", line.split("//")[0]))
    return {name for name in found if not re.search(rf"\.reg .*{name}", ptx)}


def test_the_search_finds_what_was_wrong() -> None:
    wrong = """
    cvt.rn.satfinite.e4m3x2.f32  %rs1, %r42, %r41;
    shr.u16 	%rs81, %rs1, 8;
    cvt.rn.satfinite.e4m3x2.f32  %rs2, %r44, %r43;
    mov.b32 	%r67, {%rs1, %rs2};
    """
    assert taken_apart(wrong) == {"%rs1"}


_MAXIMUM = re.compile(
    r"red\.relaxed\.gpu\.global\.max\.s32|atom\.(?:global\.gpu\.relaxed|relaxed\.gpu\.global)\.max\.s32"
)


def _types(low: str, *, sees: bool) -> dict[str, str]:
    """Of what casts have in common."""
    seen = {"largest": "*i32" if sees else "*fp32", "scale": "*fp32"}
    return {"factor": "*fp32", "values": f"*{low}", "bits": "*u8", "pairs": "*i16"} | seen


@pytest.mark.parametrize("sees", [False, True])
@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("low", ["fp8e4nv", "fp8e5"])
def test_casts(low: str, turns: bool, sees: bool) -> None:
    from paceline.kernels import fp8_triton

    types = {"x": "*bf16"} | _types(low, sees=sees)
    constants = {"LIMIT": 448.0, "SEES": sees, "TURNS": turns, "BLOCK_R": 64, "BLOCK_C": 64}
    ptx = ptx_of(fp8_triton._cast_transpose_kernel, types, constants)
    assert _CAST.search(ptx) and not taken_apart(ptx)
    assert bool(_MAXIMUM.search(ptx)) == sees, "one comparison a program, which orders nothing else"


@pytest.mark.parametrize("sees", [False, True])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("function", ["silu", "gelu_tanh"])
def test_gated(function: str, backward: bool, sees: bool) -> None:
    from paceline.kernels import fp8_gated_triton

    types = {"joined": "*bf16", "grad": "*bf16"} | _types("fp8e5" if backward else "fp8e4nv", sees=sees)
    constants = {"FUNCTION": function, "BACKWARD": backward, "LIMIT": 448.0, "SEES": sees, "ROWS": 64, "COLUMNS": 64}
    ptx = ptx_of(fp8_gated_triton._cast_kernel, types, constants)
    assert _CAST.search(ptx) and not taken_apart(ptx)
    assert bool(_MAXIMUM.search(ptx)) == sees


def test_matrices_of_experts() -> None:
    from paceline.kernels import expert_fp8_triton

    types = {"matrix": "*bf16", "values": "*fp8e4nv", "scale": "*fp32"}
    ptx = ptx_of(expert_fp8_triton._expert_cast_turned_kernel, types, {"R": 64, "C": 64})
    assert _CAST.search(ptx) and not taken_apart(ptx)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("sums", ["fp32", "bf16"])
def test_sums_by_the_copy_engine(sums: str, first: bool) -> None:
    """The interpreter has no such addition (Triton 3.7)."""
    from paceline.kernels import expert_gemm_triton

    types = {"grad": "*bf16", "x": "*bf16", "order": "*i32", "ends": "*i32", "out": f"tensordesc<{sums}[128,128]>"}
    constants = {"GRAD_PICKED": False, "X_PICKED": True, "FIRST": first, "ATOMIC": False, "BULK": True, "EVEN": True}
    constants |= {"P": 128, "Q": 128, "S": 64, "TOGETHER": 8}
    ptx = ptx_of(expert_gemm_triton._expert_weight_kernel, types, constants, warps=8)
    assert ("cp.reduce.async.bulk.tensor" in ptx) is not first


@pytest.mark.parametrize("casts", [False, True])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("function", ["silu", "gelu_tanh"])
def test_gated_in_wide_numbers(function: str, backward: bool, casts: bool) -> None:
    """Memory is what such a pass takes its time for: 16 bytes a thread at once, in and out."""
    from paceline.kernels import gated_triton

    low = "*fp32" if not casts else "*fp8e5" if backward else "*fp8e4nv"
    types = dict.fromkeys(("joined", "grad", "grad_joined", "hidden"), "*bf16")
    types |= {"found": "*i32" if casts else "*fp32", "values": low, "factor": "*fp32", "scale": "*fp32"}
    constants = {"FUNCTION": function, "CASTS": casts, "LIMIT": 448.0}
    constants |= {"ROWS": gated_triton._ROWS, "COLUMNS": gated_triton._COLUMNS}
    kernel = gated_triton._gated_backward_kernel if backward else gated_triton._gated_forward_kernel
    ptx = ptx_of(kernel, types, constants | ({"HIDDEN": True} if backward else {}), warps=gated_triton._WARPS)
    assert not taken_apart(ptx) and bool(_CAST.search(ptx)) == casts and bool(_MAXIMUM.search(ptx)) == casts
    wide = ptx.count("ld.global.v4.b32")
    assert wide == (6 if backward else 4) and ptx.count("st.global.v4.b32") >= wide // 2
