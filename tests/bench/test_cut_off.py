"""Ctrl-C on a bench: one line, exit code 130, no traceback; and every script of the folder does it."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.append(str(BENCH))

import cut_off  # noqa: E402

SHORT = {"foundation_report", "post_training_data"}
"""Scripts that are done at once."""


def test_every_script_that_measures_ends_so() -> None:
    scripts = [path for path in BENCH.glob("*.py") if '__name__ == "__main__"' in path.read_text()]
    assert len(scripts) > 20
    for path in scripts:
        text = path.read_text()
        through = "cut_off.run(main" in text or re.search(r"^import runner|^from runner import", text, re.MULTILINE)
        assert through or path.stem in SHORT, path.name


def test_a_script_in_the_middle_of_its_work() -> None:
    code = f"""
import sys, time; sys.path.insert(0, {str(BENCH)!r})
import cut_off  # noqa: E402
def main():
    print("at work", flush=True)
    time.sleep(60)
cut_off.run(main)
"""
    # as a terminal does, also where whatever runs the tests ignores it
    interruptible = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], preexec_fn=interruptible, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"at work\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=30)
    assert process.returncode == 130
    assert told.decode().strip() == f"cut off: {cut_off.NOTHING}"


@pytest.mark.parametrize(("answer", "code"), [(None, 0), (0, 0), (2, 2)])
def test_a_script_that_ends_by_itself(answer: int | None, code: int) -> None:
    with pytest.raises(SystemExit) as ended:
        cut_off.run(lambda: answer)
    assert (ended.value.code or 0) == code


def test_a_reader_that_leaves_early_ends_the_list_without_a_word() -> None:
    command = f"{shlex.quote(sys.executable)} {BENCH / 'tune.py'} list | head -1; exit ${{PIPESTATUS[0]}}"
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert found.stdout.count("\n") == 1 and found.stderr == ""
    assert found.returncode in (0, 128 + signal.SIGPIPE)
