"""Reasons are read from what trials leave: exit code and log."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.tuner.failure import reason_of

OOM = (
    "Traceback (most recent call last):\n  File x\n"
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.8 GiB\n"
    "Error: the run failed\n"
)


@pytest.mark.parametrize(
    ("code", "log", "kind", "said"),
    [
        (1, OOM, "memory", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"),
        (1, "LaunchError: a process of the run was ended by SIGKILL\n", "memory", "ended by SIGKILL"),
        (-9, "", "memory", "SIGKILL"),
        (137, "step 3\n", "memory", "SIGKILL"),
        (2, "warm-up\nConfigError: train.x = 3 is wrong\n  because\n", "refused", "ConfigError: train.x = 3 is wrong"),
        (1, "RuntimeError: one\nValueError: other\nbye\n", "crash", "exit code 1: ValueError: other"),
        (-11, "step 1/8\n", "crash", "exit code -11: step 1/8"),
        (1, "", "crash", "it said nothing"),
        (0, "measuring\n", "crash", "exit code 0: measuring"),
        (None, "warm-up 1/3\n", "timeout", "stopped after 61 s without an end; last: warm-up 1/3"),
    ],
)
def test_reasons(tmp_path: Path, code: int | None, log: str, kind: str, said: str) -> None:
    (tmp_path / "log").write_text(log)
    found = reason_of(code, tmp_path / "log", seconds=61.2)
    assert found.kind == kind and said in found.text and "\n" not in found.text


def test_without_a_log_and_with_a_long_one(tmp_path: Path) -> None:
    assert reason_of(1, tmp_path / "none", seconds=1.0).kind == "crash"
    (tmp_path / "log").write_bytes(b"\xff" * 100_000 + b"\nRuntimeError: " + b"x" * 5000)
    found = reason_of(1, tmp_path / "log", seconds=1.0)
    assert found.text.startswith("exit code 1: RuntimeError: xxx") and len(found.text) < 400
