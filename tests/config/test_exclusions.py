"""Which options exclude each other? Each row of the table is met, told with both values, mended by either way."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paceline.config.exclusions import EXCLUSIONS
from paceline.report.finding import Finding

CASES = {
    "config.muon-tp": ("optim.name=muon", "parallel.tp=2"),
    "config.muon-etp": ("optim.name=muon", "parallel.etp=2", "model.num_experts=4", "model.top_k=2"),
    "config.mtp-cp": ("model.mtp_layers=1", "parallel.cp=2"),
    "config.split-backward-compile": (
        "parallel.pipeline_schedule=zero_bubble",
        "parallel.compile=true",
        "parallel.pp=2",
    ),
    "config.split-backward-fsdp": ("parallel.pipeline_schedule=zero_bubble", "parallel.zero=2", "parallel.pp=2"),
    "config.accumulate-dtype": ("parallel.accumulate_dtype=bf16", "parallel.zero=2"),
    "config.offload-8bit": ("optim.name=adamw8bit", "parallel.offload=optimizer"),
    "config.fp8-split-backward": ("train.precision=fp8", "parallel.pipeline_schedule=zero_bubble", "parallel.pp=2"),
    "config.gathered-plain-experts": (
        "parallel.expert_dispatch=all_gather",
        "parallel.ep=2",
        "model.num_experts=4",
        "model.top_k=2",
    ),
    "config.fp8-experts-etp": (
        "train.precision=fp8",
        "train.fp8_experts=true",
        "parallel.expert_kernels=grouped",
        "parallel.etp=2",
        "model.num_experts=4",
        "model.top_k=2",
    ),
    "config.fp8-weights-only-uncached": (
        "train.precision=fp8",
        "train.fp8_weights_only=true",
        "train.fp8_weight_cache=false",
    ),
    "config.lora-muon": ("lora.rank=4", "optim.name=muon"),
    "config.lora-base-fsdp": ("lora.rank=4", "lora.base=nf4", "parallel.zero=3"),
    "config.lora-base-offload": ("lora.rank=4", "lora.base=nf4", "parallel.offload=optimizer"),
    "config.lora-fp8": ("lora.rank=4", "lora.base=fp8"),
    "config.lora-fp8-cache": (
        "lora.rank=4",
        "lora.base=fp8",
        "train.precision=fp8",
        "train.fp8_weight_cache=false",
    ),
    "config.lora-nf4-compile": ("lora.rank=4", "lora.base=nf4", "parallel.compile=true"),
    "config.lora-nf4-split-backward": (
        "lora.rank=4",
        "lora.base=nf4",
        "parallel.pipeline_schedule=zero_bubble",
        "parallel.pp=2",
    ),
    "config.lora-nf4-fp8": ("lora.rank=4", "lora.base=nf4", "train.precision=fp8"),
    "config.fp8-offload": ("train.precision=fp8", "parallel.offload=optimizer"),
}


def test_every_row_is_tried() -> None:
    assert {row.id for row in EXCLUSIONS} == set(CASES)


@pytest.mark.parametrize("id_", CASES)
def test_a_pair_is_refused_and_each_way_out_works(findings: Callable[..., list[Finding]], id_: str) -> None:
    (row,) = (row for row in EXCLUSIONS if row.id == id_)
    # beside errors there may be what is said of any recipe with adapters
    (refused,) = (finding for finding in findings(4, *CASES[id_]) if finding.severity == "error")
    assert refused.id == id_
    assert all(option.key in refused.subject and option.off in refused.next_step for option in row.options)
    assert refused.evidence == row.because
    assert ("Nearest layouts" in refused.next_step) == row.of_layout
    for option in row.options:
        if not option.off.endswith("instead"):
            key, _, value = option.off.partition(" = ")
            left = [finding for finding in findings(4, *CASES[id_], f"{key}={value}") if finding.severity == "error"]
            assert left == []


@pytest.mark.parametrize(
    ("texts", "ways"),
    [
        (
            ("parallel.pp=2", "parallel.pipeline_schedule=zbv", "parallel.stages_per_rank=2", "parallel.zero=3"),
            ("parallel.pipeline_schedule=1f1b parallel.stages_per_rank=1", "parallel.zero=1"),
        ),
        (
            ("parallel.accumulate_dtype=bf16", "parallel.zero=3", "parallel.offload=parameters"),
            ("parallel.accumulate_dtype=fp32", "parallel.zero=1 parallel.offload=optimizer"),
        ),
    ],
)
def test_a_way_out_names_what_must_change_with_it(
    findings: Callable[..., list[Finding]], texts: tuple[str, ...], ways: tuple[str, ...]
) -> None:
    (refused,) = findings(4, *texts)
    told = refused.next_step.replace(" = ", "=").replace("'", "").replace(" with ", " ")
    for way in ways:
        assert way in told
        assert not [finding for finding in findings(4, *texts, *way.split()) if finding.severity == "error"]
