"""Traces of the CPU alone: parts that sum to the step, what an expert would say, a training loop of Transformers."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.explain.compare_traces import compare_traces
from paceline.explain.host_parts import BACKWARD, DATA, FORWARD, PYTHON, UPDATE, host_trace
from paceline.explain.rank_trace import load
from paceline.explain.trace_report import explain_traces
from tests.explain.traces import span, write

LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
EVALUATE = "autograd::engine::evaluate_function: "


def operator(name: str, start: float, length: float) -> dict[str, Any]:
    """Milliseconds."""
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": start * 1e3, "dur": length * 1e3}


def loop(steps: int = 4, *, data: float = 10.0, plain: bool = False) -> list[dict[str, Any]]:
    """Steps of 80 ms and the loader: 30 forward, 40 backward with 5 between, 4 of an optimizer, 1 of Python."""
    events = []
    for step in range(steps):
        at = step * (80 + data)
        events += [
            span(f"ProfilerStep#{step}", at, 80 + data),
            span(LOADER, at, data),
            operator("aten::stack", at, data / 2),
        ]
        at += data
        softmax = operator("aten::_softmax", at + 10, 8)
        events += [operator("aten::linear", at, 30), operator("aten::mm", at + 2, 6), *([softmax] if plain else [])]
        events += [operator(f"{EVALUATE}MmBackward0", at + 30, 20), operator("MmBackward0", at + 31, 18)]
        events += [operator(f"{EVALUATE}AddBackward0", at + 55, 20)]
        events += [span("Optimizer.step#AdamW.step", at + 75, 4), operator("aten::_foreach_add_", at + 76, 1)]
    return events


def test_parts_sum_to_the_step_and_the_first_that_covers_a_moment_has_it(tmp_path: Path) -> None:
    host = host_trace(load(write(tmp_path / "t.json", loop())))
    assert host.steps == 4 and host.seconds == pytest.approx(4 * 90e-3)
    expected = {DATA: 10.0, UPDATE: 4.0, BACKWARD: 40.0, FORWARD: 30.0, PYTHON: 6.0}
    assert host.parts == pytest.approx({name: 4e-3 * value for name, value in expected.items()})


def test_what_an_expert_says(tmp_path: Path) -> None:
    healthy = explain_traces([write(tmp_path / "a.json", loop(data=0.2))])
    assert [one.id for one in healthy.findings] == ["explain.trace-without-gpu"]
    assert "4 steps take 80.2 ms each" in healthy.findings[0].evidence and len(healthy.pictures) == 1
    slow = explain_traces([write(tmp_path / "b.json", loop(data=160.0))]).findings[0]
    assert (
        slow.id == "explain.data-loading"
        and slow.severity == "warning"
        and slow.gain == ("66.7 % of the step, 3.00x tokens/s")
    )
    assert "no worker processes" in slow.evidence and "num_workers" in slow.next_step
    plain = explain_traces([write(tmp_path / "c.json", loop(plain=True))]).findings
    assert "explain.plain-attention" in [one.id for one in plain]


def test_steps_that_a_cut_trace_holds_in_part_do_not_count(tmp_path: Path) -> None:
    """Spans come first in this file, operators of the last step are lost: they are no idle time."""
    events = sorted(loop(), key=lambda event: (event["cat"] != "user_annotation", event["ts"]))
    whole = json.dumps({"traceEvents": events})
    last = [event for event in events if event["cat"] == "cpu_op"][-3]
    text = whole[: whole.index(json.dumps(last)) + 30]
    for name, data in (("t.json", text.encode()), ("t.json.gz", gzip.compress(text.encode()))):
        (tmp_path / name).write_bytes(data)
        host = host_trace(load(tmp_path / name))
        assert host.steps == 3 and host.parts[PYTHON] == pytest.approx(3 * 6e-3)
        found = explain_traces([tmp_path / name]).findings
        assert {one.id for one in found} == {"explain.incomplete", "explain.trace-without-gpu", "explain.data-loading"}


def test_a_slower_loader_is_seen_between_two_traces(tmp_path: Path) -> None:
    """No operator of the CPU takes longer, so their own times do not tell."""
    first, second = write(tmp_path / "a.json", loop(2)), write(tmp_path / "b.json", loop(3, data=60.0))
    told = compare_traces(first, second)
    assert "data: +50.00 ms" in told.findings[0].evidence and "2 and 3 steps" in told.findings[0].evidence
    assert told.tables[0].rows[0][0] == "data" and told.tables[0].rows[-1][1:3] == ("90.0 ms", "140 ms")


TRANSFORMERS = """
import sys, time, torch
from torch.profiler import ProfilerActivity, profile, schedule
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
    vocab_size=256, max_position_embeddings=64,
))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

class Sleeping(torch.utils.data.Dataset):
    def __len__(self): return 40
    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.randint(0, 256, (64,))

with profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=4),
             on_trace_ready=lambda done: done.export_chrome_trace(sys.argv[1])) as profiler:
    for number, batch in enumerate(torch.utils.data.DataLoader(Sleeping(), batch_size=4)):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        profiler.step()
        if number == 6:
            break
"""


@pytest.mark.slow
def test_a_training_loop_of_transformers_with_a_dataset_that_sleeps(tmp_path: Path) -> None:
    """80 ms of sleep a step in the program's own process. A trace of it as it is, and zipped and cut short."""
    pytest.importorskip("transformers")
    path = tmp_path / "trace.json"
    subprocess.run([sys.executable, "-c", TRANSFORMERS, str(path)], check=True, capture_output=True)
    host = host_trace(load(path))
    assert host.steps == 4 and 0.08 <= host.parts[DATA] / 4 < 0.2
    assert host.parts[BACKWARD] > 0 and host.parts[UPDATE] > 0 and host.parts[FORWARD] > 0
    assert sum(host.parts.values()) == pytest.approx(host.seconds)
    packed = gzip.compress(path.read_bytes())
    (tmp_path / "cut.json.gz").write_bytes(packed[: len(packed) * 2 // 3])
    for name in ("trace.json", "cut.json.gz"):
        first = explain_traces([tmp_path / name]).findings[0]
        assert first.id == "explain.data-loading" and "no worker processes" in first.evidence, name
