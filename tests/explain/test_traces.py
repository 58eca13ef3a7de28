"""Traces of any PyTorch program: the definitions, the reading in pieces, and what an expert would say."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import ConfigError
from paceline.explain.compare_traces import compare_traces
from paceline.explain.kinds import NAMES, collective_of, is_fp32_product, kind_index
from paceline.explain.rank_trace import load
from paceline.explain.sources import explain
from paceline.explain.timeline import break_down
from paceline.explain.trace_file import read_trace
from paceline.explain.trace_report import explain_traces
from tests.explain.traces import copy, fsdp_layers, kernel, span, write

NCCL = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def test_the_definitions_are_those_of_holistic_trace_analysis(tmp_path: Path) -> None:
    """0-10 GEMM, 5-20 communication, 25-30 a copy, 40-50 GEMM: 20 computing, 15 not, 15 idle, a third overlapped."""
    events = [
        *kernel("ampere_gemm", 0, 10),
        *kernel(NCCL, 5, 15, 20),
        copy(25, 5),
        *kernel("ampere_gemm", 40, 10),
    ]
    made = break_down(read_trace(write(tmp_path / "t.json", events)))
    assert made.total == pytest.approx(50e-3) and made.computation == pytest.approx(20e-3)
    assert made.non_computation == pytest.approx(15e-3) and made.idle == pytest.approx(15e-3)
    assert made.communication == pytest.approx(15e-3) and made.exposed == pytest.approx(10e-3)
    assert made.overlap == pytest.approx(1 / 3) and made.memory == pytest.approx(5e-3)


def test_idle_gaps_are_told_apart_by_the_launch(tmp_path: Path) -> None:
    events = [
        *kernel("a_gemm", 0, 10, launch=-1, number=1),
        *kernel("a_gemm", 10.00002, 10, launch=2, number=2),  # 20 ns after the one before: kernel wait
        *kernel("a_gemm", 30, 10, launch=25, number=3),  # launched after the one before had ended: host wait
        *kernel("a_gemm", 45, 10, launch=26, number=4),  # launched in time: something else
    ]
    made = break_down(read_trace(write(tmp_path / "t.json", events)))
    assert made.idle_kernel == pytest.approx(20e-9, rel=0.01) and made.idle_host == pytest.approx(10e-3, rel=0.01)
    assert made.idle_other == pytest.approx(5e-3)


def test_parts_add_up_to_the_total(tmp_path: Path) -> None:
    events = [*fsdp_layers(7.0), copy(200, 3), *kernel("adam_multi_tensor_apply", 210, 4)]
    one = load(write(tmp_path / "t.json", events))
    assert sum(one.parts.values()) == pytest.approx(one.breakdown.total, rel=1e-9)


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_exposed_communication_of_fsdp(name: str, tmp_path: Path) -> None:
    """pytorch/torchtitan#929: one all-gather takes 35 ms where it took 2: nothing hides it any more."""
    good = write(tmp_path / f"good-{name}", fsdp_layers(2.0, layers=40))
    bad = write(tmp_path / f"bad-{name}", fsdp_layers(35.0, layers=40))
    assert load(good).breakdown.exposed == pytest.approx(0, abs=1e-9)
    one = load(bad)
    assert one.share(one.breakdown.exposed) == pytest.approx(30 / 35, abs=0.02)
    first = explain_traces([bad]).findings[0]
    assert (
        first.id == "explain.exposed-communication" and first.severity == "warning" and "all-gather" in first.evidence
    )
    told = compare_traces(good, bad).findings[0]
    assert told.id == "explain.slower-collective" and "17.5 times" in told.subject
    assert "same overlap schedule, slower collective" in told.subject and "fabric" in told.next_step
    assert "code does the same work" in told.next_step
    assert not any(f.severity == "warning" for f in explain_traces([good]).findings)


def test_gradients_that_are_reduced_at_every_micro_step(tmp_path: Path) -> None:
    """huggingface/transformers#7742: 32 accumulation steps, 32 reductions."""

    def program(micro_steps_with_sync: bool) -> list[dict[str, object]]:
        events, now = [], 0.0
        for _ in range(4):
            for micro in range(8):
                events += kernel("nvjet_gemm", now, 20)
                now += 20
                if micro_steps_with_sync or micro == 7:
                    for bucket in range(3):
                        events += kernel(NCCL, now + bucket, 0.9, 20)
                    now += 3
            events.append(span("Optimizer.step#AdamW.step", now, 1))
            events += kernel("multi_tensor_apply_kernel_adam", now, 1)
            now += 1
        return events

    bad = explain_traces([write(tmp_path / "bad.json", program(True))]).findings
    found = next(f for f in bad if f.id == "explain.sync-every-micro-step")
    assert "8 times" in found.subject and "no_sync" in found.next_step
    good = explain_traces([write(tmp_path / "good.json", program(False))]).findings
    assert not any(f.id == "explain.sync-every-micro-step" for f in good)


