"""Which dimension of which parameter is cut over which axis? One description, for the trainer and the planner.

| parameter | cut |
| --- | --- |
| embedding, head | vocabulary over tp; uneven where it does not divide, never padded |
| query, and latent attention's up projections | heads over tp |
| key, value | key/value heads over tp; with fewer heads than ranks, each head on a run of tp / heads ranks |
| attention output | its input, so heads, over tp |
| gate, up (also of shared experts) | width over tp |
| down | its input, so the width, over tp |
| experts | experts over ep, and the width of each over etp |
| `lora_a`, `lora_b`, `lora_magnitude` of a linear | its inputs, outputs, outputs, if its matrix is cut by those |
| everything else | whole |

Source of the pairing of column and row cuts: Megatron-LM, arXiv:1909.08053, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.config.lora import is_adapter
from paceline.config.model import ModelConfig

CutAxis = Literal["tp", "ep", "etp"]


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Dimension ``dim`` is dealt out over the ranks of ``axis``, ``units`` (heads, experts, rows) that stay whole."""

    dim: int
    axis: CutAxis
    units: int


@dataclass(frozen=True, kw_only=True)
class LocalBox:
    """A rank's part of a parameter."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def placement(name: str, shape: Sequence[int], model: ModelConfig) -> tuple[Cut, ...]:
    """How the parameter ``name`` of the plain model, of that ``shape``, is cut."""
    owner, _, leaf = name.rpartition(".")
    module = owner.rpartition(".")[2]
    if is_adapter(name):
        return _adapter(owner, leaf, shape, model)
    if name in ("embed.weight", "head.weight"):
        return (Cut(dim=0, axis="tp", units=shape[0]),)
    if is_expert(name):
        ways = (Cut(dim=0, axis="ep", units=shape[0]),)
        width_dim = {"up_weight": 2, "up_bias": 2, "down_weight": 2}.get(leaf)
        return ways if width_dim is None else (*ways, Cut(dim=width_dim, axis="etp", units=shape[width_dim]))
    if ".attention." in name:
        return _attention(module, leaf, model)
    if module in ("gate_proj", "up_proj"):
        return (Cut(dim=0, axis="tp", units=shape[0]),)
    if module == "down_proj" and leaf == "weight":
        return (Cut(dim=1, axis="tp", units=shape[1]),)
    return ()


def _adapter(owner: str, leaf: str, shape: Sequence[int], model: ModelConfig) -> tuple[Cut, ...]:
    """[R, in], [out, R] or [out]: cut with the dim of the linear's matrix that it shares. Ranks are never cut."""
    dim = 1 if leaf == "lora_a" else 0
    # a matrix as long as this in the dim that counts
    cuts = placement(f"{owner}.weight", shape if len(shape) > 1 else (shape[0], 1), model)
    return tuple(cut for cut in cuts if cut.dim == dim)


def _attention(module: str, leaf: str, model: ModelConfig) -> tuple[Cut, ...]:
    if module in ("q_proj", "q_up_proj", "kv_up_proj"):
        return (Cut(dim=0, axis="tp", units=model.num_heads),)
    if module in ("k_proj", "v_proj"):
        return (Cut(dim=0, axis="tp", units=model.num_kv_heads or model.num_heads),)
    if module == "o_proj" and leaf == "weight":
        return (Cut(dim=1, axis="tp", units=model.num_heads),)
    return ()


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to routed experts: cut over ep and etp, data parallel over edp."""
    return ".experts." in name


def local_box(
    name: str, shape: Sequence[int], model: ModelConfig, sizes: Mapping[str, int], index: Mapping[str, int]
) -> LocalBox:
    """The part of a parameter that the rank at ``index`` (tp, ep, etp) holds, with axes of ``sizes``."""
    offsets, local = [0] * len(shape), list(shape)
    for cut in placement(name, shape, model):
        start, stop = share(cut.units, sizes.get(cut.axis, 1), index.get(cut.axis, 0))
        width = shape[cut.dim] // cut.units
        offsets[cut.dim], local[cut.dim] = start * width, (stop - start) * width
    return LocalBox(offsets=tuple(offsets), shape=tuple(local))


def copies(name: str, shape: Sequence[int], model: ModelConfig, axis: CutAxis, size: int) -> int:
    """How many neighbouring ranks of ``axis`` hold the same part: ``size`` if it is whole, 1 if each has its own."""
    cut = next((cut for cut in placement(name, shape, model) if cut.axis == axis), None)
    if cut is None:
        return size
    return max(1, size // cut.units)


def share(units: int, size: int, index: int) -> tuple[int, int]:
    """The units ``[start, stop)`` of rank ``index`` of ``size``: as even as can be, the first ranks have one more.

    With fewer units than ranks each unit is on a run of ``size / units`` ranks.
    """
    if units < size:
        assert size % units == 0, f"{units} units over {size} ranks"
        start = index // (size // units)
        return start, start + 1
    base, more = divmod(units, size)
    start = index * base + min(index, more)
    return start, start + base + (index < more)
