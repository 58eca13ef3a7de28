"""Every schedule gives the losses and gradients of one process, with the memory that `costs/pipeline.py` promises."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from distributed import run
from paceline.config.model import ModelConfig, MoEConfig
from paceline.config.parallel import ParallelConfig
from paceline.costs.pipeline import peak_in_flight, schedule
from paceline.kernels.attention import attention_core
from paceline.kernels.cross_entropy import ChunkedHeadLoss, PlainHeadLoss
from paceline.models.transformer import ModelOutput, Transformer
from paceline.parallel.channels import communicators, sent_between_ranks
from paceline.parallel.mesh import ParallelMesh
from paceline.parallel.pipeline import HOST_RUNS, Forwarded, Pipeline
from paceline.parallel.recompute import recompute
from paceline.parallel.stages import split_into_stages

B, T = 2, 6


class Case(NamedTuple):
    model: str
    schedule: str
    stages_per_rank: int
    micro_batches: int
    recompute: Any = "none"
    chunked: bool = False


def model_config(kind: str) -> ModelConfig:
    moe: dict[str, Any] = {}
    if "moe" in kind:
        routing = MoEConfig(layer_period=2, layer_offset=1, aux_loss_coef=0.1, z_loss_coef=0.01, ffn_size=8)
        moe = {"num_experts": 4, "top_k": 2, "moe": routing}
    return ModelConfig(
        vocab_size=37,
        num_layers=8,
        hidden_size=16,
        num_heads=4,
        num_kv_heads=2,
        ffn_size=24,
        max_seq_len=8,
        init_std=0.2,
        tie_embeddings="tied" in kind.split("-"),
        mtp_layers=1 if "mtp" in kind else 0,
        qkv_bias="bias" in kind,
        **moe,
    )


def plain_model(case: Case) -> Transformer:
    core = attention_core("reference")
    loss = ChunkedHeadLoss(chunk_tokens=5) if case.chunked else PlainHeadLoss()
    model = Transformer(model_config(case.model), dtype=torch.float64, device="cpu", core=core, head_loss=loss)
    model.init_weights(7)
    return model


def batch(micro_batch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + micro_batch)
    tokens, labels = (torch.randint(37, (B, T), generator=generator) for _ in range(2))
    labels[0, : micro_batch % 4] = -100
    return tokens, labels


def loss_of(output: ModelOutput, micro_batches: int) -> Tensor | None:
    """Divided by counts of the whole step, as the training step does."""
    tokens = sum(int((batch(k)[1] != -100).sum()) for k in range(micro_batches))
    loss = None if output.loss_sum is None else output.loss_sum / tokens
    if output.aux_loss is not None:
        aux = output.aux_loss / (B * micro_batches)
        loss = aux if loss is None else loss + aux
    return loss


@cache
def reference(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    model = plain_model(case)
    losses = []
    for k in range(case.micro_batches):
        loss = loss_of(model(*batch(k)), case.micro_batches)
        assert loss is not None
        loss.backward()
        losses.append(loss.item())
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


class WatchingEngine:
    """Leaves gradients where they are, and holds the pipeline to the contract of `Engine.accumulate`."""

    def __init__(self, stages: tuple[Transformer, ...]) -> None:
        self.stages = stages
        self.lasts: list[int] = []
        self._inside: int | None = None
        for index, stage in enumerate(stages):
            for parameter in stage.parameters():
                # an embedding that two stages share gets gradients from both
                owners = {i for i, other in enumerate(stages) if any(parameter is p for p in other.parameters())}
                if min(owners) == index:
                    parameter.register_post_accumulate_grad_hook(lambda p, owners=owners: self._arrival(owners))

    def _arrival(self, owners: set[int]) -> None:
        assert self._inside in owners, "a gradient arrived outside of its stage's turn"

    @contextmanager
    def accumulate(self, last: bool, stage: int = 0) -> Iterator[None]:
        assert stage not in self.lasts, "the stage had its last backward"
        self._inside = stage
        yield
        self._inside = None
        if last:
            self.lasts.append(stage)


class Mark(torch.autograd.Function):
    """Identity that is alive as long as the graph it is in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alive: Any) -> Tensor:
        ctx.token = _Token()
        alive.add(ctx.token)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Token:
    pass


