"""What is the record of a run made of on this rank? Joins the parts of `observe` with the device and the mesh."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psutil
import torch
from torch import nn

from paceline.config.run import RunConfig
from paceline.observe.capture import Capture
from paceline.observe.capture_request import CaptureRequest
from paceline.observe.recorder import Recorder
from paceline.observe.step_clock import StepClock
from paceline.observe.telemetry.columns import MEMORY, UNKNOWN
from paceline.observe.telemetry.nvml import GpuProbe
from paceline.runtime.device import device_name, device_uuid, versions
from paceline.runtime.recorded import recorded_environment
from paceline.training.setup import Parts, rates

AXES = ("pp", "dp", "cp", "tp", "ep")


def build_recorder(parts: Parts) -> Recorder | None:
    """The recorder of this rank, which already listens to the mesh's collectives; None where it is switched off."""
    config, info = parts.config, parts.info
    if not config.observe.record:
        return None
    clock = StepClock(parts.device)
    parts.mesh.traffic.timer = clock
    uuid = device_uuid(parts.device)
    gpu = None if uuid is None else GpuProbe.open(uuid)
    port = config.observe.prometheus_port
    return Recorder(
        clock,
        limit_mb=config.observe.record_limit_mb,
        facts=_facts(parts) | ({} if gpu is None else gpu.facts),
        memory=lambda: _memory(parts.device),
        probes=[] if gpu is None else [gpu.read],
        stall_seconds=config.observe.stall_seconds,
        prometheus_port=port and port + info.local_rank,
        labels={"run": config.run.name, "rank": str(info.rank), "host": platform.node()},
    )


def build_capture(parts: Parts, recorder: Recorder) -> Capture:
    """What captures steps of this rank when it is asked to."""
    observe = parts.config.observe

    def listen(to: Callable[[str], None] | None) -> None:
        recorder.clock.listener = to

    return Capture(
        dict(_named(parts)),
        parts.device,
        listen=listen,
        requests=[
            CaptureRequest(steps=observe.capture_steps, at=at, ranks=observe.capture_ranks) for at in observe.capture_at
        ],
    )


def _named(parts: Parts) -> Iterator[tuple[str, nn.Module]]:
    """Modules by name, the whole model (a stage of it) as well: what it does between its modules is its own. A compiled
    block is one graph: what is inside runs without its hooks."""
    compiled = parts.config.parallel.compile
    for index, stage in enumerate(parts.stages):
        yield ("model" if len(parts.stages) == 1 else f"model.{index}"), stage
        for name, module in stage.named_modules():
            inside = name.startswith("blocks.") and name.count(".") > 1
            if name and not isinstance(module, nn.ModuleDict | nn.ModuleList) and not (compiled and inside):
                yield name, module


def _facts(parts: Parts) -> dict[str, Any]:
    config, info, mesh = parts.config, parts.info, parts.mesh
    rate = rates(config, parts.device, parts.documents)
    try:
        usable = len(psutil.Process().cpu_affinity())
    except (AttributeError, psutil.Error):
        usable = psutil.cpu_count() or 0
    return {
        "world_size": info.world_size,
        "local_rank": info.local_rank,
        "local_world_size": info.local_world_size,
        "host": platform.node(),
        "pid": os.getpid(),
        "device": parts.device.type,
        "device_name": device_name(parts.device),
        "place": {axis: mesh[axis].index for axis in AXES},
        "degrees": {axis: mesh.size(axis) for axis in AXES},
        "stages": [[min(layers), max(layers)] for stage in parts.stages if (layers := list(map(int, stage.blocks)))],
        "micro_batches": _micro_batches(config, mesh.dp_size),
        "tokens_per_step": config.train.global_batch_size * config.train.seq_len,
        "flops_per_token": rate.flops_per_token,
        "flops_convention": rate.flops_convention,
        "peak_tflops": rate.peak_tflops,
        "threads": torch.get_num_threads(),
        "cpus": usable,
        "versions": versions(),
        "environment": recorded_environment(),
    }


def _micro_batches(config: RunConfig, dp_size: int) -> int:
    return config.train.global_batch_size // (config.train.micro_batch_size * dp_size)


def _memory(device: torch.device) -> Mapping[str, int]:
    """By `columns.MEMORY`, from the allocator's counters: the GPU is not asked."""
    if device.type != "cuda":
        return dict.fromkeys(MEMORY, UNKNOWN)
    stats = torch.cuda.memory_stats(device)
    return {
        "allocated_mb": stats.get("allocated_bytes.all.current", 0) >> 20,
        "reserved_mb": stats.get("reserved_bytes.all.current", 0) >> 20,
        "peak_mb": stats.get("allocated_bytes.all.peak", 0) >> 20,
        "alloc_retries": stats.get("num_alloc_retries", 0),
    }
