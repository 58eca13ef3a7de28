"""Measures everything, in the order in which parts disturb each other least. Collective over all ranks."""

from __future__ import annotations

import socket
import time

import torch
import torch.distributed as dist

from paceline.config.run import RunConfig
from paceline.doctor.ceilings.amounts import CPU, GPU, Amounts
from paceline.doctor.ceilings.device import device_rates
from paceline.doctor.ceilings.links import collective_rates, node_rates, pair_rates
from paceline.doctor.ceilings.storage import storage_rates
from paceline.doctor.measured.record import CollectiveRecord, Measured, RankRecord
from paceline.runtime.device import device_name, versions
from paceline.runtime.launcher import ProcessInfo


def measure(
    info: ProcessInfo, device: torch.device, config: RunConfig | None, amounts: Amounts | None = None
) -> Measured:
    """All ceilings of this rank, and those of all ranks together; the same on every rank.

    Call it within `runtime.process.process_group`.

    Args:
        config: whose dataset, run folder and loader are measured; None leaves them out.
    """
    began = time.perf_counter()
    amounts = amounts or (GPU if device.type == "cuda" else CPU)
    rates, skipped = device_rates(device, amounts)
    if config is not None:
        more, left_out = storage_rates(config, info.rank, info.world_size, amounts)
        rates, skipped = rates | more, skipped | left_out
    own = RankRecord(
        rank=info.rank,
        node=info.node_rank,
        host=socket.gethostname(),
        gpu=info.local_rank,
        device=device_name(device) if device.type == "cuda" else "cpu",
        rates=rates,
        skipped=skipped,
        versions={name: version for name, version in versions().items() if name in ("torch", "nccl", "cuda", "driver")},
    )
    if info.world_size == 1:
        return Measured(ranks=(own,), backend="", seconds=time.perf_counter() - began)
    gathered: list[RankRecord | None] = [None] * info.world_size
    dist.all_gather_object(gathered, own)
    ranks = tuple(record for record in gathered if record is not None)
    nodes = [record.node for record in ranks]
    pairs = pair_rates(device, amounts, nodes)
    between = node_rates(device, amounts, nodes)
    collectives: tuple[CollectiveRecord, ...] = collective_rates(device, amounts)
    return Measured(
        ranks=ranks,
        backend="nccl" if device.type == "cuda" else "gloo",
        pairs=pairs,
        nodes=between,
        collectives=collectives,
        seconds=time.perf_counter() - began,
    )
