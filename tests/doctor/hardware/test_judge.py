"""What is wrong with a GPU is said with its number; what the driver does not tell stays open."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.doctor.hardware.card import Card, card_table
from paceline.doctor.hardware.judge import judge, no_cards
from paceline.doctor.hardware.nvml import link_matrix_text, read_nvml
from paceline.doctor.hardware.smi import parse_smi
from paceline.doctor.topology.matrix import parse_matrices
from paceline.errors import ConfigError
from paceline.report.finding import Finding
from tests.doctor.hardware.machines import Nvml, smi


def found(*changes: dict[str, Any]) -> dict[str, Finding]:
    cards, _, _ = parse_smi(smi(*changes), "t")
    return {finding.id: finding for finding in judge(cards)}


def test_healthy_gpus() -> None:
    cards, driver, cuda = parse_smi(smi({}, {}), "t")
    assert (driver, cuda, len(cards)) == ("580.82.07", "13.0", 2)
    assert cards[0].memory_bytes == 143771 * 2**20 and cards[0].sm_max_mhz == 1980 and cards[0].is_idle
    assert judge(cards) == []
    assert card_table(cards).rows[0][1:4] == ("NVIDIA H200", "140 GiB", "345 of 1980 MHz")


@pytest.mark.parametrize(
    ("change", "id", "severity", "says"),
    [
        ({"mig": "Enabled"}, "hardware.mig", "error", "GPU 1: MIG is on"),
        ({"limit": "500.00"}, "hardware.power-cap", "warning", "500 W, 700 W is usual"),
        ({"thermal": "Active"}, "hardware.throttled", "error", "hw thermal slowdown"),
        ({"errors": 3}, "hardware.memory-errors", "error", "GPU 1"),
        ({"pending": "Yes"}, "hardware.rows-pending", "warning", "GPU 1"),
        ({"width": 8}, "hardware.pcie-width", "warning", "x8 of x16"),
        ({"gen": 1}, "hardware.pcie-generation", "note", "generation 1 of 5"),
        ({"gen": 3, "power": "600.0"}, "hardware.pcie-generation", "warning", "generation 3 of 5"),
        ({"used": 90000, "processes": "<process_info/>"}, "hardware.busy", "warning", "87.89 GiB of memory, 1 proc"),
        ({"persistence": "Disabled"}, "hardware.persistence", "note", "GPU 1"),
        ({"ecc": "Disabled"}, "hardware.ecc-off", "note", "GPU 1"),
        ({"fabric": "In Progress", "status": "N/A"}, "hardware.fabric", "error", "in progress"),
        ({"fabric": "Completed", "status": "Failure"}, "hardware.fabric", "error", "completed, failure"),
        ({"name": "NVIDIA Foo 1"}, "hardware.unknown-card", "note", "Foo"),
    ],
)
def test_one_gpu_that_is_not_well(change: dict[str, Any], id: str, severity: str, says: str) -> None:
    findings = found({}, change)
    assert findings[id].severity == severity
    assert says in findings[id].subject
    assert id not in found({}, {})


def test_gpus_that_differ() -> None:
    findings = judge(parse_smi(smi({}, {"name": "NVIDIA H100 80GB HBM3", "limit": "650.00"}), "t")[0])
    assert sum(finding.id == "hardware.unlike" for finding in findings) == 2


def test_a_gpu_with_a_low_clock_under_load() -> None:
    busy = {"power": "650.0", "clock": 1700}
    assert (
        "GPU 2: 1100 MHz under load, the others 1700"
        in found(busy, busy, {**busy, "clock": 1100}, busy)["hardware.slow-clock"].subject
    )
    assert "hardware.slow-clock" not in found({}, {}, {"clock": 210})  # idle clocks mean nothing


def test_what_is_not_told_is_not_judged() -> None:
    assert judge([Card(index=0, name="NVIDIA H200")]) == []
    cards, _, _ = parse_smi(smi({"ecc": "N/A", "width": "N/A", "limit": "N/A", "mig": "N/A"}), "t")
    assert (cards[0].ecc, cards[0].pcie_width, cards[0].power_limit_w, cards[0].mig) == (None, None, None, None)
    assert judge(cards) == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "has failed"),
        ("<html></html>", "<html>"),
        ("<nvidia_smi_log><gpu>", "Not XML"),
        ("\x00\x01binary", "Not XML"),
    ],
)
def test_what_is_no_output_of_nvidia_smi(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_smi(text, "smi.xml")
    assert says in caught.value.evidence and "nvidia-smi -q -x" in caught.value.next_step


def test_no_gpu_is_an_error_only_where_one_is_wanted() -> None:
    assert no_cards("no driver", wanted=True).severity == "error"
    assert no_cards("no driver", wanted=False).severity == "note"


# ---- NVML


def test_nvml_tells_the_same() -> None:
    cards, driver, cuda = read_nvml(Nvml())
    assert (driver, cuda) == ("580.82.07", "13.0") and len(cards) == 2
    assert cards[0].name == "NVIDIA H200" and cards[0].power_limit_w == 700 and cards[0].ecc is True
    assert cards[0].slowdowns == ("hw_thermal_slowdown",)


def test_a_container_without_rights_leaves_figures_open() -> None:
    silent = frozenset({"nvmlDeviceGetEccMode", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetComputeRunningProcesses"})
    cards, _, _ = read_nvml(Nvml(silent=silent))
    assert (cards[0].ecc, cards[0].power_w, cards[0].processes) == (None, None, None)
    with pytest.raises(Nvml.NVMLError, match="Driver Not Loaded"):
        read_nvml(Nvml(fails="Driver Not Loaded"))


def test_links_through_nvml_read_as_those_of_nvidia_smi() -> None:
    text = link_matrix_text(Nvml(4))
    assert text is not None
    (matrix,) = parse_matrices(text, "NVML")
    assert matrix.nvlinks("GPU0", "GPU3") == 18
    far = link_matrix_text(Nvml(2, links=0))
    assert far is not None and parse_matrices(far, "NVML")[0].label("GPU0", "GPU1") == "SYS"
    assert link_matrix_text(Nvml(2, links=0, silent=frozenset({"nvmlDeviceGetTopologyCommonAncestor"}))) is None


def test_errors_of_nvlink() -> None:
    few, many = read_nvml(Nvml(2, errors=1))[0], read_nvml(Nvml(2, errors=50))[0]
    assert few[0].nvlink_errors == 2 * 18
    assert {one.id: one.severity for one in judge(few)}["hardware.nvlink-errors"] == "note"
    assert {one.id: one.severity for one in judge(many)}["hardware.nvlink-errors"] == "warning"
    assert "hardware.nvlink-errors" not in {one.id for one in judge(read_nvml(Nvml(2))[0])}
