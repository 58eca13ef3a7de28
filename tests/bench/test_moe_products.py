"""The bench of expert layers, with small sizes on a CPU: every row comes, is kept, and is not measured twice."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import moe_products


def test_tiny(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "moe.json"
    arguments = ["--tiny", "--json", str(file), "--only", "qwen3", "switch"]
    moe_products.main([*arguments, "--part", "layers"])
    first = json.loads(file.read_text())["rows"]
    assert len(first) == 1 + 2 * len(moe_products.ROUTINGS) * len(moe_products.WAYS)
    assert not [key for key, row in first.items() if "failed" in row]
    errors = {key: row["error"] for key, row in first.items() if key.startswith("layers/")}
    assert min(errors.values()) == 0.0  # the plain way's own
    assert all(error < (0.25 if "fp8" in key else 1e-2) for key, error in errors.items())
    capsys.readouterr()
    moe_products.main(arguments)
    second = json.loads(file.read_text())["rows"]
    assert first.items() <= second.items() and len(second) > len(first)
    out = capsys.readouterr().out
    assert "kernels/switch/combine, torch: ms" in out and "layers/switch/random/plain: " not in out
    assert "qwen3/random/grouped" in out  # in the table
