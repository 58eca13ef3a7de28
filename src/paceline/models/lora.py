"""Low-rank adapters beside frozen linears: LoRA, its rank-stabilised scale, and DoRA.

    y = W x + b + scale * B A drop(x)                               LoRA, arXiv:2106.09685
    y = m / |W + scale * B A| * (W x + scale * B A x) + b           DoRA, arXiv:2402.09353; the lengths of rows have no
                                                                    gradient (section 4.3)

`attach_adapters` changes a plain model in place: linears become `LoraLinear`, whose `lora_a`, `lora_b` and
`lora_magnitude` are the only parameters that learn. A model is computed without its adapters, as DPO's reference is, by

    with adapters_off(model):
        reference = model(tokens, labels)

also where it is compiled, spread over ranks or cut into stages (``adapters_off(*stages)``).

What joins the products of linears that read one input, and what ranks do, is put on from above
(`parallel/adapters.py`); it then calls the functions of this file.

Dims: R rank, D outputs, C inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config.lora import LEAVES, LoraConfig

Product = Callable[[Tensor], Tensor]
"""[..., C] times a frozen matrix: [..., D]."""


class AdapterSwitch:
    """Whether the adapters of one model take part. One object for all of its linears."""

    def __init__(self) -> None:
        self.on = True


@dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    """What the adapters of a model have in common."""

    scale: float
    dropout: float
    switch: AdapterSwitch


class LoraLinear(nn.Linear):
    """A frozen `nn.Linear` with a pair of small matrices beside it. Linears are made into this; nobody builds one."""

    lora_a: nn.Parameter
    """[R, C]."""
    lora_b: nn.Parameter
    """[D, R]."""
    lora_magnitude: nn.Parameter | None
    """[D], with DoRA: the length of each row."""
    adapter: AdapterSettings
    joined: bool
    """Somebody who calls this, or replaced it, adds the adapter: the layer's own forward is the frozen product."""

    def forward(self, input: Tensor) -> Tensor:
        base = F.linear(input, self.weight, self.bias)
        if self.joined or not self.adapter.switch.on:
            return base
        (narrow,) = narrow_products(input, [self])
        norms = None if self.lora_magnitude is None else square_norms(self).sqrt()
        return with_adapter(self, base, narrow, norms)


def attach_adapters(model: nn.Module, config: LoraConfig) -> list[str]:
    """Freezes the parameters of a plain model (but `LoraConfig.learns`), and puts adapters beside the linears that
    ``config`` targets.

    On the meta device or with weights; adapters are in the dtype and on the device of their linear, without values
    (`models/init.py` fills them).

    Returns:
        names of the matrices that have an adapter now; empty where `config.on` is false: nothing is changed then.
    """
    if not config.on:
        return []
    settings = AdapterSettings(scale=config.scale, dropout=config.dropout, switch=AdapterSwitch())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(config.learns(name))
    found = [name for name, _ in model.named_parameters() if config.adapts(name)]
    for name in found:
        linear = model.get_submodule(name.removesuffix(".weight"))
        assert type(linear) is nn.Linear, f"{name} hangs on a {type(linear).__name__}"
        linear.__class__ = LoraLinear  # names, hooks and the places of its parameters stay
        assert isinstance(linear, LoraLinear)
        linear.adapter, linear.joined = settings, False
        weight, shapes = linear.weight, config.adapter_shapes(name, tuple(linear.weight.shape))
        for leaf in LEAVES:
            shape = shapes.get(name.removesuffix("weight") + leaf)
            value = None if shape is None else nn.Parameter(weight.new_empty(shape))
            linear.register_parameter(leaf, value)
    return found


def lora_linears(*models: nn.Module) -> list[LoraLinear]:
    """The linears with adapters, in the order of the models."""
    return [module for model in models for module in model.modules() if isinstance(module, LoraLinear)]


@contextmanager
def adapters_off(*models: nn.Module) -> Iterator[None]:
    """Inside, models (or stages of one) compute as if they had no adapters; nothing happens to those that have none.

    May be nested. A backward inside must be of a forward inside: what is recomputed looks at the switch again.
    """
    switches = {linear.adapter.switch for linear in lora_linears(*models)}
    before = [(switch, switch.on) for switch in switches]
    for switch in switches:
        switch.on = False
    try:
        yield
    finally:
        for switch, was in before:
            switch.on = was


# ---- the parts of a product


def narrow_products(x: Tensor, linears: list[LoraLinear]) -> tuple[Tensor, ...]:
    """``x`` [..., C] times the first matrices of pairs that read the same input: [..., R] of each, by one product."""
    downs: list[Tensor] = [linear.lora_a for linear in linears]
    dropped = F.dropout(x, linears[0].adapter.dropout, linears[0].training)
    if len(downs) == 1:
        return (F.linear(dropped, downs[0]),)
    joined = F.linear(dropped, torch.cat(downs))
    return joined.split([down.shape[0] for down in downs], dim=-1)


def with_adapter(linear: LoraLinear, base: Tensor, narrow: Tensor, norms: Tensor | None = None) -> Tensor:
    """The whole output, of the frozen product ``base`` [..., D] (with its bias) and ``narrow`` [..., R].

    Args:
        norms: [D], with DoRA: the lengths of the rows of W + scale * B A; `square_norms`, summed over ranks, rooted.
    """
    scale = linear.adapter.scale
    if norms is None or linear.lora_magnitude is None:
        added = torch.addmm(base.flatten(0, -2), narrow.flatten(0, -2), linear.lora_b.T, alpha=scale)
        return added.view_as(base)
    factor = (linear.lora_magnitude / norms).to(base.dtype)
    product = base if linear.bias is None else base - linear.bias
    out = (product + scale * F.linear(narrow, linear.lora_b)) * factor
    return out if linear.bias is None else out + linear.bias


@torch.no_grad()
def square_norms(linear: LoraLinear) -> Tensor:
    """[D], at least fp32: the squared length of each row of W + scale * B A, of the inputs that are here.

    As |W|^2 + 2 scale W A . B + scale^2 |B A|^2, so that the sum of the matrices is never made.
    """
    weight, down, up, scale = linear.weight, linear.lora_a, linear.lora_b, linear.adapter.scale
    wide = torch.promote_types(weight.dtype, torch.float32)
    own = torch.linalg.vector_norm(weight, dim=1, dtype=wide).square()
    up_DR, crossed_DR = up.to(wide), (weight @ down.T).to(wide)
    down_RR = down.to(wide) @ down.to(wide).T
    return own + 2 * scale * (crossed_DR * up_DR).sum(1) + scale**2 * ((up_DR @ down_RR) * up_DR).sum(1)
