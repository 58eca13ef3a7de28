"""Options and public problems on several axes at once: fp32, accumulation, dropout, numbers that are not finite.

Exact parity in float64 is in `test_layouts.py`; cases of other rooms are told by their tests (65 and 66 in
`tests/parallel/test_spread.py`, 67 and 73 in `tests/parallel/test_tensor.py`, 74 in `tests/optim`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from distributed import run as on_ranks
from paceline.config.load import resolve
from paceline.runtime.process import ProcessInfo
from paceline.training.nonfinite import explain_nonfinite
from paceline.training.setup import build_parts
from tests.parity.layouts import EXACT, Layout, error, layout, worst
from tests.training.steps import Job, config_of, global_batch, part, run_jobs

SINGLE = 1e-5
"""Relative error in fp32."""
ALONE = Layout(ranks=1, sets=())
SECONDS = 400.0


# ---- fp32

IN_SINGLE = {
    "llama": (
        layout(4, "tp=2 pp=2"),
        layout(4, "tp=2 cp=2"),
        layout(4, "tp=2 zero=3"),
        layout(2, "pp=2 pipeline_schedule=zbv stages_per_rank=2"),
    ),
    "moe": (layout(4, "ep=2 tp=2"), layout(2, "ep=2 zero=3 recompute=selective")),
}


def test_layouts_agree_in_fp32() -> None:
    """Loss, global norm, and the gradient of every parameter of the first step. Cases 65 and 73."""
    models = list(IN_SINGLE)
    (alone,) = on_ranks(run_jobs, 1, [_in_single(ALONE, model) for model in models], timeout_seconds=SECONDS)
    for ranks in (2, 4):
        jobs = [(model, item) for model in models for item in IN_SINGLE[model] if item.ranks == ranks]
        found = on_ranks(run_jobs, ranks, [_in_single(item, model) for model, item in jobs], timeout_seconds=SECONDS)
        for index, (model, item) in enumerate(jobs):
            expected = alone[models.index(model)]
            for logs in found:
                assert logs[index].losses == pytest.approx(expected.losses, rel=SINGLE), (model, item)
                assert logs[index].norms == pytest.approx(expected.norms, rel=SINGLE), (model, item)
                assert logs[index].norms == found[0][index].norms, "all ranks clip alike, to the bit"
                for name, gradient in expected.gradients.items():
                    # a bias of keys gets a sum of rounding errors, whose size means nothing
                    if float(gradient.norm()) > 1e-6 * expected.norms[0]:
                        assert error(logs[index].gradients[name], gradient) <= SINGLE, (model, item, name)


def _in_single(item: Layout, model: str) -> Job:
    return item.job(model, dtype=torch.float32, steps=1)


# ---- accumulation


def test_micro_batches_add_up_on_every_axis() -> None:
    """The same eight sequences in micro-batches of 1, 2 and 4, labels masked unevenly; router losses too (case 70)."""
    layouts = (layout(4, "tp=2 pp=2"), layout(4, "cp=2 ep=2 pp=2"), layout(4, "tp=2 zero=3"))
    jobs = [item.job("moe", micro=micro) for item in layouts for micro in (1, 2, 4)]
    (alone,) = on_ranks(run_jobs, 1, [ALONE.job("moe", micro=8)], timeout_seconds=SECONDS)
    for log in on_ranks(run_jobs, 4, jobs, timeout_seconds=SECONDS)[0]:
        errors = worst(log, alone[0])
        assert max(errors.values()) <= EXACT, errors


def test_router_losses_alone_do_not_depend_on_the_layout() -> None:
    """Case 70: no main loss, coefficient 1. The gradient is there, and that of one process, whatever the axis."""
    large = ("model.moe.aux_loss_coef=1.0", "model.moe.layer_period=1", "model.moe.layer_offset=0")
    (alone,) = on_ranks(run_jobs, 1, [ALONE.job("moe", *large, micro=8, task="router")], timeout_seconds=SECONDS)
    routers = [name for name in alone[0].gradients if name.endswith("router.weight")]
    assert len(routers) == 4 and all(float(alone[0].gradients[name].norm()) > 1e-3 for name in routers)
    texts = ("pp=2", "cp=2", "tp=2", "dp_shard=2", "ep=2 zero=3", "pp=2 pipeline_schedule=zbv stages_per_rank=2")
    jobs = [layout(2, text).job("moe", *large, micro=2, task="router") for text in texts]
    for text, log in zip(texts, on_ranks(run_jobs, 2, jobs, timeout_seconds=SECONDS)[0], strict=True):
        errors = worst(log, alone[0])
        assert max(errors.values()) <= EXACT, (text, errors)


# ---- dropout (case 72)

DROPPED = ("model.dropout=0.3", "model.attention_dropout=0.2", "optim.grad_clip=0")
DROPOUT_LAYOUTS = {
    2: ("tp=2", "cp=2", "cp=2 cp_method=ulysses", "pp=2", "dp_shard=2", "dp_shard=2 zero=3"),
    4: ("tp=2 pp=2", "tp=2 cp=2"),
}
SEEDS = 16


def test_recomputing_draws_the_same_dropout_on_every_axis() -> None:
    """Gradients with everything computed again are those with nothing computed again, to the bit."""
    for ranks, texts in DROPOUT_LAYOUTS.items():
        jobs = [
            layout(ranks, f"{text} recompute={mode}").job("llama", *DROPPED, dtype=torch.float32, steps=1)
            for text in texts
            for mode in ("none", "full", "selective")
        ]
        logs = on_ranks(run_jobs, ranks, jobs, timeout_seconds=SECONDS)[0]
        for index, text in enumerate(texts):
            none, *others = logs[3 * index : 3 * index + 3]
            for log in others:
                assert log.losses == none.losses, text
                assert all(torch.equal(log.gradients[name], value) for name, value in none.gradients.items()), text


def test_dropout_has_the_same_statistics_on_every_axis() -> None:
    """Masks depend on the layout, so losses cannot be equal; their mean over seeds is.

    Each loss is that of fresh weights of one kind on the same batch, so seeds differ in masks alone. The band is four
    standard errors of the difference of the two means: it is left by chance once in 16000, and the seeds are fixed.
    """
    expected = _losses_over_seeds(1, [""])[""]
    assert expected.std() > 1e-4, "dropout does something"
    for ranks in (2, 4):
        for text, losses in _losses_over_seeds(ranks, DROPOUT_LAYOUTS[ranks]).items():
            band = 4 * math.sqrt(float(losses.var() + expected.var()) / SEEDS)
            assert abs(float(losses.mean() - expected.mean())) <= band, (text, losses.mean(), expected.mean(), band)
            assert 0.3 < float(losses.std() / expected.std()) < 3, (text, losses.std(), expected.std())


def _losses_over_seeds(ranks: int, texts: Sequence[str]) -> dict[str, torch.Tensor]:
    jobs = [layout(ranks, text).job("llama", *DROPPED, micro=4, masks="none", dtype=torch.float32) for text in texts]
    found = on_ranks(step_losses, ranks, jobs, SEEDS, timeout_seconds=SECONDS)[0]
    return dict(zip(texts, found, strict=True))


def step_losses(rank: int, world_size: int, jobs: Sequence[Job], steps: int) -> list[torch.Tensor]:
    """The mean loss of one batch with the dropout of so many steps, without any update."""
    found = []
    for job in jobs:
        config = config_of(job)
        info = ProcessInfo(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size)
        parts = build_parts(config, resolve({}).registry, info, torch.device("cpu"))
        parts.step.train()
        batch = global_batch(1, job.masks, job.length, config.model.vocab_size)
        batches = part(batch, job.micro, parts.mesh.dp_rank, parts.mesh.dp_size)
        losses = torch.zeros(steps, dtype=torch.float64)
        for number in range(1, steps + 1):
            mine = parts.step.rerun(number, batches)
            parts.engine.zero_gradients()
            # tensor-parallel ranks hold the same loss
            losses[number - 1] = sum(float(loss) for loss in mine) / parts.mesh.size("tp")
        dist.all_reduce(losses)
        found.append(losses / batch.num_tokens())
    return found


class _FirstDropout:
    """What the dropout after the embedding left of the residual stream, on this rank."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def __call__(self, module: torch.nn.Module, inputs: object, output: torch.Tensor) -> None:
        self.kept.append(output.detach() != 0)


