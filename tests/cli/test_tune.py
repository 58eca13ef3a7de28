"""`paceline tune` as a user gives it, with trials of real training on this CPU. No time is asserted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.cli import main as command_line
from paceline.config.load import load_recipe
from tests.cli.commands import LAUNCHER, paceline

TINY = (
    "cluster.device=cpu", "model.num_layers=1", "model.hidden_size=16", "model.num_heads=2", "model.num_kv_heads=1",
    "model.ffn_size=32", "model.vocab_size=64", "train.seq_len=16", "train.global_batch_size=4", "data.num_workers=0",
    "train.gc_interval=0",
)  # fmt: skip
SETS = tuple(f"--set={each}" for each in TINY)
RECIPE = str(Path(__file__).parents[2] / "recipes" / "tiny.toml")

CRASHES = '''
"""Fails in trials whose recipe has a micro-batch of 2, as a machine might."""
import os, sys, tomllib

if "bench" in sys.argv:
    path = next(word for word in sys.argv if word.endswith("recipe.toml"))
    if tomllib.load(open(path, "rb"))["train"]["micro_batch_size"] == 2:
        print("RuntimeError: made to fail", file=sys.stderr, flush=True)
        os._exit(7)


def register(registry):
    pass
'''


def in_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["paceline", "tune", RECIPE, *SETS, *arguments])
    with pytest.raises(SystemExit) as end:
        command_line.main()
    captured = capsys.readouterr()
    return int(end.value.code or 0), captured.out, captured.err


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_real_trials_a_failing_one_among_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plugin, out, page = tmp_path / "crashes.py", tmp_path / "out", tmp_path / "page.html"
    plugin.write_text(CRASHES)
    arguments = [
        f"--set=run.plugins=['{plugin}']", "--vary", "train.micro_batch_size=1,2", "--steps=2", f"--out={out}",
        "--budget=30m", "--json", f"--html={page}",
    ]  # fmt: skip
    code, stdout, stderr = in_process(monkeypatch, capsys, *arguments)
    data = json.loads(stdout)
    assert code == 0 and "trial 1: train.micro_batch_size=2; expected" in stderr
    outcomes = [trial["outcome"] for trial in data["trials"]]
    assert outcomes[:2] == ["measured", "crash"] and "RuntimeError: made to fail" in data["trials"][1]["reason"]
    assert data["stopped"] == "done" and data["gain"] is None, "what failed is no gain"
    assert {"tune.no-gain", "tune.fails-here"} <= {found["id"] for found in data["findings"]}
    assert "made to fail" in (out / "trials" / "001" / "log").read_text()
    assert "does not work here" in page.read_text()
    best = load_recipe(out / "best.toml").config
    assert best.train.micro_batch_size == 1 and best.data.num_workers == 0
    first = lines(out)[0]
    assert [line["step"] for line in first["ended"]["measured"]["logged"]] == [1, 5]
    assert first["ended"]["measured"]["peak_bytes"] > 0 and len(first["ended"]["measured"]["seconds_by_step"]) == 2
    # the same command again has nothing to do
    code, stdout, stderr = in_process(monkeypatch, capsys, *arguments)
    assert code == 0 and json.loads(stdout)["trials"] == data["trials"] and "2 trials of" in stderr


@pytest.mark.slow
def test_a_gain_on_two_ranks_is_told_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One micro-batch a step in place of 32: what Python takes for each is saved."""
    code, stdout, _ = in_process(
        monkeypatch, capsys, "--nproc=2", "--set=train.global_batch_size=64", "--vary=train.micro_batch_size=32",
        "--steps=4", f"--out={tmp_path}", "--trials=2", "--budget=30m",
    )  # fmt: skip
    assert code == 0
    for text in ("Result", "Ladder", "train.micro_batch_size = 32 (was 1)", "rounding only", "of single trials"):
        assert text in stdout, text
    data = json.loads((tmp_path / "result.json").read_text())
    assert [trial["changes"] for trial in data["trials"]] == [{}, {"train.micro_batch_size": 32}]
    assert data["gain"] > 2 and not data["repeated"] and data["neutrality"] == "rounding"
    assert data["best"]["tokens_per_second_per_gpu"] == pytest.approx(64 * 16 / data["best"]["step_seconds"] / 2)
    assert load_recipe(tmp_path / "best.toml").config.train.micro_batch_size == 32


@pytest.mark.slow
def test_a_call_that_is_ended_leaves_nothing_and_goes_on(tmp_path: Path) -> None:
    """SIGTERM in the second trial: no process stays, the first one is kept, the next call begins with the second."""
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    command = [
        sys.executable, "-m", "paceline", "tune", RECIPE, *SETS, "--vary=train.micro_batch_size=2", "--steps=2",
        f"--out={tmp_path}",
    ]  # fmt: skip
    call = subprocess.Popen(
        command, env={**environment, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "trials" / "001" / "log").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    children = psutil.Process(call.pid).children(recursive=True)
    call.send_signal(signal.SIGTERM)
    _, stderr = call.communicate(timeout=30)
    assert call.returncode == 128 + signal.SIGTERM and "the same command goes on" in stderr
    assert children and not psutil.wait_procs(children, timeout=5)[1]
    assert [line["number"] for line in lines(tmp_path)] == [0]
    done = paceline("tune", RECIPE, *SETS, "--vary=train.micro_batch_size=2", "--steps=2", f"--out={tmp_path}",
                    "--trials=2")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "1 trials of" in done.stderr and [line["number"] for line in lines(tmp_path)] == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--set=parallel.tp=3", "--nproc=2"], 2, "tp"),
        (["--budget=1"], 2, "--budget 1 is no time"),
        (["--allow=everything"], 2, "--allow everything is not known"),
        (["--vary=model.num_layers=1,2"], 2, "trials do not change that setting"),
        (["--set=cluster.device=cuda"], 1, "no GPU is found here"),
        (["--budget=2s"], 1, "no trial was started"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_starts(
    arguments: list[str],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ended, _, stderr = in_process(monkeypatch, capsys, f"--out={tmp_path / 'out'}", *arguments)
    assert ended == code and said in stderr and "→" in stderr
    assert not (tmp_path / "out" / "trials" / "000").exists()


def test_under_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
                        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["paceline", "tune", RECIPE, f"--out={tmp_path}"])
    with pytest.raises(SystemExit) as end:
        command_line.main()
    assert end.value.code == 2 and "under torchrun" in capsys.readouterr().err
