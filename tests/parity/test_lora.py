"""Adapters under every layout give the result of one process, in float64 to 1e-9; the base stays as it was."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from distributed import run as on_ranks
from paceline.config.lora import is_adapter
from paceline.models.init import WeightInit, _fill
from paceline.training import setup
from tests.parity.layouts import EXACT, MODELS, Layout, layout, worst
from tests.training.steps import Job, Log, run_jobs

LORA = ("lora.rank=3", "lora.alpha=5")
KINDS: dict[str, tuple[str, ...]] = {
    "lora": LORA,
    "dora": (*LORA, "lora.dora=true"),
    "some": (*LORA, 'lora.targets=["q_proj", "o_proj", "up_proj"]', "lora.use_rslora=true"),
}
LATENT = (
    "model.attention=mla",
    "model.kv_lora_rank=8",
    "model.q_lora_rank=6",
    "model.qk_nope_head_dim=4",
    "model.qk_rope_head_dim=4",
    "model.v_head_dim=4",
)
TWO = (
    layout(2, "tp=2"),
    layout(2, "pp=2 pipeline_schedule=zero_bubble"),
    layout(2, "pp=2 zero=2"),
    layout(2, "cp=2"),
    layout(2, "zero=0 fused_weight_gradients=true"),
    layout(2, "zero=1 recompute=full"),
    layout(2, "zero=2"),
    layout(2, "zero=3 recompute=selective"),
)
FOUR = (
    layout(4, "tp=2 pp=2 recompute=full"),
    layout(4, "tp=2 zero=3"),
)


class Speaking(WeightInit):
    """Second matrices that are not 0: otherwise the first step would see no gradient of the first ones."""

    def __call__(self, name: str, value: Tensor, whole: Sequence[int], offsets: Sequence[int]) -> None:
        if not name.endswith("lora_b"):
            return super().__call__(name, value, whole, offsets)
        return _fill(value, whole, offsets, 0.2, name)


def jobs_of(item: Layout, **options: object) -> list[Job]:
    options = {"steps": 2} | options
    kinds = [("llama", "lora"), ("gpt", "dora"), ("moe", "some")]
    jobs = [item.job(model, *KINDS[kind], **options) for model, kind in kinds]
    return [*jobs, item.job("llama", *LATENT, "model.qk_norm=false", *LORA, **options)]


def run(rank: int, world_size: int, jobs: Sequence[Job]) -> list[Log]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "WeightInit", Speaking)
        return run_jobs(rank, world_size, jobs)


@pytest.fixture(scope="module")
def one_process() -> list[Log]:
    (logs,) = on_ranks(run, 1, jobs_of(Layout(ranks=1, sets=()), micro=1))
    return logs


@pytest.mark.parametrize(("layouts", "models"), [(TWO, 4), (FOUR, 2)], ids=["2 ranks", "4 ranks"])
def test_equals_one_process(layouts: tuple[Layout, ...], models: int, one_process: list[Log]) -> None:
    jobs = [job for item in layouts for job in jobs_of(item)[:models]]
    (found, *_) = on_ranks(run, layouts[0].ranks, jobs, timeout_seconds=300)
    failures = []
    for index, logs in enumerate(found):
        errors = worst(logs, one_process[index % models])
        bad = {name: f"{value:.1e}" for name, value in errors.items() if not value <= EXACT}
        if bad:
            failures.append(f"{jobs[index].sets[-9:]}: {bad}")
    assert not failures, "\n" + "\n".join(failures)


def test_only_adapters_move(one_process: list[Log]) -> None:
    log = one_process[0]
    gradients = {name for name, value in log.gradients.items() if value.any()}
    assert gradients and all(is_adapter(name) for name in gradients)
    assert log.losses[-1] is not None and torch.isfinite(torch.tensor(log.losses[-1]))
    assert "llama" in MODELS