def test_a_loader_that_is_late(tmp_path: Path) -> None:
    events, now = [], 0.0
    for number in range(10):
        events.append(span("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", now, 70))
        events += kernel("nvjet_gemm", now + 70, 30, launch=now + 70, number=number)
        now += 100
    first = explain_traces([write(tmp_path / "t.json", events)]).findings[0]
    assert first.id == "explain.data-loading" and 60 < float(first.gain.split()[0]) < 72  # type: ignore[union-attr]


def test_a_host_that_is_late(tmp_path: Path) -> None:
    events = [
        e for n in range(100) for e in kernel("vectorized_elementwise", n * 0.02, 0.008, launch=n * 0.02, number=n)
    ]
    first = explain_traces([write(tmp_path / "t.json", events)]).findings[0]
    assert first.id == "explain.host-bound" and "compile" in first.next_step and "waited for" not in first.evidence


def test_everything_that_is_wrong_with_a_plain_loop_is_said_by_what_it_costs(tmp_path: Path) -> None:
    """As of a Transformers model in fp32 with eager attention, ``loss.item()`` in each step and no loader workers."""
    events, number, step_ms = [], 0, 100.0
    wait = {"ph": "X", "cat": "cuda_runtime", "name": "cudaStreamSynchronize", "pid": 1, "tid": 1, "dur": 100}
    for step in range(5):
        now = step * step_ms
        events += [span(f"ProfilerStep#{step}", now, step_ms), wait | {"ts": 1e3 * (now + 99)}]
        events.append(span("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", now, 20))
        # from 20 to 85 ms the GPU is busy, then it waits for a host that launches late
        for name, start, length, launch in (
            ("ampere_sgemm_128x64_tn", 20, 40, 20), ("cunn_SoftMaxForward", 60, 15, 21),
            ("vectorized_elementwise_kernel", 75, 10, 22), ("multi_tensor_apply_kernel_adam", 96, 4, 96),
        ):  # fmt: skip
            events += kernel(name, now + start, length, launch=now + launch, number=(number := number + 1))
    found = explain_traces([write(tmp_path / "t.json.gz", events)]).findings
    priced = [one.id for one in found if one.gain and "of the step" in one.gain]
    assert priced == ["explain.fp32", "explain.data-loading", "explain.plain-attention", "explain.host-bound"]
    host = next(one for one in found if one.id == "explain.host-bound")
    assert "waited for the GPU 1 times a step (cudaStreamSynchronize)" in host.evidence


def test_plain_attention_and_fp32_are_seen_by_their_kernels(tmp_path: Path) -> None:
    events = [
        *kernel("ampere_sgemm_128x64_tn", 0, 60),
        *kernel("cunn_SoftMaxForward", 60, 20),
        *kernel("sm90_xmma_gemm_bf16", 80, 20),
    ]
    ids = {f.id: f for f in explain_traces([write(tmp_path / "t.json", events)]).findings}
    assert {"explain.fp32", "explain.plain-attention"} <= ids.keys()


def test_the_rank_that_comes_last_is_named(tmp_path: Path) -> None:
    early = [*kernel("a_gemm", 0, 50), *kernel(NCCL, 50, 50, 20)]
    late = [*kernel("a_gemm", 0, 90), *kernel(NCCL, 90, 10, 20)]
    paths = [write(tmp_path / f"r{rank}.json", events, rank=rank) for rank, events in enumerate((early, late))]
    told = {f.id: f for f in explain(paths).findings}
    assert "rank 1" in told["explain.slow-rank"].subject and "computes" in told["explain.slow-rank"].evidence


