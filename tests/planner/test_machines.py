"""Machines by any spelling, or described in a file; what is not known names the nearest."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.costs.hardware import hardware_names
from paceline.errors import ConfigError
from paceline.planner.machines import DESCRIPTION, find_gpu, make_cluster


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("H100-80", "H100 SXM"),
        ("h100", "H100 SXM"),
        ("a100 80gb", "A100 SXM 80"),
        ("A100-40", "A100 SXM 40"),
        ("4090", "RTX 4090"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("h100 pcie", "H100 PCIe"),
        ("b200", "B200 SXM"),
        ("gb200", "GB200"),
        ("l40s", "L40S"),
        ("3090", "RTX 3090"),
        ("a10", "A10"),
        ("a10g", "A10G"),
        ("t4", "T4"),
        ("rtx 6000 ada", "RTX 6000 Ada"),
        ("6000 ada", "RTX 6000 Ada"),
        ("l40", "L40"),
        ("Tesla T4", "T4"),
        ("l4", "L4"),
        ("a5000", "RTX A5000"),
        ("mi300x", "MI300X"),
        ("gh200 96", "GH200 96"),
    ],
)
def test_a_gpu_has_many_spellings(text: str, name: str) -> None:
    assert find_gpu(text).name == name


@pytest.mark.parametrize("text", ["H1000", "TPU v5", "", "100"])
def test_an_unknown_gpu_is_told_with_how_to_describe_one(text: str) -> None:
    with pytest.raises(ConfigError, match="table of hardware") as caught:
        find_gpu(text)
    assert "memory_gb" in caught.value.next_step


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("24", "RTX 4090"),
        ("80", "A100 SXM 80 or A100 PCIe 80"),
        ("SXM", "H100 SXM"),
        ("RTX", "RTX 4090 or RTX 5090"),
        ("A100", "A100 SXM 40 or A100 SXM 80 or A100 PCIe 80"),
        ("GH200", "GH200 96 or GH200 141"),
    ],
)
def test_an_ambiguous_gpu_is_refused_with_those_that_may_be_meant(text: str, names: str) -> None:
    with pytest.raises(ConfigError, match="does not say which GPU") as caught:
        find_gpu(text)
    assert names in caught.value.evidence
    assert "my_gpu.toml" in caught.value.next_step


def test_every_gpu_of_the_table_is_found_by_its_own_name() -> None:
    for name in hardware_names():
        assert find_gpu(name).name == find_gpu(name.lower().replace(" ", "-")).name == name


def test_a_gpu_is_described_in_ten_lines(tmp_path: Path) -> None:
    file = tmp_path / "my_gpu.toml"
    file.write_text(DESCRIPTION)
    assert len(DESCRIPTION.splitlines()) <= 10
    found = find_gpu(str(file))
    assert (found.name, found.bf16, found.memory_gb) == ("My GPU", 400, 48)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name = 'x'\nbf16 = 3", "missing: memory_gb, memory_tb_per_s"),
        (DESCRIPTION + "tflops = 3", "unknown: tflops"),
        (DESCRIPTION.replace("bf16 = 400", "bf16 = -1"), "no positive number: bf16"),
        (DESCRIPTION.replace("memory_share = 0.985", "memory_share = 1.5"), "a share above 1: memory_share = 1.5"),
        ("name =", "not valid TOML"),
    ],
)
def test_a_wrong_description_says_what_is_wrong(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "my_gpu.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        find_gpu(str(file))


def test_the_network_is_assumed_aloud() -> None:
    cluster, said = make_cluster(find_gpu("h100"), 64)
    assert (cluster.gpus_per_node, cluster.node_gb_per_s) == (8, 50.0)
    assert "assumed" in said
    cluster, said = make_cluster(find_gpu("h100"), 64, interconnect="25")
    assert cluster.node_gb_per_s == 25.0
    assert "assumed" not in said
    cluster, said = make_cluster(find_gpu("4090"), 4)
    assert cluster.nodes == 1
    assert "PCIe, 31 GB/s" in said and "assumed" in said and "no peer-to-peer" in said
    assert "no peer-to-peer" not in make_cluster(find_gpu("l40s"), 4)[1]
    assert make_cluster(find_gpu("4090"), 1)[1] == "one GPU; nothing is sent"
    assert make_cluster(find_gpu("h100"), 64, interconnect="1.25")[1].endswith("; 1.25 GB/s a GPU: as given")


def test_wrong_networks_and_nodes_are_told() -> None:
    with pytest.raises(ConfigError, match="no interconnect 'ib4000'") as caught:
        make_cluster(find_gpu("h100"), 64, interconnect="ib4000")
    assert "ib400" in caught.value.next_step
    with pytest.raises(ConfigError, match="do not fill nodes of 8"):
        make_cluster(find_gpu("h100"), 12, gpus_per_node=8)
