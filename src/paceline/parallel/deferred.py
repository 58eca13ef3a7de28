"""Weight gradients later: a backward that computes gradients of activations only, and puts off those of matrices.

What a zero-bubble schedule needs (arXiv:2401.10241, section 2): action I sends the gradient on to the stage before as
soon as can be, action W then multiplies what is left. Inside `deferring`, the backward of `F.linear`, of `F.grouped_mm`
and of tensor parallelism's `column_products` puts the product for a weight into a queue, if the weight is a parameter
or a view of one. `deliver` multiplies and hands each gradient to autograd, so that hooks on parameters (the flat
engine's) see it as ever, once.

Gradients of other parameters (norms, biases, embeddings, and the chunked loss's head) are computed in I: they cost
nothing, or come with the loss. The queue keeps a matrix's input and the gradient of its output, nothing else.
Not for torch.compile, whose graphs know no such queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward
from torch.overrides import TorchFunctionMode

from paceline.parallel.linear import column_products


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


_GROUPED_MM = (F.grouped_mm, getattr(torch, "_grouped_mm", F.grouped_mm))
"""The function of torch 2.11 - 2.13 that a mode sees is the one behind the public one."""


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
        if func in _GROUPED_MM:
            return self._grouped(func, *args, **kwargs)
        if func is column_products:
            return self._columns(*args, **kwargs)
        return func(*args, **kwargs)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not _can_wait(input, weight):
            return F.linear(input, weight, bias)
        out: Tensor = _Linear.apply(input, weight.detach(), bias, _Later(weight, self._deferred))
        return out

    def _grouped(self, func: Any, rows: Tensor, matrices: Tensor, *, offs: Tensor | None = None, **more: Any) -> Tensor:
        plain = all(value is None for value in more.values()) and rows.dim() == 2 and matrices.dim() == 3
        if offs is None or not plain or not _can_wait(rows, matrices):
            unchanged: Tensor = func(rows, matrices, offs=offs, **more)
            return unchanged
        out: Tensor = _Grouped.apply(rows, matrices.detach(), offs, _Later(matrices, self._deferred))
        return out

    def _columns(self, x: Tensor, weights: tuple[Tensor, ...], *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        if all(_can_wait(x, weight) for weight in weights):
            kwargs["postpone"] = lambda weight, compute: self._deferred.put(Product(weight=weight, compute=compute))
        return column_products(x, weights, *args, **kwargs)


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


class _Later(NamedTuple):
    """The weight as autograd knows it. In a tuple, autograd does not see it: it is no input, and gets no gradient."""

    weight: Tensor
    deferred: DeferredWeights

    def put(self, compute: Callable[[], Tensor]) -> None:
        self.deferred.put(Product(weight=self.weight, compute=compute))


class _Linear(torch.autograd.Function):
    """x [..., C], weight [F, C]. M: all dims but the last as one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_FC: Tensor, bias: Tensor | None, later: _Later) -> Tensor:
        ctx.save_for_backward(x, weight_FC)
        ctx.later = later
        return F.linear(x, weight_FC, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_FC = ctx.saved_tensors
        # detached: the graph that made x goes now, not with the product
        grad_MF, x_MC = grad.detach().flatten(0, -2), x.detach().flatten(0, -2)
        ctx.later.put(lambda: grad_MF.T @ x_MC)
        grad_bias = grad_MF.sum(0) if ctx.needs_input_grad[2] else None
        return grad @ weight_FC, None, grad_bias, None


class _Grouped(torch.autograd.Function):
    """rows [A, C], matrices [E, C, F] (the transposed view of [E, F, C]), offs [E]: where each group's rows end."""

    @staticmethod
    def forward(ctx: Any, rows_AC: Tensor, matrices_ECF: Tensor, offs_E: Tensor, later: _Later) -> Tensor:
        ctx.save_for_backward(rows_AC, matrices_ECF, offs_E)
        ctx.later = later
        return F.grouped_mm(rows_AC, matrices_ECF, offs=offs_E)

    @staticmethod
    def backward(ctx: Any, grad_AF: Tensor) -> tuple[Tensor | None, ...]:
        rows_AC, matrices_ECF, offs_E = ctx.saved_tensors
        grad_FA, rows_AC = grad_AF.detach().T, rows_AC.detach()
        # laid out as the parameter, [E, F, C], and then seen as the transposed view that was multiplied
        ctx.later.put(lambda: F.grouped_mm(grad_FA, rows_AC, offs=offs_E).transpose(-2, -1))
        return F.grouped_mm(grad_AF, matrices_ECF.transpose(-2, -1), offs=offs_E), None, None, None
