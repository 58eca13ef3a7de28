"""Weight gradients without gradients: linear layers whose backward adds to the flat engine's buckets itself.

    usual:  product -> parameter.grad -> hook -> added to the bucket         (`FlatGroup`)
    here:   product, added to the bucket; the parameter gets no gradient     (`kernels/weight_gradient.py`)

`accumulate_products` is applied to blocks from above, before they are compiled. The engine then gives each layer the
`Place` of its weight's gradient when the block's forward begins. When a backward has reached the block's input, all
products of the block have been issued; autograd says so through that input's hook, and the engine counts them as it
counts gradients.

Experts that are computed by kernels of ours (`parallel.expert_kernels`) take part in the same way, with two places.

So do linears that are multiplied as one (`Joined`: fp8), where their weights lie side by side, with one place for all.
Their products cannot add: what they gain is to write the first micro-batch's gradient where it is summed.

What stays on the usual way: everything but matrices of plain linear layers and of such experts (norms, biases,
embeddings, the head), weights that are tied, frozen, or multiplied by other code than their layer's own forward (but
tensor parallelism's products know places), and any weight whose gradient somebody watches with a hook, as the search
for non-finite gradients does.

In a compiled block the place is an input of the graph, which the backward changes. Torch traces that as a copy and
takes the copy out again (2.11 - 2.13; tests/parallel/test_accumulate.py sees that it does).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.kernels.weight_gradient import accumulate_weight_gradient
from paceline.models.moe import Experts


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where gradients of one parameter are summed over micro-batches."""

    gradient: Tensor
    """In the shape of the parameter."""
    fresh: Tensor
    """Bool in host memory, a scalar or one for each of joined parameters: nothing has arrived in this step, and what
    ``gradient`` holds is to be replaced."""


class AccumulatingLinear(nn.Linear):
    """A `nn.Linear` that may have been given the place of its weight's gradient.

    Layers are made into this; nobody builds one.
    """

    place: Tensor | None = None
    fresh: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias, place_of(self))

    def aim(self, place: Place | None) -> None:
        """The next forward's backward adds to ``place``; None: its weight gets a gradient as usual."""
        # .data: with version counters of their own. A micro-batch's backward changes both while the next one's forward,
        # which saved them too, waits for its backward
        self.place = None if place is None else place.gradient.data
        self.fresh = None if place is None else place.fresh.data


class AccumulatingExperts(Experts):
    """Experts that may be given the places of their matrices' gradients. Made, like `AccumulatingLinear`, of others."""


def accumulates(layer: nn.Module, attribute: str) -> bool:
    """Whether the layer's backward can be told where to add this parameter's gradient."""
    if isinstance(layer, AccumulatingExperts):
        return attribute in ("up_weight", "down_weight")
    return isinstance(layer, AccumulatingLinear) and attribute == "weight"


def place_of(layer: nn.Linear) -> Place | None:
    """Where the gradient of its weight goes in the backward of what is multiplied now; None: to autograd."""
    if not isinstance(layer, AccumulatingLinear) or layer.place is None or layer.fresh is None:
        return None
    return Place(gradient=layer.place, fresh=layer.fresh)


def linear(x: Tensor, weight_DC: Tensor, bias_D: Tensor | None, place: Place | None) -> Tensor:
    """`F.linear` whose backward adds the weight's gradient to ``place``, if there is one."""
    if place is None or not torch.is_grad_enabled():
        return F.linear(x, weight_DC, bias_D)
    out: Tensor = _AccumulatingProduct.apply(x, weight_DC, bias_D, place.gradient, place.fresh)
    return out


