"""Small traces as torch.profiler writes them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Kernel = tuple[str, float, float, int]
"""Name, start and length in milliseconds, stream."""


def kernel(
    name: str, start: float, length: float, stream: int = 7, *, launch: float | None = None, number: int = 0
) -> list[dict[str, Any]]:
    """A kernel, and the call that launched it ``launch`` milliseconds after the beginning."""
    event = {
        "ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": start * 1e3, "dur": length * 1e3,
        "args": {"stream": stream, "device": 0, "correlation": number},
    }  # fmt: skip
    if launch is None:
        return [event]
    call = {
        "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": launch * 1e3, "dur": 5,
        "args": {"correlation": number},
    }  # fmt: skip
    return [call, event]


def span(name: str, start: float, length: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "user_annotation",
        "name": name,
        "pid": 1,
        "tid": 1,
        "ts": start * 1e3,
        "dur": length * 1e3,
    }


def copy(start: float, length: float, size: int = 1 << 20) -> dict[str, Any]:
    return {
        "ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "pid": 0, "tid": 7, "ts": start * 1e3,
        "dur": length * 1e3, "args": {"stream": 7, "bytes": size},
    }  # fmt: skip


def write(
    path: Path, events: Iterable[dict[str, Any]], *, rank: int | None = None, device: str = "NVIDIA H200"
) -> Path:
    facts: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": device}]}
    if rank is not None:
        facts["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": 2}
    text = json.dumps({**facts, "traceEvents": list(events)})
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def fsdp_layers(gather: float, *, layers: int = 8, compute: float = 5.0) -> list[dict[str, Any]]:
    """Layers whose all-gather runs under the layer before it: the next layer waits where it is longer."""
    events, now, ready = [], 0.0, 0.0
    for layer in range(layers):
        start = max(now, ready)
        events += kernel("nvjet_tst_128x256_64x4_gemm", start, compute)
        begin = max(start, ready)
        events += kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", begin, gather, 20)
        now, ready = start + compute, begin + gather
        del layer
    return events
