"""How long does a matrix product of some shape take, at best?

A product is cut into tiles, which are dealt out to the multiprocessors in waves: a last wave that is not full costs
as much as a full one, and small tiles read more than they compute. cuBLAS chooses among tile sizes and may cut the
inner dimension (split-K); so does this. The result is seconds at the device's best rate, to be divided by an
efficiency that the framework and the power limit leave (`Profile.gemm_efficiency`).

The relative rates of tile sizes are by the bytes that a tile reads for its operations: a 128 x 256 tile runs at full
rate, a 64 x 64 tile at 0.55 of it.
"""

from __future__ import annotations

import math
from functools import lru_cache

_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (128, 64, 0.75), (64, 128, 0.75), (64, 64, 0.55))
"""Rows, columns, rate relative to the best."""
_SPLITS = (1, 2, 4, 8)
HBM_SHARE = 0.85
"""Of HBM's rate, that a product reaches whose operands take longer to read than to multiply."""
FIXED_INNER = 280
"""Prologue and epilogue of a tile, in steps of the inner dimension: filling the pipeline, and writing the result."""
PERSISTENT_INNER = 130
"""The same, of kernels that write a tile while they compute the next one (cuBLAS 13 on Hopper): products with inner
2048 are 6 % slower than those with inner 100k (heads of docs/measured/moe_one_gpu.json: profile/qwen3 and
profile/deepseek, 26.3 and 24.8 ms, 18.0 and 16.8)."""


@lru_cache(maxsize=65536)
def gemm_occupancy(
    m: int, n: int, k: int, multiprocessors: int, groups: int = 1, fixed_inner: int = FIXED_INNER
) -> float:
    """Share of the best rate that a product [m, k] x [k, n] reaches, 0 ... 1; 1 = large and evenly cut. Of a grouped
    product, whose tiles are dealt out together, that many."""
    work = groups * m * n * k / multiprocessors
    best = math.inf
    for rows, columns, rate in _TILES:
        tiles = groups * math.ceil(m / rows) * math.ceil(n / columns)
        for split in _SPLITS:
            inner = k / split
            if split > 1 and (inner < 512 or tiles >= 2 * multiprocessors):
                break
            jobs = tiles * split
            # waves are not in lockstep: half of a last wave's idle time is taken by what runs beside it
            waves = max(1.0, 0.5 * (math.ceil(jobs / multiprocessors) + jobs / multiprocessors))
            extra = 64 * (split - 1) / split if split > 1 else 0
            best = min(best, waves * rows * columns * (inner + fixed_inner + extra) / rate)
    return min(1.0, work / best)


def gemm_seconds(
    m: float,
    n: float,
    k: float,
    tflops: float,
    hbm_tb_per_s: float,
    multiprocessors: int,
    groups: int = 1,
    fixed_inner: int = FIXED_INNER,
) -> float:
    """One product (or a grouped one) of 16-bit operands at the device's best rate, or as fast as its operands can be
    read."""
    rows, columns, inner = max(1, round(m)), max(1, round(n)), max(1, round(k))
    flops = 2.0 * groups * m * n * k
    compute = flops / (tflops * 1e12 * gemm_occupancy(rows, columns, inner, multiprocessors, groups, fixed_inner))
    memory = 2.0 * groups * (m * k + k * n + m * n) / (HBM_SHARE * 1e12 * hbm_tb_per_s)
    return max(compute, memory)


@lru_cache(maxsize=65536)
def linear_seconds(
    tokens: float,
    inputs: float,
    outputs: float,
    tflops: float,
    hbm_tb_per_s: float,
    multiprocessors: int,
    groups: int = 1,
    fixed_inner: int = FIXED_INNER,
) -> tuple[float, float]:
    """A linear layer's forward product, and the two of its backward (gradients of inputs and of weights); of so many
    alike, together."""
    device = (tflops, hbm_tb_per_s, multiprocessors, groups, fixed_inner)
    forward = gemm_seconds(tokens, outputs, inputs, *device)
    inputs_gradient = gemm_seconds(tokens, inputs, outputs, *device)
    weights_gradient = gemm_seconds(inputs, outputs, tokens, *device)
    return forward, inputs_gradient + weights_gradient
