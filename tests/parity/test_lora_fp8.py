"""Adapters over frozen fp8 weights under every layout: the losses and gradients of one process.

To the bounds of fp8 (`tests/parallel/test_delayed_scales.py`): where sums are in another order a number moves by a
place of bf16, and fp8 may then round it to another one of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed import run as on_ranks
from paceline.config.lora import is_adapter
from paceline.training import setup
from tests.parity.test_checkpoints import Link, Went, go
from tests.parity.test_lora import LORA, Speaking
from tests.training.steps import Job, Log, run_jobs

FP8 = (
    "model.hidden_size=32",
    "model.num_heads=2",
    "model.ffn_size=64",
    "model.num_layers=2",
    "train.precision=fp8",
    *LORA,
)
KEPT = ("lora.base=fp8",)
DELAYED = ("train.fp8_scaling=delayed", "train.fp8_amax_history=2", "train.fp8_cast_kernel=triton")
LAYOUTS: dict[int, dict[str, tuple[str, ...]]] = {
    2: {
        "dp, zero 1": ("parallel.zero=1", *KEPT),
        "dp, zero 0, selective": ("parallel.zero=0", "parallel.recompute=selective", *KEPT),
        "dp, uncached": ("parallel.zero=0", "train.fp8_weight_cache=false"),
        "dp, zero 2": ("parallel.zero=2",),
        "dp, zero 3, full": ("parallel.zero=3", "parallel.recompute=full"),
        "pp": ("parallel.pp=2", *KEPT),
        "pp, 1f1b, selective": ("parallel.pp=2", "parallel.pipeline_schedule=1f1b", "parallel.recompute=selective"),
        "cp": ("parallel.cp=2", *KEPT),
        "tp": ("parallel.tp=2", *KEPT),
    },
    4: {"pp, dp": ("parallel.pp=2", "parallel.zero=1", *KEPT)},
}


def _job(*sets: str, steps: int = 3, **more: Any) -> Job:
    return Job(sets=(*FP8, *sets), steps=steps, length=16, **more)


def _run(rank: int, world_size: int, jobs: Sequence[Job]) -> list[Log]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "WeightInit", Speaking)
        return run_jobs(rank, world_size, jobs)


def _go(rank: int, world_size: int, links: Sequence[Link]) -> list[Went]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "WeightInit", Speaking)
        return go(rank, world_size, links)


@pytest.mark.parametrize("scaling", [(), DELAYED], ids=["own scales", "earlier scales"])
def test_layouts_agree(scaling: tuple[str, ...]) -> None:
    (whole,) = on_ranks(_run, 1, [_job(*scaling)])[0]
    assert all(is_adapter(name) for name, gradient in whole.gradients.items() if gradient.any())
    for ranks, layouts in LAYOUTS.items():
        jobs = [_job(*scaling, *sets) for sets in layouts.values()]
        for name, log in zip(layouts, on_ranks(_run, ranks, jobs)[0], strict=True):
            # cp and tp sum in another order: each gradient is then some percent away, losses are not. That nothing is
            # missing there is told in float64 (`test_lora`)
            moved = name in ("cp", "tp")
            loss, count = (1e-3, 2) if moved else (1e-5, 3)
            assert log.losses[:count] == pytest.approx(whole.losses[:count], rel=loss), name
            if not moved:
                assert log.norms == pytest.approx(whole.norms, rel=1e-5), name
                for key, expected in whole.gradients.items():
                    assert float((log.gradients[key] - expected).norm()) <= 1e-4 * float(expected.norm()), (name, key)


def test_a_run_goes_on_bit_by_bit_and_in_another_layout(tmp_path: Path) -> None:
    """Checkpoints of adapters alone hold histories of scales too."""
    job = _job(*DELAYED, *KEPT, steps=2)
    (straight,) = on_ranks(_go, 1, [Link(job=job, folder=tmp_path, then=2)])[0]
    for index, (ranks, sets) in enumerate(((1, ()), (2, ("parallel.pp=2",)), (2, ("parallel.zero=1",)))):
        folder = tmp_path / str(index)
        folder.mkdir()
        (folder / "step_00000002").symlink_to(tmp_path / "step_00000002")
        (went,) = on_ranks(_go, ranks, [Link(job=replace(job, sets=(*job.sets, *sets)), folder=folder)])[0]
        assert went.differences == [], sets
        assert torch.tensor(went.losses).isfinite().all()
        assert went.losses == (straight.losses[2:] if ranks == 1 else pytest.approx(straight.losses[2:], rel=1e-3))
