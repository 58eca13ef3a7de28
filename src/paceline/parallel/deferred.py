"""Weight gradients later: a backward that computes gradients of activations only, and puts off those of matrices.

What a zero-bubble schedule needs (arXiv:2401.10241, section 2): action I sends the gradient on to the stage before as
soon as can be, action W then multiplies what is left. Inside `deferring`, `F.linear` and `F.grouped_mm` whose weight is
a parameter, or a view of one, become functions whose backward puts the weight's product into a queue. `deliver`
multiplies and hands each gradient to autograd, so that hooks on parameters (the flat engine's) see it as ever, once.

Gradients of other parameters (norms, biases, embeddings, and the chunked loss's head) are computed in I: they cost
nothing, or come with the loss. The queue keeps a matrix's input and the gradient of its output, nothing else.
Not for torch.compile, whose graphs know no such queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True, kw_only=True)
class Product:
    """A weight gradient that is yet to be computed."""

    weight: Tensor
    """The parameter, or a view of it."""
    compute: Callable[[], Tensor]


class DeferredWeights:
    """Where the products of one backward go. One for a pipeline rank."""

    def __init__(self) -> None:
        self._queue: list[Product] | None = None

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Around a forward whose weight gradients are to be put off."""
        with _Takeover(self):
            yield

    def backward(self, roots: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor]) -> list[Product]:
        """The backward of such a forward, up to the products. Layers may be recomputed in it."""
        assert self._queue is None, "a backward inside another"
        queue: list[Product] = []
        self._queue = queue
        try:
            # a recomputed layer must save what its first forward saved
            with _Takeover(self):
                # not torch.autograd.backward: that is itself a function which a mode is asked about, with the mode off
                # from there on, also for what is recomputed; no public way around it (torch 2.11 - 2.13)
                _engine_run_backward(
                    tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
                )
        finally:
            self._queue = None
        return queue

    def put(self, product: Product) -> None:
        assert self._queue is not None, "a forward under `deferring` needs `DeferredWeights.backward`"
        self._queue.append(product)


@torch.no_grad()
def deliver(products: list[Product]) -> None:
    """Computes the gradients and accumulates them into their parameters, each parameter once. Empties the list."""
    by_parameter: dict[int, list[Product]] = {}
    for product in products:
        by_parameter.setdefault(id(_leaf_of(product.weight)), []).append(product)
    products.clear()
    while by_parameter:
        # one parameter at a time: all gradients of a stage at once would be as large as its weights
        _, members = by_parameter.popitem()
        gradients = [member.compute() for member in members]
        torch.autograd.backward([member.weight for member in members], gradients)


class _Takeover(TorchFunctionMode):
    def __init__(self, deferred: DeferredWeights) -> None:
        super().__init__()
        self._deferred = deferred

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return self._linear(*args, **kwargs)
        if func is F.grouped_mm and set(kwargs) <= {"offs"} and len(args) == 2 and args[0].dim() == 2:
            return self._grouped(*args, **kwargs)
        return func(*args, **kwargs)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not _can_wait(input, weight):
            return F.linear(input, weight, bias)
        out: Tensor = _Linear.apply(input, weight.detach(), bias, weight, self._deferred)
        return out

    def _grouped(self, rows: Tensor, matrices: Tensor, *, offs: Tensor | None = None) -> Tensor:
        if offs is None or not _can_wait(rows, matrices):
            return F.grouped_mm(rows, matrices, offs=offs)
        out: Tensor = _Grouped.apply(rows, matrices.detach(), offs, matrices, self._deferred)
        return out


def _can_wait(x: Tensor, weight: Tensor) -> bool:
    return (
        torch.is_grad_enabled()
        and x.requires_grad  # else this function would have no backward to put the product off in
        and weight.requires_grad
        and _leaf_of(weight).is_leaf
    )


def _leaf_of(weight: Tensor) -> Tensor:
    # the only way to ask a view for its base (torch 2.11 - 2.13)
    return weight if weight._base is None else weight._base


class _Linear(torch.autograd.Function):
    """x [..., C], weight [F, C]. ``target`` is the weight as autograd knows it; it is no input, so it gets nothing."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_FC: Tensor, bias: Tensor | None, target: Tensor, deferred: DeferredWeights
    ) -> Tensor:
        ctx.save_for_backward(x, weight_FC)
        ctx.target, ctx.deferred = target, deferred
        return F.linear(x, weight_FC, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_FC = ctx.saved_tensors
        ctx.deferred.put(Product(weight=ctx.target, compute=lambda: _rows(grad).T @ _rows(x)))
        grad_bias = _rows(grad).sum(0) if ctx.needs_input_grad[2] else None
        return grad @ weight_FC, None, grad_bias, None, None


class _Grouped(torch.autograd.Function):
    """rows [A, C], matrices [E, C, F] (the transposed view of [E, F, C]), offs [E]: where each group's rows end."""

    @staticmethod
    def forward(
        ctx: Any, rows_AC: Tensor, matrices_ECF: Tensor, offs_E: Tensor, target: Tensor, deferred: DeferredWeights
    ) -> Tensor:
        ctx.save_for_backward(rows_AC, matrices_ECF, offs_E)
        ctx.target, ctx.deferred = target, deferred
        return F.grouped_mm(rows_AC, matrices_ECF, offs=offs_E)

    @staticmethod
    def backward(ctx: Any, grad_AF: Tensor) -> tuple[Tensor | None, ...]:
        rows_AC, matrices_ECF, offs_E = ctx.saved_tensors

        def product() -> Tensor:
            # laid out as the parameter, [E, F, C], and then seen as the transposed view that was multiplied
            return F.grouped_mm(grad_AF.T, rows_AC, offs=offs_E).transpose(-2, -1)

        ctx.deferred.put(Product(weight=ctx.target, compute=product))
        return F.grouped_mm(grad_AF, matrices_ECF.transpose(-2, -1), offs=offs_E), None, None, None, None


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2)
