"""A capture: taken while the run is at work, every piece of it with an owner."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.explain_capture import capture
from paceline.errors import ConfigError
from paceline.explain.attribution import attribute
from paceline.explain.capture_report import captures_of
from paceline.explain.run_report import explain_run
from paceline.explain.trace_report import explain_traces
from paceline.observe.capture_request import CaptureRequest, read_request, trace_path, write_request
from tests.distributed import run as run_ranks
from tests.training import runs


def test_every_operator_of_a_captured_run_has_an_owner(tmp_path: Path) -> None:
    data = runs.write_dataset(tmp_path / "data")
    folder = tmp_path / "run"
    more = ("observe.capture_at=[5]", "observe.capture_steps=2", "observe.capture_ranks=[1]")
    run_ranks(runs.run, 2, runs.tiny(folder, data, *more, steps=8))
    assert captures_of(folder) == [trace_path(folder, 1, 5)]
    found = attribute(trace_path(folder, 1, 5))
    assert found.attributed >= 0.95 and not found.on_gpu
    modules = found.by_module()
    for key in (
        ("blocks.*.attention.q_proj", "forward"),
        ("blocks.*.attention.q_proj", "backward"),
        ("blocks.*.feed_forward.down_proj", "backward"),
        ("head", "forward"),
        ("", "optimizer"),
    ):
        assert key in modules, key
    assert any("dp/gradients" in module for module, _ in modules)
    # forward of q_proj: 2 steps x 2 micro-batches x 2 layers of [16, 32] x [32, 32]
    assert modules["blocks.*.attention.q_proj", "forward"].flops == pytest.approx(2 * 2 * 2 * 2 * 16 * 32 * 32)
    assert modules["blocks.*.attention.q_proj", "backward"].flops == pytest.approx(2 * 2 * 2 * 2 * 2 * 16 * 32 * 32)
    shown = explain_run(folder)
    assert any(table.title.startswith("By module") for table in shown.tables)
    assert shown.data["attribution"][0]["attributed"] >= 0.95


def test_recomputed_modules_are_told_from_backward(tmp_path: Path) -> None:
    data = runs.write_dataset(tmp_path / "data")
    folder = tmp_path / "run"
    runs.alone(runs.tiny(folder, data, "observe.capture_at=[4]", "parallel.recompute=full", steps=7))
    modules = attribute(trace_path(folder, 0, 4)).by_module()
    again, first = (modules["blocks.*.feed_forward.up_proj", phase] for phase in ("recompute", "forward"))
    assert again.flops == pytest.approx(first.flops)


def test_a_request_is_read_while_the_run_is_at_work(tmp_path: Path) -> None:
    data = runs.write_dataset(tmp_path / "data")
    folder = tmp_path / "run"
    plugin = tmp_path / "ask.py"
    plugin.write_text(ASK)
    runs.alone(runs.tiny(folder, data, f"run.plugins={plugin}", steps=12))
    assert captures_of(folder) == [trace_path(folder, 0, 9)]


ASK = """
import time
from paceline.observe.capture_request import CaptureRequest, write_request
from paceline.observe.hooks import Hook


class Ask(Hook):
    def on_start(self, start):
        self.folder = start.run_dir

    def on_step_end(self, end):
        if end.step == 3:
            write_request(self.folder, CaptureRequest(steps=2, at=9, ranks=(0,)))
            time.sleep(2.5)


def register(registry):
    registry.hook(lambda config: Ask())
"""


def test_requests_are_whole_or_none(tmp_path: Path) -> None:
    (tmp_path / "record").mkdir()
    request = CaptureRequest(steps=3, at=40, ranks=(0, 5))
    write_request(tmp_path, request)
    assert read_request(tmp_path) == request and request.wants(5) and not request.wants(1)
    (tmp_path / "record" / "capture.json").write_text('{"steps": 3')
    assert read_request(tmp_path) is None and CaptureRequest(steps=1, at=1, ranks=()).wants(7)


def test_a_run_that_is_over_cannot_be_captured(tmp_path: Path) -> None:
    data = runs.write_dataset(tmp_path / "data")
    runs.alone(runs.tiny(tmp_path / "run", data, steps=4))
    with pytest.raises(ConfigError, match="not at work"):
        capture(tmp_path / "run", 3, (0,))
    with pytest.raises(ConfigError, match="no run folder"):
        capture(tmp_path / "data", 3, (0,))
    (tmp_path / "run" / "events.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"rank 7 is not in this run"):
        capture(tmp_path / "run", 3, (7,))


def test_kernels_are_owned_through_their_launches(tmp_path: Path) -> None:
    """A GPU's trace: forward by module, backward by the operator's number, the optimizer by its phase."""

    def span(
        name: str, start: float, length: float, category: str = "user_annotation", tid: int = 1, **more: Any
    ) -> dict[str, Any]:
        return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length, "tid": tid, "args": more}

    def launch(start: float, number: int, tid: int = 1) -> dict[str, Any]:
        return span("cudaLaunchKernel", start, 1, "cuda_runtime", tid, correlation=number)

    def kernel(name: str, number: int, length: float = 100) -> dict[str, Any]:
        return span(name, 5000 + 200 * number, length, "kernel", 7, correlation=number, stream=7)

    dims = {"Input Dims": [[128, 64], [64, 32]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
    events = [
        span("phase: forward", 0, 100),
        span("module: blocks.0", 1, 90),
        span("module: blocks.0.attention.q_proj", 2, 50),
        span("aten::mm", 3, 20, "cpu_op", **dims, **{"Sequence number": 11}),
        launch(5, 1),
        span("phase: backward", 200, 100),
        span("autograd::engine::evaluate_function: MmBackward0", 210, 50, "cpu_op", 2, **{"Sequence number": 11}),
        span("aten::mm", 212, 20, "cpu_op", 2, **dims),
        launch(215, 2, 2),
        span("phase: optimizer", 400, 50),
        launch(410, 3),
        kernel("nvjet_gemm", 1), kernel("nvjet_gemm", 2), kernel("fused_adam", 3), kernel("lonely", 99, 10),
    ]  # fmt: skip
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    found = attribute(path)
    assert found.on_gpu and found.attributed == pytest.approx(300 / 310)
    rows = found.by_module()
    assert rows["blocks.*.attention.q_proj", "forward"].flops == 2 * 128 * 64 * 32
    assert rows["blocks.*.attention.q_proj", "backward"].seconds == pytest.approx(100e-6)
    assert rows["", "optimizer"].calls == 1
    assert rows["blocks.*.attention.q_proj", "forward"].bytes_moved == 2 * (128 * 64 + 64 * 32)
    assert explain_traces([path]).data["attribution"][0]["rows"][0]["shapes"] == "128x64 64x32"
