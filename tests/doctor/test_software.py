"""Pairs of versions that do not agree are named; what is not known is not judged."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config.load import resolve
from paceline.doctor.software import Software, _cudnn, judge_software, read_software, software_table
from paceline.report.finding import Finding

GOOD: dict[str, Any] = {
    "driver": "580.82.07", "driver_cuda": "13.0", "torch": "2.11.0+cu130", "cuda": "13.0", "nccl": "2.28.9",
    "cudnn": "9.19.0",
    "packages": {"triton": "3.6.0", "nvidia-nccl-cu13": "2.28.9"},
    "wanted": {"triton": "3.6.0", "nvidia-nccl-cu13": "2.28.9"},
    "capability": (9, 0), "flash_attention_4": True, "compiler": True,
}  # fmt: skip


def found(gpus: int = 8, recipe: dict[str, Any] | None = None, **change: Any) -> dict[str, Finding]:
    config = resolve({"model": {"preset": "llama3_8b"}, **recipe}).config if recipe is not None else None
    return {one.id: one for one in judge_software(Software(**{**GOOD, **change}), config=config, gpus=gpus)}


def test_versions_that_agree() -> None:
    assert found() == {}


@pytest.mark.parametrize(
    ("change", "id", "severity", "says"),
    [
        ({"torch": ""}, "software.no-torch", "error", "not installed"),
        ({"torch": "2.11.0+cpu", "cuda": ""}, "software.cpu-build", "error", "8 GPUs"),
        ({"driver": "550.54.15", "driver_cuda": "12.4"}, "software.driver", "error", "driver 550.54.15"),
        ({"cuda": "12.8", "driver": "535.104.05", "driver_cuda": "12.2"}, "software.driver-minor", "note", "12.2"),
        ({"driver": "", "driver_cuda": ""}, "software.no-driver", "note", "not determined"),
        ({"cuda": "12.6", "capability": (10, 0)}, "software.architecture", "error", "sm_100"),
        ({"capability": (7, 0)}, "software.architecture", "error", "sm_70"),
        ({"packages": {"triton": "3.4.0"}}, "software.pin", "warning", "triton 3.4.0"),
        ({"nccl": "2.21.5"}, "software.nccl", "warning", "2.21.5"),
        ({"packages": {"triton": "3.6.0", "nvidia-nccl-cu12": "2.28.9", "nvidia-nccl-cu13": "2.28.9"}},
         "software.two-nccls", "warning", "nvidia-nccl-cu12"),
        ({"packages": {}}, "software.triton", "warning", "Triton"),
        ({"compiler": False}, "software.compiler", "error", "C compiler"),
        ({"flash_attention_4": False}, "software.flash-attention-4", "note", "FlashAttention-4"),
        ({"capability": (8, 0)}, "software.fp8", "note", "sm_80"),
        ({"capability": (7, 5)}, "software.bf16", "warning", "sm_75"),
    ],
)  # fmt: skip
def test_each_pair(change: dict[str, Any], id: str, severity: str, says: str) -> None:
    findings = found(**change)
    assert findings[id].severity == severity and says in findings[id].subject


def test_what_the_recipe_asks_for() -> None:
    fp8 = found(recipe={"train": {"seq_len": 4096, "precision": "fp8"}}, capability=(8, 0))
    assert fp8["software.fp8"].severity == "error" and "train.precision=bf16" in fp8["software.fp8"].next_step
    compiled = {"train": {"seq_len": 4096}, "parallel": {"compile": True}}
    assert found(recipe=compiled, packages={})["software.triton"].severity == "error"
    flash = {"train": {"seq_len": 4096, "attention_kernel": "flash4"}}
    assert found(recipe=flash, flash_attention_4=False)["software.flash-attention-4"].severity == "warning"


def test_nothing_is_known() -> None:
    assert judge_software(Software(torch="2.13.0"), gpus=0) == []


def test_this_python() -> None:
    here = read_software({"torch": "2.11.0", "cuda": "13.0", "cudnn": "91900"}, driver="580.1.1")
    assert (here.cuda, here.cudnn, here.driver) == ("13.0", "9.19.0", "580.1.1")
    assert read_software().torch
    assert _cudnn("8907") == "8.9.7"
    assert dict(software_table(here).rows)["cuDNN"] == "9.19.0"
