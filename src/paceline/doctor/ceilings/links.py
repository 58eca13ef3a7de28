"""What do ranks reach together? Pairs of a node, pairs of nodes, every collective by size. All ranks take part."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.doctor.ceilings.amounts import Amounts
from paceline.doctor.measured.expected import wire_bytes
from paceline.doctor.measured.record import CollectiveRecord
from paceline.runtime.device import synchronize

# torch 2.13 renamed them and warns at the old names; 2.11 has only those
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_MOST_SHIFTS = 3
"""Nodes are paired with the next, the second and the third: enough to tell a slow node from a slow way."""
_SHORT = 0.02
"""Seconds of a call up to which several are queued."""
_SPENT = 0.5
"""Seconds that a figure may take."""
_LONGEST = 2.0
"""Seconds of a call beyond which larger sizes are left out."""


def collective_rates(device: torch.device, amounts: Amounts) -> tuple[CollectiveRecord, ...]:
    """Each collective over all ranks, by size of the full tensor. Collective; the same on all ranks.

    Where a network is slow, calls are repeated less often, and sizes that would take seconds each are left out.
    """
    ranks = dist.get_world_size()
    found: list[CollectiveRecord] = []
    for size in amounts.collective_bytes:
        if found and max(record.seconds for record in found) * size / found[-1].size_bytes > _LONGEST:
            break
        # bf16 elements, the same number for every rank
        part = max(1, size // (2 * ranks))
        whole = torch.zeros(part * ranks, dtype=torch.bfloat16, device=device)
        own = torch.zeros(part, dtype=torch.bfloat16, device=device)
        other = torch.zeros_like(whole)
        for name, call in _calls(whole, own, other).items():
            seconds = _slowest(_seconds(call, device, amounts.repeats))
            found.append(
                CollectiveRecord(
                    name=name,
                    size_bytes=whole.nbytes,
                    seconds=seconds,
                    bus_gb_per_s=wire_bytes(name, whole.nbytes, ranks) / seconds / 1e9,
                )
            )
        del whole, own, other
    return tuple(found)


def _calls(whole: Tensor, own: Tensor, other: Tensor) -> Mapping[str, Callable[[], object]]:
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: _all_gather(whole, own),
        "reduce_scatter": lambda: _reduce_scatter(own, whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
    }
    if dist.get_world_size() % 2 == 0:
        calls["send"] = lambda: _exchange(other, whole)
    return calls


def _exchange(receive: Tensor, send: Tensor) -> None:
    """Every even rank sends to the next odd one."""
    rank = dist.get_rank()
    peer = rank + 1 if rank % 2 == 0 else rank - 1
    operation = dist.P2POp(dist.isend, send, peer) if rank % 2 == 0 else dist.P2POp(dist.irecv, receive, peer)
    for work in dist.batch_isend_irecv([operation]):
        work.wait()


def pair_rates(device: torch.device, amounts: Amounts, nodes: Sequence[int]) -> dict[tuple[int, int], float]:
    """GB/s from each rank to each other of its node, one pair at a time on each node. Collective.

    Args:
        nodes: the node of each rank.
    """
    members = {node: [rank for rank, lies in enumerate(nodes) if lies == node] for node in dict.fromkeys(nodes)}
    rounds = max(len(ranks) for ranks in members.values())
    buffer = torch.zeros(amounts.pair_bytes, dtype=torch.uint8, device=device)
    own: dict[tuple[int, int], float] = {}
    mine = members[nodes[dist.get_rank()]]
    for source in range(rounds):
        for target in range(rounds):
            # every rank is here equally often, also where its node has no such pair: they agree on repetitions
            taken = source != target and max(source, target) < len(mine)
            call = _send(buffer, mine[source], mine[target]) if taken else None
            seconds = _seconds(call, device, amounts.repeats)
            if taken and dist.get_rank() == mine[target]:
                own[mine[source], mine[target]] = buffer.nbytes / seconds / 1e9
    return _together(own)


def node_rates(device: torch.device, amounts: Amounts, nodes: Sequence[int]) -> dict[tuple[int, int], float]:
    """GB/s from each node to a few others, all of its ranks sending at once. Collective.

    A rank sends to the rank of the same number on its node; nodes of other sizes leave the rest out.
    """
    order = list(dict.fromkeys(nodes))
    if len(order) < 2:
        return {}
    members = {node: [rank for rank, lies in enumerate(nodes) if lies == node] for node in order}
    width = min(len(ranks) for ranks in members.values())
    rank = dist.get_rank()
    place, local = order.index(nodes[rank]), members[nodes[rank]].index(rank)
    buffer = torch.zeros(amounts.pair_bytes, dtype=torch.uint8, device=device)
    incoming = torch.zeros_like(buffer)
    own: dict[tuple[int, int], list[float]] = {}
    for shift in range(1, min(len(order) - 1, _MOST_SHIFTS) + 1):
        target, source = order[(place + shift) % len(order)], order[(place - shift) % len(order)]
        call = None
        if local < width:
            to, come = members[target][local], members[source][local]
            call = _batch(dist.P2POp(dist.isend, buffer, to), dist.P2POp(dist.irecv, incoming, come))
        seconds = _seconds(call, device, amounts.repeats)
        if call is not None:
            own.setdefault((nodes[rank], target), []).append(buffer.nbytes / seconds / 1e9)
    gathered: list[dict[tuple[int, int], list[float]] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    summed: dict[tuple[int, int], float] = {}
    for each in gathered:
        for pair, rates in (each or {}).items():
            summed[pair] = summed.get(pair, 0.0) + median(rates)
    return summed


def _send(buffer: Tensor, source: int, target: int) -> Callable[[], None] | None:
    """What this rank does when one sends to another: None where it is neither."""
    rank = dist.get_rank()
    if rank == source:
        return _batch(dist.P2POp(dist.isend, buffer, target))
    return _batch(dist.P2POp(dist.irecv, buffer, source)) if rank == target else None


def _batch(*operations: dist.P2POp) -> Callable[[], None]:
    def call() -> None:
        for work in dist.batch_isend_irecv(list(operations)):
            work.wait()

    return call


def _seconds(call: Callable[[], object] | None, device: torch.device, repeats: int) -> float:
    """Median time of a call. Collective: ranks without one take part in agreeing on how often it is made.

    On a GPU several are queued before the clock is read. The first call sets connections up, the second tells how long
    one takes.
    """
    if call is not None:
        call()
    first = _slowest(_timed(call, device, 1))
    queued = 5 if device.type == "cuda" and first < _SHORT else 1
    count = max(1, min(repeats, int(_SPENT / max(first * queued, 1e-9))))
    return median(_timed(call, device, queued) / queued for _ in range(count))


def _timed(call: Callable[[], object] | None, device: torch.device, number: int) -> float:
    if call is None:
        return 0.0
    synchronize(device)
    began = time.perf_counter()
    for _ in range(number):
        call()
    synchronize(device)
    return time.perf_counter() - began


def _slowest(seconds: float) -> float:
    """Of all ranks, over gloo: the GPUs' links stay free."""
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value.item())


def _together(own: dict[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    gathered: list[dict[tuple[int, int], float] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return {pair: rate for each in gathered for pair, rate in (each or {}).items()}
