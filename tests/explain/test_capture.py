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
        ("model", "forward"),
        ("loss", "forward"),
        ("loss", "backward"),
        ("metrics", "other"),
        ("", "optimizer"),
    ):
        assert key in modules, key
    # not by luck: whatever operator is slow, it has an owner
    unknown = [row for row in found.rows if not row.module and row.phase in ("forward", "backward")]
    assert not unknown
    assert any("dp/gradients" in module for module, _ in modules)
    # forward of q_proj: 2 steps x 2 micro-batches x 2 layers of [16, 32] x [32, 32]
    assert modules["blocks.*.attention.q_proj", "forward"].flops == pytest.approx(2 * 2 * 2 * 2 * 16 * 32 * 32)
    assert modules["blocks.*.attention.q_proj", "backward"].flops == pytest.approx(2 * 2 * 2 * 2 * 2 * 16 * 32 * 32)
    shown = explain_run(folder)
    (table,) = [table for table in shown.tables if table.title.startswith("By module")]
    assert found.steps == 2 and table.notes[0].startswith("Sums over 2 captured steps, of ")
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


def test_an_engine_span_without_a_number_and_an_operator_of_several_kernels(tmp_path: Path) -> None:
    """As torch 2.11 writes them on a GPU: the node's own span has the number; FLOPs are of an operator's call."""

    def span(name: str, start: float, length: float, category: str = "cpu_op", **more: Any) -> dict[str, Any]:
        return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length, "tid": 1, "args": more}

    def launched(start: float, number: int) -> list[dict[str, Any]]:
        kernel = span(f"cudnn_flash_{number}", 5000 + 200 * number, 100, "kernel", correlation=number)
        return [span("cudaLaunchKernel", start, 1, "cuda_runtime", correlation=number), {**kernel, "tid": 7}]

    query, key = [2, 8, 64, 16], [2, 2, 64, 16]

    def attention(name: str, start: float, tensors: list[list[int]], is_causal: str, at: int) -> dict[str, Any]:
        values = [is_causal if place == at else "" for place in range(16)]
        return span(name, start, 30, **{"Input Dims": tensors, "Concrete Inputs": values})

    name = "aten::_scaled_dot_product_cudnn_attention"
    events = [
        span("phase: forward", 0, 100, "user_annotation"),
        span("module: blocks.0", 1, 90, "user_annotation"),
        span("CompiledFunction", 2, 60, **{"Sequence number": 7}),
        attention(name, 3, [query, key, key], "True", 6),
        *launched(5, 1),
        span("phase: backward", 200, 200, "user_annotation"),
        span("autograd::engine::evaluate_function: CompiledFunctionBackward", 210, 150),
        span("CompiledFunctionBackward", 212, 140, **{"Sequence number": 7}),
        attention(f"{name}_backward", 215, [query, query, key, key], "True", 14),
        *launched(216, 2), *launched(218, 3), *launched(220, 4),
        attention(f"{name}_backward", 260, [query, query, key, key], "False", 14),
        *launched(262, 5),
    ]  # fmt: skip
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    found = attribute(path)
    assert found.attributed == 1
    modules = found.by_module()
    forward, backward = modules["blocks.*", "forward"], modules["blocks.*", "backward"]
    whole = 4.0 * 2 * 8 * 64 * 64 * 16
    assert forward.flops == whole / 2 and (backward.calls, backward.flops) == (4, 2.5 * whole / 2 + 2.5 * whole)
