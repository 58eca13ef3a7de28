"""fp8 products over ranks of tp are those of one process: the same scales, the same rounding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distributed import run
from paceline.config.parallel import ParallelConfig
from paceline.kernels.cross_entropy import ChunkedHeadLoss
from paceline.kernels.fp8 import Cut, cast_weights, fp8_linears
from paceline.kernels.fp8_cast import CastKernel, Scaling
from paceline.kernels.fp8_head import Fp8Head
from paceline.parallel.fp8_device import multiplies
from paceline.parallel.linear import Meeting
from paceline.parallel.linear_fp8 import WidestOver, fp8_column_products, fp8_row_product
from paceline.parallel.mesh import ParallelMesh
from paceline.parallel.vocabulary import Rows, vocabulary_head_loss

CPU = torch.device("cpu")
SCALINGS: tuple[Scaling, ...] = ("tensorwise", "rowwise") if multiplies(CPU, "rowwise") else ("tensorwise",)
BATCH, LENGTH, WIDTH, SIZES = 2, 6, 32, (32, 64)


@dataclass(frozen=True)
class Case:
    scaling: Scaling
    cached: bool = False
    kernel: CastKernel = "torch"
    dim: int = 1
    widen: bool = True


CASES = [
    Case(scaling, cached, kernel, dim)
    for scaling in SCALINGS
    for cached, kernel, dim in ((False, "torch", 1), (True, "torch", 0), (True, "triton", 1))
]


def _numbers(cut: str) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Input, weights, biases, gradients of outputs. In fp32, so that nothing but fp8 rounds; the large numbers of what
    is cut are all in one rank's part: those of weights in the first, what they are multiplied by in the second."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int, over: int | None = None, rank: int = 0) -> Tensor:
        matrix = torch.randn(shape, generator=generator)
        if over is not None:
            matrix.narrow(over, rank * shape[over] // 2, shape[over] // 2).mul_(2.0**16)
        return matrix

    x = draw(BATCH, LENGTH, WIDTH, over=2 if cut == "inputs" else None, rank=1)
    weights = tuple(draw(size, WIDTH, over=1 if cut == "inputs" else 0) for size in SIZES)
    grads = tuple(draw(BATCH, LENGTH, size, over=2 if cut == "outputs" else None, rank=1) for size in SIZES)
    return x, weights, tuple(draw(size) for size in SIZES), grads


def _leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.clone().requires_grad_() for tensor in tensors)


def _apart(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected).norm() / expected.norm()).detach())


def _part(x: Tensor, rank: int, dim: int) -> Tensor:
    return x.chunk(2, dim)[rank].contiguous()


def _cut(over: Any, axis: Any, case: Case) -> Cut:
    return Cut(over=over, widen=WidestOver(axis=axis, name="test/scales") if case.widen else lambda largest: largest)


def _column(rank: int, axis: Any, case: Case) -> dict[str, float]:
    x, weights, biases, grads = _numbers("outputs")
    whole = _leaves(x, *weights, *biases)
    outputs = fp8_linears(whole[0], whole[1:3], whole[3:], scaling=case.scaling)
    torch.autograd.backward(outputs, grads)

    own_x, *own = _leaves(_part(x, rank, case.dim), *(_part(each, rank, 0) for each in (*weights, *biases)))
    cut, meeting = _cut("outputs", axis, case), Meeting(axis=axis, name="test", dim=case.dim)
    cached = cast_weights(own[:2], case.scaling, cut) if case.cached else None
    options: dict[str, Any] = {"scaling": case.scaling, "cached": cached, "kernel": case.kernel, "cut": cut}
    found = fp8_column_products(own_x, own[:2], own[2:], meeting, **options)
    with torch.no_grad():
        again = fp8_column_products(own_x, own[:2], own[2:], meeting, **options)
    torch.autograd.backward(found, [_part(grad, rank, 2) for grad in grads])
    errors = {"without gradients": max(_apart(*pair) for pair in zip(again, found, strict=True))}
    errors["output"] = max(_apart(one, _part(other, rank, 2)) for one, other in zip(found, outputs, strict=True))
    assert own_x.grad is not None and whole[0].grad is not None
    errors["input"] = _apart(own_x.grad, _part(whole[0].grad, rank, case.dim))
    for name, one, other in zip(("gate", "up", "gate bias", "up bias"), own, whole[1:], strict=True):
        assert one.grad is not None and other.grad is not None
        errors[name] = _apart(one.grad, _part(other.grad, rank, 0))
    return errors


def _row(rank: int, axis: Any, case: Case) -> dict[str, float]:
    x, (weight, _), (bias, _), (grad, _) = _numbers("inputs")
    whole = _leaves(x, weight, bias)
    (output,) = fp8_linears(whole[0], whole[1:2], whole[2:], scaling=case.scaling)
    output.backward(grad)

    own_x, own_weight, own_bias = _leaves(_part(x, rank, 2), _part(weight, rank, 1), bias)
    cut, meeting = _cut("inputs", axis, case), Meeting(axis=axis, name="test", dim=case.dim)
    cached = cast_weights([own_weight], case.scaling, cut) if case.cached else None
    options: dict[str, Any] = {"scaling": case.scaling, "cached": cached, "kernel": case.kernel, "cut": cut}
    found = fp8_row_product(own_x, own_weight, own_bias, meeting, **options)
    found.backward(_part(grad, rank, case.dim))
    assert own_x.grad is not None and whole[0].grad is not None
    assert own_weight.grad is not None and whole[1].grad is not None
    return {
        "output": _apart(found, _part(output, rank, case.dim)),
        "input": _apart(own_x.grad, _part(whole[0].grad, rank, 2)),
        "weight": _apart(own_weight.grad, _part(whole[1].grad, rank, 1)),
    }


def _both(rank: int, world_size: int, cases: list[Case]) -> list[dict[str, dict[str, float]]]:
    axis = ParallelMesh(ParallelConfig(tp=2), world_size=2, rank=rank, device_type="cpu")["tp"]
    return [{"column": _column(rank, axis, case), "row": _row(rank, axis, case)} for case in cases]


def test_products_are_those_of_one_process() -> None:
    """To the order of sums in fp32."""
    cases = [*CASES, *(Case(scaling, widen=False) for scaling in SCALINGS)]
    for case, *ranks in zip(cases, *run(_both, 2, cases), strict=True):
        worst = {
            f"{kind}, {name}": max(found[kind][name] for found in ranks)
            for kind, errors in ranks[0].items()
            for name in errors
        }
        if case.widen:
            assert max(worst.values()) < 1e-6, (case, worst)
        else:
            # with scales of parts, small numbers are denormals for one process and not for a rank
            assert max(worst.values()) > 1e-3, (case, worst)


def _head(rank: int, world_size: int, cases: list[Case]) -> list[tuple[float, float, float]]:
    """Relative errors of loss and both gradients, with the vocabulary cut over ranks."""
    axis = ParallelMesh(ParallelConfig(tp=2), world_size=2, rank=rank, device_type="cpu")["tp"]
    generator = torch.Generator().manual_seed(4)
    hidden, weight = (torch.randn(size, WIDTH, generator=generator) for size in (50, 64))
    labels = torch.randint(64, (50,), generator=generator)
    weight[:32] *= 2.0**4
    start, stop = 32 * rank, 32 * (rank + 1)
    found = []
    for case in cases:
        plain = ChunkedHeadLoss(chunk_tokens=21, fp8=Fp8Head(scaling=case.scaling, kernel=case.kernel))
        over_ranks = vocabulary_head_loss(plain, Rows(axis=axis, start=start, stop=stop, sizes=(32, 32)))
        results = []
        for loss, rows in ((plain, weight), (over_ranks, weight[start:stop])):
            leaves = _leaves(hidden, rows)
            total, _ = loss(*leaves, labels, logit_softcap=30.0)
            total.backward()
            results.append((total.detach(), *(leaf.grad for leaf in leaves)))
        (expected, expected_hidden, expected_weight), (total, partial, own) = results
        dist.all_reduce(partial)
        errors = (_apart(total, expected), _apart(partial, expected_hidden), _apart(own, expected_weight[start:stop]))
        found.append(errors)
    return found


def test_the_head_s_loss_is_that_of_one_process() -> None:
    """Gradients of logits come from sums over ranks: one that lies between two fp8 numbers may round elsewhere."""
    for found in run(_head, 2, [case for case in CASES if not case.cached or case.kernel == "triton"]):
        for loss, *gradients in found:
            assert loss < 1e-6 and max(gradients) < 5e-3, found


@pytest.mark.parametrize("scaling", SCALINGS)
def test_scales_that_are_not_finite_spoil_the_product_on_every_rank(scaling: Scaling) -> None:
    for value in (float("inf"), float("nan")):
        finite = run(_spoiled, 2, scaling, value)
        assert finite == [False, False]


def _spoiled(rank: int, world_size: int, scaling: Scaling, value: float) -> bool:
    axis = ParallelMesh(ParallelConfig(tp=2), world_size=2, rank=rank, device_type="cpu")["tp"]
    weights = [torch.ones(32, 32)]
    if rank == 1:
        weights[0][3, 5] = value
    cut = Cut(over="outputs", widen=WidestOver(axis=axis, name="test/scales"))
    cached = cast_weights(weights, scaling, cut)
    return bool(torch.isfinite(cached.columns.wide()).all())