def test_a_trace_that_ends_in_the_middle_is_read_up_to_there(tmp_path: Path) -> None:
    whole = write(tmp_path / "t.json", fsdp_layers(2.0, layers=50)).read_bytes()
    cut = tmp_path / "cut.json"
    for length in (len(whole) // 2, len(whole) - 2, len(whole) - 40):
        cut.write_bytes(whole[:length])
        shown = explain_traces([cut])
        assert shown.data["ranks"][0]["truncated"] and shown.data["ranks"][0]["seconds"] > 0
        assert any(f.id == "explain.incomplete" for f in shown.findings)
    zipped = tmp_path / "cut.json.gz"
    zipped.write_bytes(gzip.compress(whole)[:-300])
    assert explain_traces([zipped]).data["ranks"][0]["truncated"]


def test_a_damaged_gzip_is_read_up_to_there_and_called_so(tmp_path: Path) -> None:
    """The random numbers keep it from being packed into a few bytes."""
    noise = np.random.default_rng(0).random(20_000).tolist()
    whole = write(tmp_path / "t.json.gz", [{"ph": "i", "args": noise}, *kernel("a_gemm", 0, 1)] * 2).read_bytes()
    damaged = bytearray(whole)
    damaged[-6] ^= 255  # of the checksum: all is there
    (tmp_path / "t.json.gz").write_bytes(damaged)
    read_trace(tmp_path / "t.json.gz")
    damaged = bytearray(whole)
    damaged[3 * len(whole) // 4 :] = np.random.default_rng(1).bytes(len(whole) // 4)
    (tmp_path / "t.json.gz").write_bytes(damaged)
    trace = read_trace(tmp_path / "t.json.gz")
    assert len(trace.start) == 1 and "is a damaged gzip file; read are the 2 events before" in trace.problems[0]


def test_what_holds_no_event_is_refused_for_what_it_is(tmp_path: Path) -> None:
    whole = write(tmp_path / "t.json.gz", fsdp_layers(2.0, layers=50)).read_bytes()
    flipped = bytearray(whole)
    flipped[10:40] = b"\xff" * 30
    for name, content, reason in (
        ("damaged.json.gz", bytes(flipped), "it is a damaged gzip file"),
        ("cut.json.gz", whole[:100], "it is a gzip file that was cut short"),
        ("cut.json", b'{"traceEvents": [{"ph": ', "it was cut short before the first event"),
        ("none.json", b'{"traceEvents": []}', "its list of events is empty"),
        ("other.json", b'{"a": 1}', "it has no traceEvents"),
    ):
        (tmp_path / name).write_bytes(content)
        for read in (read_trace, lambda path: explain([path])):
            with pytest.raises(ConfigError, match=f"{name} is no Kineto or Perfetto JSON trace: {reason}"):
                read(tmp_path / name)
    (tmp_path / "empty.json").write_bytes(b"")
    for read in (read_trace, lambda path: explain([path])):
        with pytest.raises(ConfigError, match="is empty"):
            read(tmp_path / "empty.json")


MALFORMED: dict[str, dict[str, Any]] = {
    "a time that is no number": {"ts": "abc"},
    "a time beyond all numbers": {"ts": float("nan")},
    "no duration": {"dur": None},
    "a negative duration": {"dur": -5},
    "a list of arguments": {"args": [1]},
    "a list of categories": {"cat": ["a"]},
    "a process that is a table": {"pid": {"a": 1}},
}


@pytest.mark.parametrize("category", ["kernel", "cpu_op", "cuda_runtime"])
@pytest.mark.parametrize("wrong", MALFORMED.values(), ids=list(MALFORMED))
def test_malformed_events_are_left_out_and_counted(wrong: dict[str, Any], category: str, tmp_path: Path) -> None:
    event = kernel("a_gemm", 0, 1)[0] | {"cat": category}
    path = write(tmp_path / "t.json", [event, event | wrong])
    told = [one for one in explain_traces([path]).findings if one.id == "explain.incomplete"]
    assert [one.evidence for one in told] == [
        "t.json: 1 of 2 events are malformed and left out, the first is number 2."
    ]
    assert "explain.incomplete" in {one.id for one in compare_traces(path, path).findings}
    bad = explain_traces([write(tmp_path / "t.json", [event | wrong])])
    assert {one.id for one in bad.findings} >= {"explain.incomplete", "explain.trace-without-gpu"}


@pytest.mark.parametrize("arguments", [{"correlation": "x", "stream": "s"}, {"correlation": 1e300, "stream": 1 << 40}])
def test_numbers_that_are_none_are_unknown(arguments: dict[str, Any], tmp_path: Path) -> None:
    events = [event | {"args": arguments} for event in kernel("a_gemm", 1, 1, launch=0)]
    assert read_trace(write(tmp_path / "t.json", [*events, span("module:a", 0, 1)])).stream.tolist() == [-1]
    assert explain_traces([tmp_path / "t.json"]).tables


def test_kernels_of_no_length_are_shared_out_to_nothing(tmp_path: Path) -> None:
    one = load(write(tmp_path / "t.json", [*kernel("a_gemm", 0, 0), *kernel("a_gemm", 5, 0)]))
    assert one.parts["matrix products"] == 0 and sum(one.parts.values()) == pytest.approx(5e-3)


@pytest.mark.parametrize("text", ["", "{}", "hello", '{"a": [1, 2]}', "\x00\x01\x02", '{"traceEvents": []}', "[]"])
def test_what_is_no_trace_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ConfigError, match=r"no Kineto|cannot be read"):
        read_trace(tmp_path / "t.json")


def test_foreign_events_do_not_disturb(tmp_path: Path) -> None:
    events = [
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
        {"ph": "X", "cat": "kernel", "name": "no time"},
        {"ph": "X", "cat": "kernel", "name": "a_gemm", "ts": "1000", "dur": "10.5", "args": None},
        {"ph": "X", "cat": None, "name": 3, "ts": 1},
        {"ph": "s", "id": 1, "cat": "ac2g", "ts": 1},
        *kernel("a_gemm", 5, 1),
    ]
    assert len(read_trace(write(tmp_path / "t.json", events)).start) == 2
    (tmp_path / "list.json").write_text(json.dumps(events))
    assert len(read_trace(tmp_path / "list.json").start) == 2


def test_a_trace_of_the_host_alone_says_what_to_record(tmp_path: Path) -> None:
    events = [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 2}]
    (finding,) = explain_traces([write(tmp_path / "t.json", events)]).findings
    assert finding.id == "explain.trace-without-gpu" and "ProfilerActivity.CUDA" in finding.next_step