def masks_of_ranks(rank: int, world_size: int, job: Job) -> list[torch.Tensor]:
    """Of each micro-batch in two steps: which of the first stage's activations were kept."""
    config = config_of(job)
    info = ProcessInfo(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size)
    parts = build_parts(config, resolve({}).registry, info, torch.device("cpu"))
    parts.step.train()
    watch = _FirstDropout()
    for stage in parts.stages:
        if stage.embed is not None:
            stage.embed.register_forward_hook(watch)
    batch = global_batch(1, "none", job.length, config.model.vocab_size)
    for number in (1, 2, 1):
        parts.step.rerun(number, part(batch, job.micro, parts.mesh.dp_rank, parts.mesh.dp_size))
        parts.engine.zero_gradients()
    return watch.kept


@pytest.mark.parametrize("axis", ["tp", "cp", "dp_shard"])
def test_no_two_ranks_steps_or_micro_batches_drop_alike(axis: str) -> None:
    """Every activation that dropout sees is another one on each rank; a step that runs again drops the same."""
    found = on_ranks(masks_of_ranks, 2, layout(2, f"{axis}=2").job("llama", *DROPPED, micro=2, dtype=torch.float32))
    masks = []
    for kept in found:
        third = len(kept) // 3
        assert all(torch.equal(first, again) for first, again in zip(kept[:third], kept[2 * third :], strict=True))
        masks += kept[: 2 * third]
    assert all(0.6 < float(mask.float().mean()) < 0.8 for mask in masks), "dropout of 0.3 keeps 0.7"
    for index, first in enumerate(masks):
        for second in masks[:index]:
            # independent masks of 0.7 agree in 0.7 * 0.7 + 0.3 * 0.3 of the places
            assert float((first == second).float().mean()) == pytest.approx(0.58, abs=0.08)


