"""`paceline explain` on the command line: exit codes, JSON, the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.commands import paceline
from tests.explain.test_logs import MEGATRON, watchdog
from tests.explain.traces import fsdp_layers, write
from tests.report.pages import assert_readable


def test_a_trace_as_text_json_and_page(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json.gz", fsdp_layers(35.0))
    shown = paceline("explain", str(path), "--html", str(tmp_path / "t.html"))
    assert shown.returncode == 0 and "nothing hides" in shown.stdout and "Largest kernels" in shown.stdout
    assert "explain.exposed-communication" in (tmp_path / "t.html").read_text()
    assert_readable((tmp_path / "t.html").read_text())
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


def test_a_card_is_refused_where_it_is_unknown_and_said_to_be_of_no_use_where_it_is(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", fsdp_layers(35.0))
    refused = paceline("explain", str(path), "--gpu", "H100")
    assert refused.returncode == 2 and "H100 SXM" in refused.stderr
    refused = paceline("explain", str(path), "--gpu", "FOO")
    assert refused.returncode == 2 and "B200 SXM" in refused.stderr
    assert "--gpu H100 SXM is not used" in paceline("explain", str(path), "--gpu", "H100 SXM").stdout


def test_what_is_no_source_says_what_to_give_instead(tmp_path: Path) -> None:
    for name in ("mine", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "recipe.toml").write_text("")
    (tmp_path / "r.toml").write_text('[run]\nname = "mine"\n')
    (tmp_path / "new.toml").write_text('[run]\nname = "new"\n')
    lines = ["run folder: runs/mine", "[20:58:55] INFO data ready after 0.0 s", "step 10/60  loss 4.9  grad norm 1.0"]
    (tmp_path / "t.log").write_text("\n".join(lines) + "\n")
    (tmp_path / "bare.log").write_text("step 10/60  loss 4.9123  grad norm 1.000\n")
    wanted = {
        "runs": "paceline explain runs/other",
        ".": "paceline explain runs/mine",
        "r.toml": "paceline explain runs/mine",
        "new.toml": "paceline train new.toml",
        "runs/mine/recipe.toml": "paceline explain runs/mine",
        "t.log": "paceline explain runs/mine",
        "bare.log": "paceline explain runs/NAME",
    }
    for source, answer in wanted.items():
        told = paceline("explain", source, cwd=tmp_path)
        assert told.returncode == 2 and answer in " ".join(told.stderr.split()), (source, told.stderr)