def marked(number: int, *, length: float = 10.0) -> list[dict[str, Any]]:
    """Steps of one kernel each."""
    return [
        event
        for step in range(number)
        for event in (
            span(f"ProfilerStep#{step}", 10 * step, 10),
            *kernel("nvjet_gemm", 10 * step, length),
            *kernel("ncclDevKernel_AllReduce_Sum", 10 * step + 1, 2, 20),
        )
    ]


def test_two_traces_are_compared_by_step(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a.json", marked(2)), write(tmp_path / "b.json", marked(6))
    told = compare_traces(first, second)
    (row,) = [cells for cells in told.tables[0].rows if cells[0] == "step"]
    assert row[1:] == ("10.0 ms", "10.0 ms", "+0.00 ms")
    assert "2 and 6 steps" in told.findings[0].evidence
    shown = " ".join(str(cell) for each in told.tables for cells in each.rows for cell in cells)
    assert "-0.0" not in shown and "-0 " not in shown


def idle_at_the_ends(number: int, busy: float) -> list[dict[str, Any]]:
    """Steps of 100 ms: the GPU starts 10 ms late, and is done before the step is."""
    return [
        event
        for step in range(number)
        for event in (
            span(f"ProfilerStep#{step}", 100 * step, 100),
            span("DataLoader.__next__", 100 * step, 8),
            *kernel("nvjet_gemm", 100 * step + 10, busy, launch=100 * step + 9, number=step),
        )
    ]


def test_marked_steps_are_as_long_as_their_marks(tmp_path: Path) -> None:
    """By kernels alone four steps of 100 ms would take 92.5 and 85 ms."""
    first, second = (write(tmp_path / f"{busy}.json", idle_at_the_ends(4, busy)) for busy in (60, 30))
    told = compare_traces(first, second)
    assert {row[0]: row[1:3] for row in told.tables[0].rows}["step"] == ("100 ms", "100 ms")
    made = load(first).breakdown
    assert made.total == pytest.approx(0.4) and made.idle == pytest.approx(0.16) == made.idle_host
    assert sum(load(first).parts.values()) == pytest.approx(0.4)
    loading = next(one for one in explain_traces([first]).findings if one.id == "explain.data-loading")
    assert "32.0 ms of 400 ms" in loading.evidence


def test_a_gpu_that_works_on_after_the_last_mark_is_not_idle(tmp_path: Path) -> None:
    """The host runs ahead: the time of the marks says nothing then."""
    events = [span("ProfilerStep#0", 0, 10), *kernel("nvjet_gemm", 5, 50)]
    made = load(write(tmp_path / "t.json", events)).breakdown
    assert made.total == pytest.approx(0.05) and made.idle == 0


def test_a_trace_without_steps_is_compared_as_a_whole(tmp_path: Path) -> None:
    bare = [event for event in marked(2) if event["cat"] == "kernel"]
    told = compare_traces(write(tmp_path / "a.json", marked(4)), write(tmp_path / "b.json", bare))
    assert "The second does not mark its steps (the first has 4)" in told.findings[0].evidence
    assert told.tables[0].rows[-1][0] == "whole trace"


def test_hidden_communication_gives_no_negative_zero(tmp_path: Path) -> None:
    events = [*kernel("nvjet_gemm", 0.1, 0.7), *kernel("ncclDevKernel_AllReduce_Sum", 0.1, 0.7, 20)]
    events += [*kernel("nvjet_gemm", 1.1, 0.3), *kernel("ncclDevKernel_AllReduce_Sum", 1.1, 0.6, 20)]
    made = load(write(tmp_path / "t.json", events)).breakdown
    assert min(made.exposed, made.memory, made.idle, made.non_computation) >= 0 and 0 <= made.overlap <= 1


def operators(milliseconds: float, steps: int) -> list[dict[str, Any]]:
    return [
        event
        for step in range(steps)
        for event in (
            span(f"ProfilerStep#{step}", 50 * step, 50),
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "tid": 1, "ts": 5e4 * step, "dur": milliseconds * 1e3},
        )
    ]


