"""What the links mean: groups, recipes that cross slow links, broken links, what is not determined."""

from __future__ import annotations

from collections.abc import Iterable
from xml.dom.minidom import parseString

import pytest

from paceline.config.load import resolve
from paceline.config.run import RunConfig
from paceline.costs.hardware import find_hardware
from paceline.doctor.topology.acs import judge_acs, parse_lspci
from paceline.doctor.topology.groups import axis_groups, best_grouping, domains
from paceline.doctor.topology.judge import alike, judge, link_table, topology_table
from paceline.doctor.topology.matrix import LinkMatrix, parse_matrices
from paceline.doctor.topology.picture import matrix_picture
from paceline.doctor.topology.wiring import binding
from paceline.errors import ConfigError
from paceline.report.finding import Finding
from tests.doctor.topology import nodes


def matrix_of(text: str) -> LinkMatrix:
    return parse_matrices(text, "t")[0]


def recipe(**parallel: object) -> RunConfig:
    return resolve({"model": {"preset": "llama3_8b"}, "train": {"seq_len": 4096}, "parallel": parallel}).config


def found(text: str, **about: object) -> dict[str, Finding]:
    return {finding.id: finding for finding in judge(matrix_of(text), **about)}  # type: ignore[arg-type]


# ---- groups


def test_groups_of_every_kind_of_node() -> None:
    def groups(text: str) -> tuple[int, int]:
        found = best_grouping(matrix_of(text))
        assert found is not None
        return found.level, found.size

    assert groups(nodes.nvswitch()) == (0, 8)
    assert groups(nodes.CUBE_MESH) == (0, 4)
    assert groups(nodes.pairs()) == (0, 2)
    assert groups(nodes.NCCL_667) == (2, 2)  # PXB: both pairs
    assert groups(nodes.NCCL_1130) == (4, 4)  # NODE
    assert domains(matrix_of(nodes.CUBE_MESH), 0) == [list(range(8))]


def test_nvswitch_may_be_grouped_anyhow() -> None:
    findings = found(nodes.nvswitch(), card=find_hardware("H200 SXM"), config=recipe(tp=8), nodes=2)
    assert {one.id for one in findings.values()} == {"topology.groups"}
    assert "450 GB/s" in findings["topology.groups"].evidence


def test_nvlink_pairs() -> None:
    finding = found(nodes.pairs())["topology.groups"]
    assert "{0,1}, {2,3}" in finding.subject and "at 2 or below" in finding.next_step


def test_pcie_node_names_bandwidth_as_first_suspect() -> None:  # case 6
    finding = found(nodes.NCCL_1130)["topology.no-nvlink"]
    assert finding.severity == "warning" and "first suspect" in finding.evidence
    assert "30 % MFU" in finding.evidence and "60 %" in finding.evidence


def test_one_numa_node_is_not_called_better_without_measuring() -> None:  # case 36
    step = found(nodes.NCCL_1130)["topology.no-nvlink"].next_step
    assert "not determined" in step and "--measure" in step


def test_peer_pairs_are_the_candidates_of_a_hang() -> None:  # case 32
    finding = found(nodes.NCCL_667)["topology.peer-pairs"]
    assert "(0,1), (2,3)" in finding.subject and "ACS" in finding.evidence
    assert "workaround" in finding.next_step
    assert "topology.peer-pairs" in found(nodes.TWO_PHB)  # case 33
    assert "topology.peer-pairs" not in found(nodes.nvswitch())


def test_one_gpu_and_no_links() -> None:
    one = "\tGPU0\tCPU Affinity\nGPU0\t X \t0-15\n"
    assert found(one)["topology.groups"].subject.startswith("one GPU")
    unknown = "\tGPU0\tGPU1\nGPU0\t X \tN/A\nGPU1\tN/A\t X \n"
    assert "not determined" in found(unknown)["topology.groups"].subject


def test_mig_slices() -> None:
    text = "\tMIG0\tMIG1\nMIG0\t X \tN/A\nMIG1\tN/A\t X \n"
    assert found(text)["topology.mig"].severity == "error"


# ---- recipes


