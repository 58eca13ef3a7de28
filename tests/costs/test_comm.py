"""Where groups lie, and how long their messages take."""

from __future__ import annotations

import pytest

from paceline.costs.comm import Group, ramped
from paceline.costs.hardware import find_hardware
from paceline.costs.workload import Cluster


def cluster(gpus: int, **fields: float) -> Cluster:
    gpu = find_hardware("H200 SXM")
    assert gpu is not None
    return Cluster(gpu=gpu, gpus=gpus, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(("megabytes", "measured"), [(16, 178), (64, 239), (256, 290), (1024, 325)])
def test_bandwidth_grows_with_the_message_as_measured(megabytes: int, measured: float) -> None:
    """All-reduce between two H200s, NCCL 2.28.9; its large messages at 345 GB/s."""
    wire = megabytes * 1e6
    assert 345 * wire / ramped(wire) == pytest.approx(measured, rel=0.1)


def test_a_group_within_a_node_never_meets_the_network() -> None:
    group = Group.of(cluster(64), size=8, stride=1)
    assert group.inside == 8 and not group.crosses
    assert group.fast_wire == pytest.approx(1e-9 / 450) and group.node_wire == 0


def test_all_cards_of_a_group_carry_its_traffic() -> None:
    whole = Group.of(cluster(64), size=64, stride=1)
    one_of_each = Group.of(cluster(64), size=8, stride=8)
    assert whole.inside == 8 and one_of_each.inside == 1
    assert whole.node_wire == pytest.approx(one_of_each.node_wire / 8)


def test_a_rack_of_fast_links_is_one_domain() -> None:
    assert not Group.of(cluster(64, gpus_per_node=4, fast_domain=72), size=64, stride=1).crosses


def test_an_oversubscribed_core_is_slower() -> None:
    plain = Group.of(cluster(64), size=8, stride=8)
    assert Group.of(cluster(64, oversubscription=2.0), size=8, stride=8).node_wire == pytest.approx(2 * plain.node_wire)
