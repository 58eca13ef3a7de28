"""`paceline explain` on the command line: exit codes, JSON, the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.commands import paceline
from tests.explain.test_logs import MEGATRON, watchdog
from tests.explain.traces import fsdp_layers, write


def test_a_trace_as_text_json_and_page(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json.gz", fsdp_layers(35.0))
    shown = paceline("explain", str(path), "--html", str(tmp_path / "t.html"))
    assert shown.returncode == 0 and "nothing hides" in shown.stdout and "Largest kernels" in shown.stdout
    assert "explain.exposed-communication" in (tmp_path / "t.html").read_text()
    data = json.loads(paceline("explain", str(path), "--json").stdout)
    assert data["findings"][0]["id"] == "explain.exposed-communication" and data["ranks"][0]["overlap"] < 0.2


def test_an_error_among_the_findings_is_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "t.log").write_text("\n".join([MEGATRON, *watchdog(0, 5)]))
    assert paceline("explain", str(tmp_path / "t.log")).returncode == 1


@pytest.mark.parametrize(
    "arguments", [["missing"], ["."], ["--html", "/nowhere/p.html", "t.log"], ["t.log", "--gpu", "H9"]]
)
def test_bad_use_is_exit_code_2(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "t.log").write_text(MEGATRON)
    answer = paceline("explain", *arguments, cwd=tmp_path)
    assert answer.returncode == 2 and "Error" in answer.stderr
