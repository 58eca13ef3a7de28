"""Where the milliseconds of a step go, on made-up kernels."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import profile_step

MS = 1e-3


def test_a_step_of_two_streams() -> None:
    events = [
        ("nvjet_gemm", 0.0, 4 * MS),
        ("nccl_all_gather", 3 * MS, 6 * MS),  # hidden for 1 ms, exposed for 2
        ("triton_fused", 6.01 * MS, 7 * MS),  # a launch's gap of 10 us
        ("nvjet_gemm", 9 * MS, 10 * MS),  # 2 ms with nothing
    ]
    found = profile_step.summarize(events, 12 * MS)
    assert found["by_kind_ms"] == pytest.approx(
        {"communication": 3.0, "matrix products": 5.0, "compiled (triton)": 0.99}
    )
    assert found["exposed_communication_ms"] == pytest.approx(2.0)
    assert found["idle_ms"] == pytest.approx(12 - 8 + 0.01)
    assert found["largest_kernels"]["matrix products"] == [{"name": "nvjet_gemm", "ms": pytest.approx(5.0), "calls": 2}]
    gaps = found["gaps"]
    assert (gaps["number"], gaps["of_launches"]) == (2, 1)
    assert gaps["ms"] == pytest.approx(2.01) and gaps["of_launches_ms"] == pytest.approx(0.01)
    first = gaps["longest"][0]
    assert (first["after"], first["before"]) == ("triton_fused", "nvjet_gemm")
    assert first["ms"] == pytest.approx(2.0) and first["at_ms"] == pytest.approx(7.0)


def test_it_is_told_whole(capsys: pytest.CaptureFixture[str]) -> None:
    profile_step.show(profile_step.summarize([("a", 0.0, MS), ("nccl", 3 * MS, 4 * MS)], 5 * MS))
    text = capsys.readouterr().out
    assert "1 gaps between kernels, 2.0 ms; 0 of them of at most 20 us" in text and "idle" in text


def test_kernels_of_experts_are_apart() -> None:
    names = {
        "_expert_product_kernel": "products of experts",
        "void cutlass::device_kernel<GemmUniversal<cutlass::gemm::GroupProblemShape<...>>>": "products of experts",
        "_expert_combine_kernel": "rows of experts",
        "_expert_rank_kernel": "routing",
        "triton_red_fused__softmax_topk_3": "routing",
        "void at::native::sbtopk::gatherTopK<float, ...>": "routing",
        "nvjet_hsh_128x256": "matrix products",
    }
    assert {name: profile_step.kind_of(name) for name in names} == names


def test_what_lies_between_marks_is_the_head() -> None:
    events = [
        ("nvjet_gemm", 0.0, 1 * MS),
        ("erfinv_kernel_cuda", 1.0 * MS, 1.001 * MS),
        ("nvjet_gemm", 2 * MS, 4 * MS),
        ("nccl_reduce_scatter", 3 * MS, 5 * MS),
        ("erfinv_kernel_cuda", 5 * MS, 5.001 * MS),
        ("nvjet_gemm", 6 * MS, 7 * MS),
    ]
    found = profile_step.summarize(profile_step.name_head(events), 8 * MS)
    assert found["by_kind_ms"] == pytest.approx({"communication": 2.0, "head and loss": 2.0, "matrix products": 2.0})
    assert profile_step.name_head(events[:1]) == events[:1]


def test_no_kernels_at_all() -> None:
    found = profile_step.summarize([], MS)
    assert found["idle_ms"] == pytest.approx(1.0) and found["gaps"]["number"] == 0
