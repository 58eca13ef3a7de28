"""What the end of a run looks like, in a pipe and on a terminal."""

from __future__ import annotations

import io
import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from paceline.cli import summary as room
from paceline.training.summary import Summary

SUMMARY = Summary(
    run_dir="runs/my demo", steps=10, total_steps=10, stopped_by="", tokens=1000, parameters=2000, loss_first=4.0,
    loss_last=2.0, evaluation={}, tokens_per_second=None, tokens_per_second_per_gpu=None, tflops_per_gpu=None, mfu=None,
    flops_per_token=None, flops_convention="causal", peak_tflops=None, memory_gib=None, skipped_steps=0,
    devices="1 x cpu", samples=(("Once upon", " a time [there] was\na word " + "and another " * 30),),
)  # fmt: skip


def test_plain_in_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    SUMMARY.write(tmp_path)
    room.print_summary(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["sample for the prompt 'Once upon':", "Once upon a time [there] was"]
    assert lines[-1].startswith("next           paceline generate 'runs/my demo' --prompt")
    assert not any(mark in "".join(lines) for mark in "│─╭") and not any(line.endswith("  ") for line in lines)


def test_a_reward_model_is_not_asked_to_speak() -> None:
    assert room.next_steps(replace(SUMMARY, is_score=True)) == "paceline convert 'runs/my demo' NEW-FOLDER --to hf"


def test_a_model_of_conversations_is_asked_through_its_template() -> None:
    asked = """paceline generate 'runs/my demo' --chat --prompt "..." """.strip()
    assert room.next_steps(replace(SUMMARY, is_chat=True)) == asked


def test_framed_on_a_terminal_and_not_too_wide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(room, "make_console", lambda: Console(file=shown, force_terminal=True, width=200))
    SUMMARY.write(tmp_path)
    room.print_summary(tmp_path)
    assert "╭" in shown.getvalue()
    assert max(len(line) for line in _plain(shown.getvalue())) <= 100


def _plain(text: str) -> list[str]:
    return [Text.from_ansi(line).plain for line in text.splitlines()]


def test_the_next_command_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert room.next_steps(replace(SUMMARY, made_up_tokens=True)) == ""
    assert "tensorboard" not in room.next_steps(SUMMARY)
    (tmp_path / "runs" / "my demo" / "tensorboard").mkdir(parents=True)
    commands = room.next_steps(SUMMARY).split("   |   ")
    assert shlex.split(commands[0])[:3] == ["paceline", "generate", "runs/my demo"]
    assert shlex.split(commands[1])[-1] == "runs/my demo/tensorboard"
    stopped = Summary(**{**json.loads(json.dumps(vars(SUMMARY))), "stopped_by": "SIGTERM"})
    assert room.next_steps(stopped) == "the same command starts from the beginning: there is no checkpoint"
    (tmp_path / "runs" / "my demo" / "checkpoints" / "step_00000010").mkdir(parents=True)
    assert room.next_steps(stopped) == "the same command goes on from step 10"
