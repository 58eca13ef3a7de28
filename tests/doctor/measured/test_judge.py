"""Verdicts on measurements: what a healthy machine gives is accepted, what is slow is named."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from paceline.costs.profiles import PACELINE
from paceline.doctor.measured.calibration import calibration, calibration_text
from paceline.doctor.measured.expected import expected_bus, expected_pair, expected_rate
from paceline.doctor.measured.judge import judge
from paceline.doctor.measured.outliers import slow_ends, slow_ones
from paceline.doctor.measured.record import TITLES, UNITS, Measured
from paceline.doctor.measured.tables import collective_table, pair_table, rate_table, share_bars
from paceline.planner.calibration import read_calibration
from paceline.planner.machines import find_gpu, make_cluster
from paceline.report.finding import Finding
from tests.doctor.measured.machines import BUS, H200, healthy, slowed

CARD = find_gpu("H200")
TWO = make_cluster(CARD, 2)[0]


def found(measured: Measured, cluster: object = TWO, **more: float) -> dict[str, Finding]:
    return {one.id: one for one in judge(measured, cluster, **more)}  # type: ignore[arg-type]


# ---- what should be


def test_expectations_are_what_two_h200s_gave() -> None:
    for name, rate in H200.items():
        expected = expected_rate(name, CARD)
        assert expected is not None and rate / expected == pytest.approx(1.0, abs=0.04), name
    for (name, size), bus in BUS.items():
        expected = expected_bus(name, size, TWO)
        assert expected is not None and bus / expected == pytest.approx(1.0, abs=0.13), (name, size)
    pair = expected_pair(CARD)
    assert pair is not None and 349 / pair == pytest.approx(1.0, abs=0.05)


def test_nothing_is_expected_of_what_is_not_known() -> None:
    v100, pcie = find_gpu("V100"), find_gpu("H100 PCIe")
    assert expected_rate("gemm_fp8", v100) is None and expected_rate("loader", v100) is None
    assert expected_pair(pcie) is None and expected_bus("all_reduce", 2**30, make_cluster(pcie, 2)[0]) is None
    assert TITLES.keys() == UNITS.keys()


# ---- healthy machines


@pytest.mark.parametrize("seed", range(20))
def test_healthy_machines_have_no_finding(seed: int) -> None:
    assert judge(healthy(1, 2, seed=seed), TWO) == []
    assert judge(healthy(4, 8, seed=seed), None) == []


def test_healthy_machines_of_many_sizes() -> None:
    complaints = [
        one
        for seed in range(30)
        for size in ((1, 8), (2, 4), (16, 8))
        for one in judge(healthy(*size, seed=seed), None)
    ]
    assert complaints == []


# ---- one thing wrong


@pytest.mark.parametrize("name", sorted(H200))
def test_a_rate_that_is_low_everywhere(name: str) -> None:
    low = slowed(healthy(1, 2), name, 0.7, lambda one: True)
    finding = found(low)["measured.low-rate"]
    assert finding.severity == "warning" and TITLES[name] in finding.subject
    assert found(slowed(healthy(1, 2), name, 0.4, lambda one: True))["measured.low-rate"].severity == "error"


@pytest.mark.parametrize("seed", range(10))
def test_one_slow_gpu_among_many(seed: int) -> None:
    finding = found(slowed(healthy(4, 8, seed=seed), "gemm_bf16", 0.9, lambda one: one.rank == 13), None)[
        "measured.slow-rank"
    ]
    assert "rank 13 is slow in: bf16 matrix product, sustained" in finding.subject
    assert "GPU 5 of node1" in finding.evidence


def test_one_slow_node_among_many() -> None:
    finding = found(slowed(healthy(8, 8), "memory_copy", 0.8, lambda one: one.node == 5), None)["measured.slow-node"]
    assert finding.subject.startswith("node node5 is slow in")


def test_storage_is_compared_between_nodes_alone() -> None:
    measured = healthy(5, 4)

    def reading(slow: int) -> Measured:
        ranks = tuple(
            replace(one, rates={**one.rates, "storage_read": (0.2 if one.node == slow else 2.0) * (1 + one.gpu)})
            for one in measured.ranks
        )
        return replace(measured, ranks=ranks)

    assert judge(reading(slow=9), None) == []  # ranks of a node differ, nodes do not
    assert "node node3 is slow in: storage" in found(reading(slow=3), None)["measured.slow-node"].subject


def test_two_ranks_blame_nobody_by_a_median() -> None:
    uneven = slowed(healthy(1, 2), "gemm_bf16", 0.9, lambda one: one.rank == 1)
    assert "measured.slow-rank" not in found(uneven)


def test_a_gpu_with_slow_links() -> None:
    measured = healthy(1, 8)
    pairs = {pair: rate * (0.5 if 3 in pair else 1.0) for pair, rate in measured.pairs.items()}
    findings = found(replace(measured, pairs=pairs), None)
    assert "rank 3 (GPU 3 of node0)" in findings["measured.slow-gpu-links"].subject
    assert "measured.slow-link" not in findings


def test_one_slow_link() -> None:
    measured = healthy(1, 8)
    pairs = {pair: rate * (0.3 if set(pair) == {2, 6} else 1.0) for pair, rate in measured.pairs.items()}
    findings = found(replace(measured, pairs=pairs), None)
    assert "2 to 6" in findings["measured.slow-link"].subject and "6 to 2" in findings["measured.slow-link"].subject
    assert "measured.slow-gpu-links" not in findings


def test_links_that_are_all_slow() -> None:
    measured = healthy(1, 2)
    pairs = dict.fromkeys(measured.pairs, 25.0)
    assert found(replace(measured, pairs=pairs))["measured.low-links"].severity == "error"


def test_a_node_that_is_slow_on_the_network_and_a_slow_way() -> None:
    measured = healthy(8, 2)
    nodes = {pair: rate * (0.4 if 4 in pair else 1.0) for pair, rate in measured.nodes.items()}
    assert "node4 is slow on the network" in found(replace(measured, nodes=nodes), None)["measured.slow-node"].subject
    nodes = {pair: rate * (0.4 if pair == (1, 2) else 1.0) for pair, rate in measured.nodes.items()}
    assert "node1 to node2" in found(replace(measured, nodes=nodes), None)["measured.slow-node-link"].subject


def test_slow_collectives() -> None:
    measured = healthy(1, 2)
    slow = tuple(replace(one, bus_gb_per_s=one.bus_gb_per_s * 0.3) for one in measured.collectives)
    finding = found(replace(measured, collectives=slow))["measured.low-collectives"]
    assert (finding.severity == "error" and "all_reduce" in finding.subject) or "GB/s" in finding.subject
    # on a CPU nothing is expected of gloo
    assert "measured.low-collectives" not in found(replace(measured, collectives=slow, backend="gloo"))


def test_a_loader_that_is_too_slow() -> None:
    ranks = tuple(replace(one, rates={**one.rates, "loader": 8_000.0}) for one in healthy(1, 2).ranks)
    measured = replace(healthy(1, 2), ranks=ranks)
    assert found(measured, needed_tokens=10_000)["measured.loader"].severity == "error"
    assert found(measured, needed_tokens=6_000)["measured.loader"].severity == "warning"
    assert "measured.loader" not in found(measured, needed_tokens=1_000)
    assert "measured.loader" not in found(measured)


def test_nodes_with_other_versions_and_cards() -> None:
    measured = healthy(4, 2)
    ranks = tuple(
        replace(one, versions={"torch": "2.11.0", "nccl": "2.21.5"}, device="NVIDIA H100 80GB HBM3")
        if one.node == 2
        else one
        for one in measured.ranks
    )
    findings = found(replace(measured, ranks=ranks), None)
    assert findings["measured.versions-differ"].severity == "error"
    assert "2.21.5 on node2" in findings["measured.versions-differ"].evidence
    assert "measured.devices-differ" in findings


def test_what_was_not_measured_is_said_once() -> None:
    ranks = tuple(replace(one, skipped={"gemm_fp8": "no fp8"}) for one in healthy(1, 2).ranks)
    notes = [one for one in judge(replace(healthy(1, 2), ranks=ranks), TWO) if one.id == "measured.not-measured"]
    assert len(notes) == 1 and "on 2 ranks" in notes[0].subject


def test_an_unknown_card() -> None:
    assert list(found(healthy(1, 2, device="NVIDIA Foo"), None)) == ["measured.unknown-card"]


# ---- outliers


def test_medians_stand_fast_against_many_slow_ones() -> None:
    rates = {rank: 100.0 + rank % 3 for rank in range(20)} | dict.fromkeys(range(8), 60.0)
    assert set(slow_ones(rates)) == set(range(8))
    assert slow_ones({0: 1.0, 1: 100.0}) == {} and slow_ones({}) == {}
    assert slow_ones(dict.fromkeys(range(5), 0.0)) == {}


def test_two_kinds_of_links_blame_no_end() -> None:
    # NVLink pairs among PCIe: every GPU has slow and fast links
    pairs = {(a, b): 200.0 if a // 2 == b // 2 else 20.0 for a in range(8) for b in range(8) if a != b}
    assert slow_ends(pairs)[0] == {}


# ---- what is written and shown


def test_calibration_is_what_plan_reads(tmp_path: object) -> None:
    from pathlib import Path

    assert isinstance(tmp_path, Path)
    measured = slowed(healthy(1, 2, spread=0.0), "gemm_bf16", 0.9, lambda one: True)
    numbers = calibration(measured, TWO)
    assert numbers["gemm_efficiency"] == pytest.approx(0.9 * PACELINE.gemm_efficiency, rel=0.02)
    assert numbers["nvlink_efficiency"] == pytest.approx(PACELINE.nvlink_efficiency, rel=0.05)
    file = tmp_path / "c.toml"
    file.write_text(calibration_text(numbers, measured))
    assert read_calibration(file)["paceline"].gemm_efficiency == numbers["gemm_efficiency"]
    assert calibration(healthy(1, 2, device="cpu"), None) == {}


def test_json_both_ways() -> None:
    measured = healthy(2, 2)
    assert Measured.of(json.loads(json.dumps(measured.as_dict()))) == measured


def test_tables_and_picture() -> None:
    measured = healthy(1, 2)
    rows = {row[0]: row for row in rate_table(measured).rows}
    assert rows["bf16 matrix product, sustained"][-1] == "as it should be" and len(rows) == len(H200)
    shown = collective_table(measured, TWO)
    assert shown is not None and len(shown.rows) == len(BUS)
    assert collective_table(healthy(1, 1), None) is None and pair_table(healthy(1, 1)) is None
    between = pair_table(healthy(2, 4))
    assert between is not None and len(between.rows) == 4 and between.rows[1][2] == ""
    assert "Percent of what is expected" in (share_bars(measured) or "")
    assert share_bars(healthy(1, 2, device="cpu")) is None
