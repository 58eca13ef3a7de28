"""The arithmetic of the overhead bench, and that it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from record_overhead import summarize

ROOT = Path(__file__).parents[2]


def test_the_ratio_of_medians_lies_in_its_interval() -> None:
    made = summarize({False: [1.0, 1.01, 0.99, 1.0, 5.0], True: [1.02, 1.03, 1.01, 1.02, 1.02]})
    assert made["overhead"] == pytest.approx(0.02)
    assert made["interval_95"][0] <= made["overhead"] <= made["interval_95"][1]


def test_it_runs_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "overhead.json"
    command = [sys.executable, str(ROOT / "bench" / "record_overhead.py"), str(ROOT / "recipes" / "tiny.toml")]
    more = ["--set", "cluster.device=cpu", "--steps", "8", "--block", "2", "--warm-up", "2", "--out", str(out)]
    subprocess.run([*command, *more], check=True, capture_output=True, timeout=150)
    made = json.loads(out.read_text())
    assert len(made["blocks"]["on"]) == len(made["blocks"]["off"]) == 4 and made["bytes_per_step_and_rank"] > 50
