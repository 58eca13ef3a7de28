"""Ceilings are measured with 1 to 4 processes over gloo: every part gives numbers, and the same on all ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distributed import run
from paceline.config.load import resolve
from paceline.config.run import RunConfig
from paceline.data.indexed_writer import IndexedWriter
from paceline.doctor.ceilings.amounts import CPU
from paceline.doctor.ceilings.device import device_rates, seconds_of
from paceline.doctor.ceilings.links import collective_rates, node_rates, pair_rates
from paceline.doctor.ceilings.measure import measure
from paceline.doctor.ceilings.storage import storage_rates
from paceline.doctor.measured.judge import judge
from paceline.doctor.measured.record import Measured
from paceline.runtime.launcher import ProcessInfo

DEVICE = torch.device("cpu")
MODEL = {"num_layers": 1, "hidden_size": 64, "num_heads": 4, "ffn_size": 128, "vocab_size": 256, "max_seq_len": 64}


def recipe(folder: Path, **data: Any) -> RunConfig:
    train = {"seq_len": 32, "micro_batch_size": 2, "global_batch_size": 8}
    return resolve({"model": MODEL, "train": train, "data": data, "run": {"dir": str(folder / "run")},
                    "cluster": {"device": "cpu"}}).config  # fmt: skip


def test_a_device_alone() -> None:
    rates, skipped = device_rates(DEVICE, CPU)
    assert rates.keys() == {"gemm_fp32", "attention_forward", "attention", "memory_copy"} and skipped == {}
    assert all(rate > 0 for rate in rates.values())


def test_time_of_a_call_is_its_median() -> None:
    calls: list[int] = []
    assert 0 <= seconds_of(lambda: calls.append(1), DEVICE, repeats=5, warm_up=2) < 1
    assert len(calls) == 7


# ---- several ranks


def _links(rank: int, world_size: int, nodes: list[int]) -> tuple[Any, Any, Any]:
    return (
        pair_rates(DEVICE, CPU, nodes),
        node_rates(DEVICE, CPU, nodes),
        [(one.name, one.size_bytes, one.bus_gb_per_s > 0) for one in collective_rates(DEVICE, CPU)],
    )


@pytest.mark.parametrize(
    ("nodes", "pairs", "between"),
    [
        ([0, 0], {(0, 1), (1, 0)}, set()),
        ([0, 0, 0], {(a, b) for a in range(3) for b in range(3) if a != b}, set()),
        ([0, 0, 1, 1], {(0, 1), (1, 0), (2, 3), (3, 2)}, {(0, 1), (1, 0)}),
        ([0, 0, 1], {(0, 1), (1, 0)}, {(0, 1), (1, 0)}),
    ],
)
def test_links(nodes: list[int], pairs: set[tuple[int, int]], between: set[tuple[int, int]]) -> None:
    results = run(_links, len(nodes), nodes)
    assert all(result == results[0] for result in results), "ranks must agree"
    found_pairs, found_between, collectives = results[0]
    assert set(found_pairs) == pairs and set(found_between) == between
    assert all(rate > 0 for rate in [*found_pairs.values(), *found_between.values()])
    names = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"} | ({"send"} if len(nodes) % 2 == 0 else set())
    assert {name for name, _, _ in collectives} == names and all(positive for _, _, positive in collectives)
    assert len(collectives) == len(names) * len(CPU.collective_bytes)


def _measure(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    info = ProcessInfo(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size)
    return measure(info, DEVICE, recipe(Path(folder))).as_dict()


def test_everything_together(tmp_path: Path) -> None:
    results = [Measured.of(found) for found in run(_measure, 2, str(tmp_path))]
    first = results[0]
    assert [one.ranks for one in results] == [first.ranks] * 2 and first.backend == "gloo"
    assert all(one.rates["loader"] > 0 and one.rates["checkpoint_write"] > 0 for one in first.ranks)
    findings = judge(first, None)
    assert {one.severity for one in findings} <= {"note"}  # on a CPU nothing is expected
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def _one_is_slow(rank: int, world_size: int, folder: str, slow: int) -> list[tuple[str, str]]:
    """Rank `slow` computes at half the rate, and sleeps before it sends or receives."""
    import time

    import torch.distributed as dist

    from paceline.doctor.ceilings import measure as module

    whole, exchange = module.device_rates, dist.batch_isend_irecv

    def halved(device: torch.device, amounts: Any) -> tuple[dict[str, float], dict[str, str]]:
        rates, skipped = whole(device, amounts)
        # the same on all ranks, which share two cores here
        same = dict.fromkeys(rates, 100.0 + rank)
        return {name: rate / 2 for name, rate in same.items()} if rank == slow else same, skipped

    def late(operations: Any) -> Any:
        time.sleep(0.2)
        return exchange(operations)

    module.device_rates = halved  # type: ignore[assignment]
    if rank == slow:
        dist.batch_isend_irecv = late  # type: ignore[assignment]
    try:
        info = ProcessInfo(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size)
        found = judge(measure(info, DEVICE, None), None)
    finally:
        module.device_rates, dist.batch_isend_irecv = whole, exchange  # type: ignore[assignment]
    return [(one.id, one.subject) for one in found]


@pytest.mark.slow
def test_a_slow_rank_among_processes_is_named() -> None:
    (first, *others) = run(_one_is_slow, 4, "", 2)
    assert all(other == first for other in others)
    assert any(id == "measured.slow-rank" and subject.startswith("rank 2 is slow") for id, subject in first), first
    assert any(id == "measured.slow-gpu-links" and "rank 2" in subject for id, subject in first), first


# ---- storage


def dataset(folder: Path) -> str:
    with IndexedWriter(folder / "corpus", vocab_size=256) as writer:
        for start in range(200):
            writer.add_document(np.arange(start, start + 500, dtype=np.int64) % 256)
    return str(folder / "corpus")


def test_a_dataset_on_its_own_path(tmp_path: Path) -> None:
    config = recipe(tmp_path, train=dataset(tmp_path))
    before = sorted(path.name for path in tmp_path.iterdir())
    rates, skipped = storage_rates(config, 1, 2, CPU)
    assert rates.keys() == {"storage_read", "storage_random", "checkpoint_write", "loader"} and skipped == {}
    assert all(rate > 0 for rate in rates.values())
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_what_cannot_be_measured_is_named(tmp_path: Path) -> None:
    _, skipped = storage_rates(recipe(tmp_path, train=str(tmp_path / "missing")), 0, 1, CPU)
    assert "No such file" in skipped["storage_read"] and "loader" in skipped
    _, skipped = storage_rates(recipe(tmp_path), 0, 1, CPU)
    assert "synthetic" in skipped["storage_read"]
    if os.geteuid() != 0:
        tmp_path.chmod(0o500)
        _, skipped = storage_rates(recipe(tmp_path), 0, 1, CPU)
        assert "Permission denied" in skipped["checkpoint_write"]
        tmp_path.chmod(0o700)


@pytest.mark.gpu
def test_a_gpu_alone() -> None:
    from paceline.costs.hardware import find_hardware
    from paceline.doctor.ceilings.amounts import GPU
    from paceline.doctor.measured.expected import expected_rate

    device = torch.device("cuda", 0)
    rates, _ = device_rates(device, GPU)
    card = find_hardware(torch.cuda.get_device_name(device))
    assert {"gemm_bf16", "attention", "memory_copy", "host_to_device", "device_to_host"} <= rates.keys()
    if card is not None:
        for name, rate in rates.items():
            expected = expected_rate(name, card)
            assert expected is None or 0.5 < rate / expected < 1.3, name