@pytest.mark.parametrize(
    ("text", "parallel", "crosses"),
    [
        (nodes.nvswitch(), {"tp": 8}, False),
        (nodes.pairs(), {"tp": 2}, False),
        (nodes.pairs(), {"tp": 4}, True),
        (nodes.pairs((0, 2, 1, 3)), {"tp": 2}, True),
        (nodes.CUBE_MESH, {"tp": 4}, False),
        (nodes.CUBE_MESH, {"tp": 8}, True),
        (nodes.NCCL_667, {"tp": 2}, True),
        (nodes.NCCL_667, {}, False),
    ],
)
def test_tensor_groups_over_slow_links(text: str, parallel: dict[str, int], crosses: bool) -> None:
    assert ("topology.tp-crosses" in found(text, config=recipe(**parallel))) == crosses


def test_the_way_out_is_named() -> None:
    crossing = found(nodes.pairs((0, 2, 1, 3)), config=recipe(tp=2))["topology.tp-crosses"]
    assert "CUDA_VISIBLE_DEVICES=0,2,1,3" in crossing.next_step and "GPU 0 and GPU 1" in crossing.subject
    assert "--set parallel.tp=2" in found(nodes.pairs(), config=recipe(tp=4))["topology.tp-crosses"].next_step
    assert "--set parallel.tp=1" in found(nodes.NCCL_667, config=recipe(tp=4))["topology.tp-crosses"].next_step
    assert "topology.cp-crosses" in found(nodes.pairs(), config=recipe(cp=4))


def test_groups_of_an_axis_lie_where_the_mesh_puts_them() -> None:
    assert axis_groups(recipe(tp=2), "tp", 4) == [(0, 1), (2, 3)]
    assert axis_groups(recipe(tp=2, cp=2), "cp", 8) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    outer = recipe(tp=2, dp_shard=2, order=("pp", "dp_replicate", "tp", "cp", "dp_shard"))
    assert axis_groups(outer, "tp", 4) == [(0, 2), (1, 3)]
    assert axis_groups(recipe(tp=8), "tp", 4) == []  # leaves the node: config.locality speaks of it


def test_gpus_in_another_order_keep_their_numbers() -> None:
    # of pairs {0,1} and {2,3} the run sees 3, 1, 2, 0
    seen = matrix_of(nodes.pairs()).seen([3, 1, 2, 0])
    crossing = {one.id: one for one in judge(seen, config=recipe(tp=2))}["topology.tp-crosses"]
    assert "GPU 3 and GPU 1 are joined by SYS" in crossing.subject
    assert "CUDA_VISIBLE_DEVICES=3,2,1,0" in crossing.next_step
    assert "topology.tp-crosses" not in {one.id for one in judge(seen.seen([0, 2, 1, 3]), config=recipe(tp=2))}


# ---- what looks broken


def test_a_gpu_with_fewer_links() -> None:
    eight = nodes.nvswitch(8, 12, 0).splitlines()
    for row in range(1, 9):
        cells = eight[row].split("\t")
        eight[row] = "\t".join(
            cell.replace("NV12", "NV11") if (row == 3) != (column == 3) else cell for column, cell in enumerate(cells)
        )
    finding = found("\n".join(eight))["topology.fewer-links"]
    assert finding.severity == "error" and finding.subject.startswith("GPU2: fewer NVLinks")
    assert "topology.fewer-links" not in found(nodes.nvswitch())


def test_fewer_links_than_the_card_has() -> None:
    h200 = find_hardware("H200 SXM")
    assert "has 18 NVLinks" in found(nodes.nvswitch(8, 16, 8), card=h200)["topology.fewer-links"].subject
    # four A100 on a board without NVSwitch: 12 links divided among three peers
    board = nodes.nvswitch(4, 4, 0)
    assert "topology.fewer-links" not in found(board, card=find_hardware("A100 SXM 80"))


def test_directions_that_differ() -> None:
    text = nodes.NCCL_667.replace("GPU1\tPXB", "GPU1\tPIX")
    assert "GPU0 to GPU1 is PXB, and back it is PIX" in found(text)["topology.asymmetric"].subject


def test_network_cards() -> None:
    assert "topology.far-nic" in found(nodes.TWO_H200_IN_COLOUR)
    assert found(nodes.TWO_H200_IN_COLOUR, nodes=1)["topology.far-nic"].severity == "note"
    assert "topology.no-nic" in found(nodes.pairs(), nodes=2)
    assert "topology.no-nic" not in found(nodes.pairs(), nodes=1)
    assert "topology.few-nics" in found(nodes.nvswitch(8, 18, 2), nodes=4)