def test_traces_of_the_host_alone_are_compared_by_their_operators(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a.json", operators(10, 2)), write(tmp_path / "b.json", operators(15, 3))
    told = compare_traces(first, second)
    (finding,) = told.findings
    assert finding.id == "explain.trace-without-gpu" and "a step takes 50.0 ms and 50.0 ms" in finding.subject
    assert "aten::mm: +5.00 ms" in finding.evidence and "2 and 3 steps" in finding.evidence
    assert all(each.rows for each in told.tables)
    one = write(tmp_path / "c.json", marked(2))
    mixed = compare_traces(one, second)
    assert "only the first trace holds work of a GPU" in mixed.findings[0].subject and not mixed.tables


@pytest.mark.slow
def test_a_large_trace_is_streamed(tmp_path: Path) -> None:
    """In a process of its own, memory stays far below the file: only GPU activity is kept, 60 bytes an event."""
    path = tmp_path / "large.json"
    event = json.dumps({
        "ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1, "tid": 1, "ts": 1, "dur": 2,
        "args": {"Input Dims": [[4096, 4096]] * 40, "External id": 1, "Sequence number": 7},
    })  # fmt: skip
    gemm = json.dumps(kernel("a_gemm", 1, 1)[0])
    with path.open("w") as file:
        file.write('{"traceEvents": [\n' + gemm)
        for _ in range(50):
            file.write((",\n" + event) * 6_000 + ",\n" + gemm)
        file.write("]}")
    assert path.stat().st_size > 200e6
    code = (
        "import sys; from pathlib import Path; from paceline.explain.trace_file import read_trace;"
        "t = read_trace(Path(sys.argv[1])); s = Path('/proc/self/status').read_text();"
        "print(len(t.start), t.host_ops, s.split('VmHWM:')[1].split()[0])"
    )
    answer = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    kernels, host, kilobytes = map(int, answer.stdout.split())
    assert kernels == 51 and host == 300_000 and kilobytes < 150 * 1024


def test_a_trace_of_torch_profiler_is_read(tmp_path: Path) -> None:
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("forward"):
        torch.ones(64, 64) @ torch.ones(64, 64)
    path = tmp_path / "t.json.gz"
    profiler.export_chrome_trace(str(path))
    trace = read_trace(path)
    assert trace.host_ops > 0 and "forward" in trace.spans and not trace.truncated


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "communication"),
        ("nvjet_hsh_256x128_64x4_2x1_v_bz_coopA_NNT", "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>", "matrix products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", "attention"),
        ("void flash::flash_fwd_kernel<Flash_fwd_kernel_traits>", "attention"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add>", "element-wise and reductions"),
        ("triton_poi_fused_add_mul_0", "compiled (triton)"),
        ("Memcpy DtoD (Device -> Device)", "memory"),
    ],
)
def test_kernels_are_sorted_by_name(name: str, kind: str) -> None:
    assert NAMES[kind_index(name)] == kind


def test_collectives_are_named() -> None:
    assert collective_of(NCCL) == "reduce-scatter" and collective_of("ncclDevKernel_SendRecv") == "send and receive"
    assert is_fp32_product("ampere_sgemm_128x64_tn") and not is_fp32_product("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn")
