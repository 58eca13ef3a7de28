"""Every form of `nvidia-smi topo -m` is read; what is cut, wrapped or something else is refused with the reason."""

from __future__ import annotations

import pytest

from paceline.doctor.topology.matrix import Affinity, parse_matrices
from paceline.errors import ConfigError
from tests.doctor.topology import nodes


def test_links_and_affinity() -> None:
    (matrix,) = parse_matrices(nodes.NCCL_667, "t")
    assert matrix.gpus == ("GPU0", "GPU1", "GPU2", "GPU3") and matrix.nics == ()
    assert matrix.label("GPU0", "GPU1") == "PXB" and matrix.label("GPU3", "GPU2") == "PIX"
    assert matrix.affinity["GPU2"] == Affinity(cpus="28-55,84-111", numa="1")
    assert matrix.affinity["GPU2"].num_cpus == 56


def test_a_header_with_numa_alone() -> None:  # case 36
    (matrix,) = parse_matrices(nodes.NCCL_1130, "t")
    assert len(matrix.gpus) == 8 and matrix.affinity["GPU7"] == Affinity(cpus=None, numa="1")
    assert matrix.label("GPU0", "GPU3") == "NODE" and matrix.label("GPU0", "GPU4") == "SYS"


def test_colours_cards_and_their_names() -> None:
    (matrix,) = parse_matrices(nodes.TWO_H200_IN_COLOUR, "t")
    assert matrix.nvlinks("GPU0", "GPU1") == 18 and matrix.nics == ("NIC0",)
    assert matrix.nic_names == {"NIC0": "mlx5_0"}
    assert matrix.affinity["GPU1"] == Affinity(cpus="0-31", numa="0")


def test_cards_by_their_own_names_and_old_labels() -> None:
    (matrix,) = parse_matrices(nodes.CUBE_MESH, "t")
    assert matrix.nics == ("mlx5_0", "mlx5_2") and matrix.nearest_nics("GPU6") == ["mlx5_2"]
    assert parse_matrices(nodes.OLD_NAMES, "t")[0].links == matrix.links


def test_cards_without_rows_and_text_around() -> None:
    text = "some banner\n$ nvidia-smi topo -m\n" + nodes.TWO_H200_IN_COLOUR.replace("NIC0\tSYS\tSYS\t X \t\t\t\t\n", "")
    (matrix,) = parse_matrices(text, "t")
    assert matrix.label("NIC0", "GPU1") == "SYS"


def test_spaces_carriage_returns_and_byte_order_mark() -> None:
    text = "\ufeff" + nodes.NCCL_667.expandtabs(8).replace("\n", "\r\n")
    assert parse_matrices(text, "t")[0].links == parse_matrices(nodes.NCCL_667, "t")[0].links


def test_several_nodes_in_one_text() -> None:
    assert len(parse_matrices(nodes.NCCL_667 + "\nnode 2\n" + nodes.TWO_PHB, "t")) == 2


def test_empty_affinity_cells() -> None:
    text = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tNV2\t\t0\nGPU1\tNV2\t X \tN/A\tN/A\n"
    (matrix,) = parse_matrices(text, "t")
    assert matrix.affinity["GPU0"] == Affinity(cpus=None, numa="0")
    assert matrix.affinity["GPU1"] == Affinity(cpus=None, numa=None)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "It is empty"),
        ("   \n\n", "It is empty"),
        ("hello\nworld\n", "begins with a line of device names"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "The driver is missing"),
        ("\tGPU0\tGPU1\nGPU0\t X \n", "cut or wrapped"),
        ("\tGPU0\tGPU1\nGPU0\t X \tNV4\n", "it was cut"),
        ("\tGPU0\tGPU1\nGPU0\t X \tABC\nGPU1\tABC\t X \n", "Links are X"),
        (nodes.NCCL_1130[:300], "cut"),
        ("GPU 0: NVIDIA H200 (UUID: GPU-1)\n", "begins with a line of device names"),
    ],
)
def test_what_is_no_matrix(text: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_matrices(text, "topo.txt")
    assert reason in caught.value.evidence
    assert "topo.txt" in caught.value.subject and "nvidia-smi topo -m" in caught.value.next_step


def test_names_that_only_begin_like_gpus() -> None:
    (matrix,) = parse_matrices("\tGPU0\tGPUx\nGPU0\t X \tPIX\nGPUx\tPIX\t X \n", "t")
    assert matrix.gpus == ("GPU0",) and matrix.nics == ("GPUx",)