def cut_evenly(layers: int, stages: int) -> tuple[range, ...]:
    edges = [layers * stage // stages for stage in range(stages + 1)]
    return tuple(range(start, end) for start, end in pairwise(edges))


def run_cases(rank: int, world_size: int, cases: list[Case]) -> list[dict[str, Any]]:
    return [run_case(rank, world_size, case) for case in cases]


def run_case(rank: int, world_size: int, case: Case) -> dict[str, Any]:
    config = ParallelConfig(pp=world_size, pipeline_schedule=case.schedule, stages_per_rank=case.stages_per_rank)
    mesh = ParallelMesh(config, world_size=world_size, rank=rank, device_type="cpu")
    model = plain_model(case)
    stages = split_into_stages(model, config, mesh, cut_evenly(8, world_size * case.stages_per_rank))
    for stage in stages:
        recompute(list(stage.blocks.values()), case.recompute)
    engine = WatchingEngine(stages)
    pipeline = Pipeline(stages, engine, mesh, config)  # type: ignore[arg-type]
    alive: weakref.WeakSet[_Token] = weakref.WeakSet()
    peak_alive, losses = 0, [0.0] * case.micro_batches

    def forward(stage: int, k: int, hidden: Tensor | None) -> Forwarded:
        nonlocal peak_alive
        output = stages[stage](*batch(k), hidden=hidden)
        loss = loss_of(output, case.micro_batches)
        losses[k] += 0.0 if loss is None else loss.item()
        if torch.is_grad_enabled():
            if output.hidden is not None:
                output = output._replace(hidden=Mark.apply(output.hidden, alive))
            elif loss is not None:
                loss = Mark.apply(loss, alive)
        peak_alive = max(peak_alive, len(alive))
        return Forwarded(output.hidden, loss)

    shape = torch.Size((B, T, 16))
    pipeline.train(case.micro_batches, shape, torch.float64, forward)
    assert sorted(engine.lasts) == list(range(len(stages)))
    assert not alive, "a graph outlived the step"
    trained = list(losses)
    gradients = {n: p.grad for stage in stages for n, p in stage.named_parameters() if p.grad is not None}
    traffic = mesh.traffic.take()
    losses[:] = [0.0] * case.micro_batches
    pipeline.evaluate(case.micro_batches, shape, torch.float64, forward)
    return {
        "losses": trained,
        "evaluated": losses,
        "gradients": {name: gradient.clone() for name, gradient in gradients.items()},
        "peak": pipeline.peak_in_flight,
        "peak_alive": peak_alive,
        "traffic": traffic,
    }


def check(world_size: int, cases: list[Case]) -> float:
    """Worst relative error of a gradient."""
    worst = 0.0
    by_rank = run(run_cases, world_size, cases, timeout_seconds=120.0)
    for index, case in enumerate(cases):
        results = [results[index] for results in by_rank]
        losses, gradients = reference(case._replace(schedule="", stages_per_rank=1, recompute="none"))
        for kind in ("losses", "evaluated"):
            together = [sum(column) for column in zip(*(result[kind] for result in results), strict=True)]
            assert together == pytest.approx(losses, rel=1e-12), case
        found: dict[str, Tensor] = {}
        for result in results:
            for name, gradient in result["gradients"].items():
                found[name] = found[name] + gradient if name in found else gradient
        assert found.keys() == gradients.keys(), case
        for name, expected in gradients.items():
            error = ((found[name] - expected).norm() / expected.norm()).item()
            assert error <= 1e-9, (case, name, error)
            worst = max(worst, error)
        _check_memory(world_size, case, results)
    return worst


def _check_memory(world_size: int, case: Case, results: list[dict[str, Any]]) -> None:
    lists = schedule(case.schedule, world_size, case.stages_per_rank, case.micro_batches)
    for rank, (actions, result) in enumerate(zip(lists, results, strict=True)):
        promised = peak_in_flight(actions)
        assert result["peak"] == promised, (case, rank)
        if any(action.kind == "W" for action in actions):
            assert result["peak_alive"] <= promised  # graphs go with I already
        else:
            assert result["peak_alive"] == promised, (case, rank)
        sent = [each.message.way for each in sent_between_ranks(lists) if each.channel[0] == rank]
        for way in ("forward", "backward"):
            if sent.count(way):
                assert result["traffic"][f"pp/{way}/send"] == (sent.count(way), sent.count(way) * B * T * 16 * 8)


MODELS = ("untied", "tied", "tied-moe", "mtp-moe", "bias")

ON_TWO = [
    *(Case(model, "1f1b", 1, m) for model, m in zip(MODELS, (1, 2, 3, 4, 5), strict=True)),
    *(
        Case(model, "interleaved_1f1b", v, m)
        for model, v, m in zip(MODELS, (2, 3, 2, 4, 2), (1, 3, 4, 5, 6), strict=True)
    ),
    *(Case(model, "zero_bubble", v, m) for model, v, m in zip(MODELS, (1, 1, 1, 2, 3), (1, 2, 5, 4, 3), strict=True)),
    *(Case(model, "zbv", 2, m) for model, m in zip(MODELS, (1, 2, 3, 4, 6), strict=True)),
    *(Case("tied-moe", name, v, 3, "full") for name, v in (("1f1b", 1), ("zero_bubble", 1), ("zbv", 2))),
    Case("untied", "zero_bubble", 1, 3, "selective"),
    *(Case("tied", name, v, 4, "none", True) for name, v in (("1f1b", 1), ("zero_bubble", 1), ("zbv", 2))),
]
ON_FOUR = [
    Case("untied", "1f1b", 1, 2),
    Case("tied-moe", "1f1b", 1, 9),
    Case("mtp-moe", "interleaved_1f1b", 2, 3),
    Case("tied", "interleaved_1f1b", 2, 8, "full"),
    Case("bias", "interleaved_1f1b", 2, 10),
    Case("tied-moe", "zero_bubble", 1, 8),
    Case("untied", "zero_bubble", 2, 5, "full"),
    Case("tied-moe", "zbv", 2, 9),
    Case("mtp-moe", "zbv", 2, 3, "full"),
]


def test_two_ranks_give_the_gradients_of_one_process() -> None:
    check(2, ON_TWO)


def test_four_ranks_give_the_gradients_of_one_process() -> None:
    check(4, ON_FOUR)


def test_three_ranks_close_a_loop() -> None:
    """An odd loop needs more communicators than a chain."""
    check(3, [Case("tied", "interleaved_1f1b", 2, 4), Case("moe", "zero_bubble", 2, 4)])


def test_without_pipeline_parallelism_it_is_the_plain_loop() -> None:
    check(1, [Case("tied-moe", "1f1b", 1, 3), Case("untied", "zbv", 2, 3), Case("tied", "interleaved_1f1b", 2, 3)])


def nan_case(rank: int, world_size: int) -> list[bool]:
    case = Case("untied", "1f1b", 1, 2)
    config = ParallelConfig(pp=world_size)
    mesh = ParallelMesh(config, world_size=world_size, rank=rank, device_type="cpu")
    stages = split_into_stages(plain_model(case), config, mesh, cut_evenly(8, world_size))
    pipeline = Pipeline(stages, WatchingEngine(stages), mesh, config)  # type: ignore[arg-type]

    def forward(stage: int, k: int, hidden: Tensor | None) -> Forwarded:
        output = stages[stage](*batch(k), hidden=hidden)
        loss = loss_of(output, 2)
        # a constant that no gradient passes
        return Forwarded(output.hidden, None if loss is None else loss + (float("inf") if k == 1 else 0.0))

    pipeline.train(2, torch.Size((B, T, 16)), torch.float64, forward)
    return [bool(p.grad.isnan().any()) for stage in stages for p in stage.parameters() if p.grad is not None]


def test_a_loss_that_is_not_finite_makes_every_gradient_nan_on_all_ranks() -> None:
    for flags in run(nan_case, 2):
        assert flags and all(flags)


def way_case(rank: int, world_size: int) -> tuple[list[bool], list[bool]]:
    case = Case("untied", "1f1b", 1, 2)
    config = ParallelConfig(pp=world_size)
    mesh = ParallelMesh(config, world_size=world_size, rank=rank, device_type="cpu")
    stages = split_into_stages(plain_model(case), config, mesh, cut_evenly(8, world_size))
    engine = WatchingEngine(stages)
    pipeline = Pipeline(stages, engine, mesh, config)  # type: ignore[arg-type]
    found: list[bool] = []
    begin = pipeline._links.begin

    def watched(*args: Any, through_host: bool) -> Any:
        found.append(through_host)
        return begin(*args, through_host=through_host)

    pipeline._links.begin = watched  # type: ignore[assignment]

    def forward(stage: int, k: int, hidden: Tensor | None) -> Forwarded:
        output = stages[stage](*batch(k), hidden=hidden)
        return Forwarded(output.hidden, None)

    for _ in range(HOST_RUNS + 2):
        pipeline.evaluate(2, torch.Size((B, T, 16)), torch.float64, forward)
    evaluated, found = found, []
    for _ in range(HOST_RUNS + 2):
        engine.lasts.clear()
        pipeline.train(
            2,
            torch.Size((B, T, 16)),
            torch.float64,
            lambda stage, k, hidden: Forwarded(
                (output := stages[stage](*batch(k), hidden=hidden)).hidden, loss_of(output, 2)
            ),
        )
    return evaluated, found


def test_the_first_runs_of_each_kind_go_through_the_host() -> None:
    """While kernels are loaded no receive may spin on the device."""
    expected = [True] * HOST_RUNS + [False] * 2
    assert run(way_case, 2) == [(expected, expected)] * 2


def test_no_rank_has_two_channels_on_one_communicator() -> None:
    for name, p, v in (("1f1b", 4, 1), ("interleaved_1f1b", 4, 2), ("interleaved_1f1b", 5, 2), ("zbv", 8, 2)):
        channels = {each.channel for each in sent_between_ranks(schedule(name, p, v, 2 * p))}
        numbers = communicators(channels)
        assert numbers.keys() == channels
        for number in set(numbers.values()):
            ranks = [rank for channel in channels if numbers[channel] == number for rank in channel]
            assert len(ranks) == len(set(ranks))
        assert len(set(numbers.values())) == (6 if name == "interleaved_1f1b" and p % 2 else 4)