class _AccumulatingProduct(torch.autograd.Function):
    """x [..., C], weight [D, C]; the weight is an input, so that there is a backward whatever x is. M: all dims of x
    but the last as one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_DC: Tensor, bias_D: Tensor | None, place: Tensor, fresh: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight_DC, place, fresh)
        return F.linear(x, weight_DC, bias_D)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_DC, place, fresh = ctx.saved_tensors
        grad_MD = grad.flatten(0, -2)
        accumulate_weight_gradient(place, fresh, grad_MD, x.flatten(0, -2))
        grad_x = grad @ weight_DC if ctx.needs_input_grad[0] else None
        grad_bias = grad_MD.sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, None, grad_bias, None, None


# ---- from above


def accumulate_products(
    blocks: Sequence[nn.Module], *, replaced: bool = False, but: Collection[nn.Linear] = ()
) -> None:
    """Plain linear layers inside become `AccumulatingLinear`, and experts with kernels `AccumulatingExperts`, in place;
    names and parameters stay.

    After anything that replaces layers or their forward: what it changed is left alone.

    Args:
        replaced: not so; products that stand for a layer's own ask `place_of`, as those of tensor parallelism do.
        but: layers whose products do not.
    """
    left = set(but)
    for block in blocks:
        for module in block.modules():
            for layer in [each for each in _plain_layers(module, replaced) if each not in left]:
                layer.__class__ = AccumulatingLinear  # hooks, names and the parameters' places in the model stay
            if type(module) is Experts and module.kernels is not None:
                module.__class__ = AccumulatingExperts


def _plain_layers(parent: nn.Module, replaced: bool) -> Iterator[nn.Linear]:
    elsewhere: set[nn.Module] = set()
    if "project" in vars(parent):  # a sublayer that multiplies by its first matrices in a way of its own
        elsewhere = set(parent.in_projs)  # type: ignore[arg-type]
    for layer in parent.children():
        own = "forward" in vars(layer) or layer in elsewhere
        if type(layer) is nn.Linear and (replaced or not own) and _worth_it(layer):
            yield layer


def _worth_it(layer: nn.Linear) -> bool:
    """Matrix products like sizes in multiples of 8; and a matrix of one row is no matrix (the gate of shared
    experts)."""
    return all(size % 8 == 0 for size in layer.weight.shape)  # not the layer's own fields: tp cuts the weight alone


# ---- the engine's side


@dataclass(frozen=True, kw_only=True)
class Target:
    """A layer, the place that its engine gave its weight, and what is to be called when a product has arrived."""

    layer: AccumulatingLinear | AccumulatingExperts
    place: Place
    arrived: Callable[[], None]
    attribute: str = "weight"

    @property
    def watched(self) -> bool:
        """Somebody wants to see this weight's gradient: there has to be one."""
        return bool(getattr(self.layer, self.attribute)._backward_hooks)

    def aim(self) -> bool:
        """Tells the layer of the place for its next forward; not if somebody watches. True if it has been told."""
        place = None if self.watched else self.place
        if isinstance(self.layer, AccumulatingExperts):
            # .data: see `AccumulatingLinear.aim`
            tensors = (None, None) if place is None else (place.gradient.data, place.fresh.data)
            self.layer.aim(self.attribute, *tensors)
        else:
            self.layer.aim(place)
        return place is not None


class Joined(Protocol):
    """Linears whose products are one, [sum of outputs, inputs]."""

    @property
    def linears(self) -> Sequence[nn.Linear]:
        """In the order of the outputs."""
        ...

    def aim(self, place: Place | None) -> None:
        """As `AccumulatingLinear.aim`, with one place for all of them."""
        ...


@dataclass(frozen=True, kw_only=True)
class JoinedTarget:
    """As `Target`, of `Joined` linears."""

    joined: Joined
    place: Place
    arrived: Callable[[], None]

    def aim(self) -> bool:
        """See `Target`."""
        watched = any(linear.weight._backward_hooks for linear in self.joined.linears)
        self.joined.aim(None if watched else self.place)
        return not watched


def announce_products(block: nn.Module, targets: Sequence[Target | JoinedTarget]) -> None:
    """Layers are given their places before each forward of ``block``, and ``arrived`` is called for each of them when
    a backward is through with the block.

    Not called where the block's input needs no gradient (behind a frozen embedding): then nobody is told.
    """

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        if not torch.is_grad_enabled():
            return
        aimed = [target for target in targets if target.aim()]

        @torch.no_grad()
        def through(gradient: Tensor) -> None:
            for target in aimed:
                target.arrived()

        if args[0].requires_grad:
            # the input's gradient is complete when everything that depends on it has been through backward
            args[0].register_hook(through)

    block.register_forward_pre_hook(before)