# ---- numbers that are not finite (case 71)

SPOILED = "blocks.0.attention.q_proj.weight"

Spoiled = tuple[list[bool], bool, list[float], str]


def nan_in_a_gradient(rank: int, world_size: int, job: Job) -> Spoiled:
    """Three steps, of which rank 1 spoils a gradient in the second.

    Returns which were finite, whether the second changed nothing, the norms of the others, and the diagnosis that
    `train.on_nonfinite = "stop"` gives.
    """
    config = config_of(job)
    info = ProcessInfo(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size)
    parts = build_parts(config, resolve({}).registry, info, torch.device("cpu"))
    parts.step.train()
    step = 0
    if rank == 1:
        spoiled = parts.stages[0].get_parameter(SPOILED)
        spoiled.register_hook(lambda gradient: gradient * (torch.nan if step == 2 else 1.0))

    def state() -> list[torch.Tensor]:
        parts.engine.wait_for_weights()
        kept = [p.detach().clone() for stage in parts.stages for p in stage.parameters()]
        kept += [p.param.detach().clone() for p in parts.engine.main_parameters()]
        moments = [piece.tensor for value in parts.optimizer.state().values() for piece in value.pieces]
        return kept + [moment.detach().clone() for moment in moments]

    finite, norms, before, unchanged, text = [], [], state(), False, ""
    for step in (1, 2, 3):
        batch = global_batch(step, job.masks, job.length, config.model.vocab_size)
        batches = part(batch, job.micro, parts.mesh.dp_rank, parts.mesh.dp_size)
        outcome = parts.step.run(step, batches)
        finite.append(bool(outcome.finite))
        norms.append(float(outcome.grad_norm))
        after = state()
        if step == 2:
            unchanged = all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
            text = str(explain_nonfinite(step, 1, batches, parts.step, parts.mesh))
        else:
            assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
        before = after
    return finite, unchanged, [norms[0], norms[2]], text


@pytest.mark.parametrize("clip", ["0", "0.5"])
@pytest.mark.parametrize("text", ["tp=2 pp=2", "pp=2 cp=2", "ep=2 tp=2"])
def test_all_ranks_skip_a_step_that_one_rank_spoils(text: str, clip: str) -> None:
    job = layout(4, text).job("moe", f"optim.grad_clip={clip}", dtype=torch.float32)
    for finite, unchanged, norms, diagnosis in on_ranks(nan_in_a_gradient, 4, job, timeout_seconds=SECONDS):
        assert finite == [True, False, True] and unchanged
        assert all(math.isfinite(norm) and norm > 0 for norm in norms)
        assert diagnosis.startswith("step 2") and "rank 1 of 4" in diagnosis and SPOILED in diagnosis, diagnosis
        assert not any(f"rank {rank}" in diagnosis for rank in (0, 2, 3)), diagnosis