def test_cores() -> None:
    assert "16 CPUs (0-15) for 8 GPUs: 2 each" in found(nodes.nvswitch(cpus="0-15"))["topology.few-cores"].subject
    assert "topology.few-cores" not in found(nodes.nvswitch(cpus="0-47"), nodes=1)
    assert "topology.few-cores" in found(nodes.nvswitch(cpus="0-47"), nodes=2)


@pytest.mark.parametrize(
    ("allowed", "gpu", "warned"),
    [
        (range(0, 28), 0, False),
        (range(0, 28), 2, True),
        (range(0, 28), None, True),  # it starts processes for GPUs 2 and 3 too
        (range(0, 112), None, False),
        (range(28, 32), 1, True),
        ((), 0, False),
        (range(0, 28), 9, False),
    ],
)
def test_processes_far_from_their_gpu(allowed: Iterable[int], gpu: int | None, warned: bool) -> None:
    found = list(binding(matrix_of(nodes.NCCL_667), frozenset(allowed), gpu))
    assert [one.id for one in found] == (["topology.binding"] if warned else [])


def test_nodes_that_differ() -> None:
    same, other = matrix_of(nodes.pairs()), matrix_of(nodes.NCCL_667)
    assert list(alike([same, same])) == []
    assert [one.id for one in alike([same, same, other])] == ["topology.nodes-differ"]


# ---- ACS


LSPCI = """\
00:01.0 PCI bridge: Intel Corporation Device 352a (rev 04) (prog-if 00 [Normal decode])
	Capabilities: [150 v1] Access Control Services
		ACSCap:	SrcValid+ TransBlk+ ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans+
		ACSCtl:	{flags}
01:00.0 3D controller: NVIDIA Corporation Device 2335
"""


def test_acs_flags() -> None:  # case 33
    on = LSPCI.format(flags="SrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-")
    off = LSPCI.format(flags="SrcValid- TransBlk- ReqRedir- CmpltRedir- UpstreamFwd- EgressCtrl- DirectTrans-")
    (finding,) = judge_acs(parse_lspci(on, "t"))
    assert finding.severity == "error" and "00:01.0" in finding.subject and "setpci -s 00:01.0" in finding.next_step
    assert [one.id for one in judge_acs(parse_lspci(off, "t"))] == ["topology.acs-off"]
    bare = "ACSCtl: SrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+"
    assert [one.id for one in judge_acs(parse_lspci(bare, "t"))] == ["topology.acs"]


@pytest.mark.parametrize(
    ("text", "reason"), [("", "empty"), ("Capabilities: <access denied>", "root"), ("hello", "no output of lspci")]
)
def test_acs_not_determined(text: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_lspci(text, "lspci.txt")
    assert reason in caught.value.evidence and "sudo lspci -vvv" in caught.value.next_step


# ---- what is shown


@pytest.mark.parametrize("text", [nodes.nvswitch(), nodes.CUBE_MESH, nodes.NCCL_1130, nodes.TWO_H200_IN_COLOUR])
def test_the_picture_holds_every_link(text: str) -> None:
    matrix = matrix_of(text)
    picture = matrix_picture(matrix)
    svg = parseString(picture.partition("</div>")[0] + "</div>").getElementsByTagName("svg")[0]
    cells = svg.getElementsByTagName("rect")
    count = len(matrix.gpus)
    assert len(cells) == count * (count - 1 + len(matrix.nics))
    assert svg.getAttribute("role") == "img" and svg.getAttribute("aria-label")
    _, _, width, height = map(float, svg.getAttribute("viewBox").split())
    for cell in cells:
        assert float(cell.getAttribute("x")) + float(cell.getAttribute("width")) <= width
        assert float(cell.getAttribute("y")) + float(cell.getAttribute("height")) <= height


def test_the_table() -> None:
    rows = topology_table(matrix_of(nodes.nvswitch())).rows
    assert rows[0] == ("GPU0", "0", "0-55,112-167", "mlx5_0 (PIX)") and len(rows) == 8
    assert topology_table(matrix_of(nodes.NCCL_1130)).rows[0] == ("GPU0", "0", "?", "none")
    words = link_table(matrix_of(nodes.TWO_H200_IN_COLOUR))
    assert words.rows == (("GPU0", "", "NV18", "SYS"), ("GPU1", "NV18", "", "SYS"))
