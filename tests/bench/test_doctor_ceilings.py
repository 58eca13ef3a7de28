"""The comparison of doctor's ceilings with known ones accepts what is known and finds what is not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.doctor.measured.machines import healthy, slowed

ROOT = Path(__file__).parent.parent.parent


def judged(folder: Path, measured: Any, findings: list[Any] | None = None, **more: Any) -> tuple[int, str]:
    document = {"findings": findings or [], "measured": measured.as_dict(), **more}
    file = folder / "doctor.json"
    file.write_text(json.dumps(document))
    done = subprocess.run(
        [sys.executable, "bench/doctor_ceilings.py", "--read", str(file), "--out", str(folder / "out.json")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


TOPOLOGY = {"groups": [[0, 1]]}


def test_known_figures_pass(tmp_path: Path) -> None:
    code, said = judged(tmp_path, healthy(1, 2, spread=0.0), topology=TOPOLOGY)
    assert code == 0 and "wrong" not in said
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["wrong"] == [] and len(written["compared"]) == 17
    assert judged(tmp_path, healthy(1, 1, spread=0.0))[0] == 0


@pytest.mark.parametrize("name", ["gemm_bf16", "host_to_device"])
def test_a_figure_that_is_six_percent_off_fails(tmp_path: Path, name: str) -> None:
    code, said = judged(tmp_path, slowed(healthy(1, 2, spread=0.0), name, 0.94, lambda one: True), topology=TOPOLOGY)
    assert code == 1 and f"wrong: {name}" in said


def test_findings_and_links_are_looked_at(tmp_path: Path) -> None:
    complaint = [{"id": "measured.low-rate", "subject": "slow"}]
    assert judged(tmp_path, healthy(1, 2, spread=0.0), complaint, topology=TOPOLOGY)[0] == 1
    assert judged(tmp_path, healthy(1, 2, spread=0.0), topology={"groups": [[0], [1]]})[0] == 1
    assert judged(tmp_path, healthy(1, 2, spread=0.0))[0] == 1


def test_other_devices_have_nothing_to_compare_with(tmp_path: Path) -> None:
    code, said = judged(tmp_path, healthy(1, 2, device="NVIDIA A100-SXM4-80GB"), topology=TOPOLOGY)
    assert code == 1 and "nothing to compare with" in said
