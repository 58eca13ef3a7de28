"""Own times of operators: by hand, whatever the order of events, and over a trace that memory would not hold."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.explain import host_operators
from paceline.explain.host_operators import own_seconds
from tests.explain.traces import write


def operator(name: str, start: float, length: float, *, tid: int = 1, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": tid, "ts": start, "dur": length} | more


def test_time_counts_for_the_innermost_operator(tmp_path: Path) -> None:
    """0-100 linear, in it 10-60 addmm, in that 20-30 copy_ and, beginning with it, 10-15 empty; another thread."""
    events = [
        operator("aten::linear", 0, 100),
        operator("aten::addmm", 10, 50),
        operator("aten::copy_", 20, 10),
        operator("aten::empty", 10, 5),
        operator("aten::copy_", 0, 7, tid=2),
        operator("autograd::engine::evaluate_function: MmBackward0", 200, 4),
        {**operator("aten::relu", 300, 2), "ts": "300.0", "dur": "2.0"},  # some writers quote numbers
        operator("aten::relu", 400, 1, dur=None),
        {"ph": "X", "cat": "user_annotation", "name": "step", "pid": 1, "tid": 1, "ts": 0, "dur": 500},
        {"ph": "X", "cat": "cpu_op", "name": "no times", "pid": 1, "tid": 1},
        {"ph": "i", "cat": "cpu_op", "name": "an instant", "ts": 1},
    ]
    expected = {
        "aten::linear": 50e-6, "aten::addmm": 35e-6, "aten::copy_": 17e-6, "aten::empty": 5e-6, "MmBackward0": 4e-6,
        "aten::relu": 2e-6,
    }  # fmt: skip
    found = own_seconds(write(tmp_path / "t.json", events))
    assert found == pytest.approx(expected)
    assert list(found) == list(expected), "the longest first"
    random.Random(0).shuffle(events)
    assert own_seconds(write(tmp_path / "shuffled.json", events)) == pytest.approx(expected)


def test_own_times_add_up_to_what_is_covered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random trees of operators over many blocks: nothing is counted twice or lost."""
    monkeypatch.setattr(host_operators, "_BLOCK", 64)
    chance, events = random.Random(1), []

    def grow(start: float, length: float, depth: int) -> None:
        events.append(operator(f"op{chance.randrange(9)}", start, length))
        at = start
        while depth and (room := start + length - at) > 0.05:
            child = room * chance.uniform(0.1, 0.6)
            grow(at, child, depth - 1)
            at += child * chance.uniform(1.0, 1.5)

    for root in range(100):
        grow(100.0 * root, 90.0, 3)
    assert len(events) > 1000
    assert sum(own_seconds(write(tmp_path / "t.json", events)).values()) == pytest.approx(100 * 90e-6, rel=1e-6)


def test_no_operators_and_no_trace(tmp_path: Path) -> None:
    assert own_seconds(write(tmp_path / "t.json", [{"ph": "X", "cat": "kernel", "name": "k", "ts": 0, "dur": 1}])) == {}
    with pytest.raises(ConfigError, match="cannot be read"):
        own_seconds(tmp_path / "missing.json")


def test_two_large_traces_are_compared_in_little_memory(tmp_path: Path) -> None:
    """In a process of its own: operators with their shapes would take some kilobytes each."""
    path = tmp_path / "large.json"
    shapes = {"Input Dims": [[4096, 4096]] * 40, "Sequence number": 7}
    with path.open("w") as file:
        file.write('{"traceEvents": [\n')
        for number in range(40_000):
            file.write(json.dumps(operator("aten::add", 10 * number, 5, args=shapes)) + ",\n")
        file.write(json.dumps(operator("aten::mul", 0, 1, tid=3)) + "]}")
    assert path.stat().st_size > 25e6
    code = (
        "import sys; from pathlib import Path; from paceline.explain.compare_traces import compare_traces;"
        "found = compare_traces(Path(sys.argv[1]), Path(sys.argv[1]));"
        "memory = Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0];"
        "print(found.data['operators'][0]['aten::add'], memory)"
    )
    answer = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    seconds, kilobytes = answer.stdout.split()
    assert float(seconds) == pytest.approx(40_000 * 5e-6) and int(kilobytes) < 150 * 1024
