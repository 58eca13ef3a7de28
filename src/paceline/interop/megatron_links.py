"""What are our tensors called in a Megatron-LM checkpoint, and where do they lie in its tensors?

Layers are stacked in one tensor with the layer as first index, or have a tensor each; so are experts. Query, key and
value rows lie together, by group: its query heads, its key head, its value head. Gate and up of a gated MLP lie one
after the other, or apart with `_w` and `_v`. A norm belongs to the matrix that follows it, or has a name of its own.

Sources: Megatron Core 0.16, `models/gpt`, `transformer/attention.py`, `mlp.py`, `moe/experts.py`,
`multi_latent_attention.py`; held against checkpoints that it wrote (docs/convert.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch

from paceline.checkpoint.pieces import Box
from paceline.config.model import ModelConfig
from paceline.interop.hf_links import halves_from_pairs, model_shapes
from paceline.interop.links import Link, LinkTable, whole

_OUTSIDE = {
    "embed.weight": "embedding.word_embeddings.weight",
    "embed.position_weight": "embedding.position_embeddings.weight",
    "norm.weight": "decoder.final_layernorm.weight",
    "norm.bias": "decoder.final_layernorm.bias",
    "head.weight": "output_layer.weight",
}

_NORMS = {
    "attention_norm": ("self_attention.linear_qkv.layer_norm_{w}", "input_layernorm.{w}"),
    "feed_forward_norm": ("mlp.linear_fc1.layer_norm_{w}", "pre_mlp_layernorm.{w}"),
    "attention.q_norm": ("self_attention.q_layernorm.{w}", "self_attention.linear_q_up_proj.layer_norm_{w}"),
    "attention.k_norm": ("self_attention.k_layernorm.{w}",),
    "attention.kv_norm": ("self_attention.kv_layernorm.{w}", "self_attention.linear_kv_up_proj.layer_norm_{w}"),
}
"""Our module -> its names there; which one it is depends on what follows the norm and on the kernels that were used."""

_MATRICES = {
    "attention.o_proj": "self_attention.linear_proj.{w}",
    "attention.q_down_proj": "self_attention.linear_q_down_proj.{w}",
    "attention.q_up_proj": "self_attention.linear_q_up_proj.{w}",
    "attention.kv_down_proj": "self_attention.linear_kv_down_proj.{w}",
    "attention.kv_up_proj": "self_attention.linear_kv_up_proj.{w}",
    "feed_forward.down_proj": "mlp.linear_fc2.{w}",
    "feed_forward.router": "mlp.router.{w}",
    "feed_forward.shared.down_proj": "mlp.shared_experts.linear_fc2.{w}",
}
_GATED = {"feed_forward": "mlp.linear_fc1.{w}", "feed_forward.shared": "mlp.shared_experts.linear_fc1.{w}"}
_QKV = "self_attention.linear_qkv.{w}"


class Names:
    """Finds what a tensor of a layer is called in one checkpoint."""

    def __init__(self, found: Mapping[str, torch.Size]) -> None:
        self._found = found

    def layer(self, layer: int, *suffixes: str) -> tuple[str, tuple[int, ...]]:
        """(name, leading indices) of the first of ``suffixes`` that is there; of none, the first as it would be."""
        for suffix in suffixes:
            for name, lead in ((f"decoder.layers.{layer}.{suffix}", ()), (f"decoder.layers.{suffix}", (layer,))):
                if name in self._found:
                    return name, lead
        return f"decoder.layers.{layer}.{suffixes[0]}", ()

    def has(self, layer: int, suffix: str) -> bool:
        return self.layer(layer, suffix)[0] in self._found


class NewNames(Names):
    """The names of a checkpoint that is to be written, for Transformer Engine's layers (Megatron-LM's default)."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__({})
        self._model = model
        blocks = model.blocks()
        self._stacked = all(block.is_moe == blocks[0].is_moe for block in blocks)

    def layer(self, layer: int, *suffixes: str) -> tuple[str, tuple[int, ...]]:
        chosen = suffixes[0]
        if len(suffixes) > 1:
            own_name = {
                "input_layernorm": self._model.attention == "mla",
                "pre_mlp_layernorm": self._model.blocks()[layer].is_moe,
                "self_attention": self._model.attention == "mla",
            }
            chosen = suffixes[1] if own_name[suffixes[1].split(".")[0]] else suffixes[0]
        return (f"decoder.layers.{chosen}", (layer,)) if self._stacked else (f"decoder.layers.{layer}.{chosen}", ())

    def has(self, layer: int, suffix: str) -> bool:
        return not (suffix.endswith(("_w", "_v")) or ".experts.0." in suffix)


def megatron_links(model: ModelConfig, names: Names) -> LinkTable:
    """The links of ``model``, without multi-token prediction, in a checkpoint whose tensors have ``names``."""
    shapes = {name: shape for name, shape in model_shapes(model).items() if not name.startswith("mtp.")}
    links = {name: tuple(_links(name, shape, model, names)) for name, shape in shapes.items()}
    return LinkTable(links=links, shapes=shapes)


def _links(name: str, shape: torch.Size, model: ModelConfig, names: Names) -> Iterator[Link]:
    if name in _OUTSIDE:
        yield Link(ours_at=whole(shape), theirs=_OUTSIDE[name], theirs_at=whole(shape))
        return
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)\.(\w+)", name)
    assert match is not None, name
    layer, module, what = int(match[1]), match[2], match[3]
    if module in _NORMS:
        yield _whole(shape, *names.layer(layer, *(suffix.format(w=what) for suffix in _NORMS[module])))
    elif model.attention == "gqa" and (part := re.fullmatch(r"attention\.([qkv])_proj", module)):
        yield from _groups(part[1], shape, model, *names.layer(layer, _QKV.format(w=what)))
    elif module == "attention.q_proj":
        yield _turned(shape, model, *names.layer(layer, f"self_attention.linear_q_proj.{what}"))
    elif module in ("attention.q_up_proj", "attention.kv_down_proj"):
        tail = module.endswith("kv_down_proj")
        yield _turned(shape, model, *names.layer(layer, _MATRICES[module].format(w=what)), tail=tail)
    elif module == "feed_forward.experts":
        yield from _experts(what, shape, model, layer, names)
    elif module in ("feed_forward.shared_gate",):
        yield _whole(shape, *names.layer(layer, "mlp.shared_experts.gate_weight"))
    elif module in _MATRICES:
        yield _whole(shape, *names.layer(layer, _MATRICES[module].format(w=what)))
    else:
        yield _input(module, what, shape, model, layer, names)


def _whole(shape: torch.Size, theirs: str, lead: tuple[int, ...]) -> Link:
    return Link(ours_at=whole(shape), theirs=theirs, theirs_at=_led(whole(shape), lead), theirs_lead=len(lead))


def _led(box: Box, lead: tuple[int, ...]) -> Box:
    return Box(offsets=(*lead, *box.offsets), sizes=(*(1 for _ in lead), *box.sizes))


def _turned(shape: torch.Size, model: ModelConfig, theirs: str, lead: tuple[int, ...], *, tail: bool = False) -> Link:
    """As in DeepSeek's own weights, rotary rows come in pairs there and as halves here."""
    head = shape[0] if tail else model.qk_head_dim
    return Link(
        ours_at=whole(shape),
        theirs=theirs,
        theirs_at=_led(whole(shape), lead),
        theirs_lead=len(lead),
        rows=halves_from_pairs(shape[0], head, model.qk_rope_head_dim),
    )


def _groups(part: str, shape: torch.Size, model: ModelConfig, theirs: str, lead: tuple[int, ...]) -> Iterator[Link]:
    """Rows of a group there: the heads of its queries, its key, its value."""
    width, per_group = model.qk_head_dim, model.num_heads // model.kv_heads
    rows = (per_group if part == "q" else 1) * width
    begin = {"q": 0, "k": per_group, "v": per_group + 1}[part] * width
    for group in range(model.kv_heads):
        ours = Box(offsets=(group * rows, *(0 for _ in shape[1:])), sizes=(rows, *shape[1:]))
        offset = group * (per_group + 2) * width + begin
        there = Box(offsets=(offset, *ours.offsets[1:]), sizes=ours.sizes)
        yield Link(ours_at=ours, theirs=theirs, theirs_at=_led(there, lead), theirs_lead=len(lead))


def _input(module: str, what: str, shape: torch.Size, model: ModelConfig, layer: int, names: Names) -> Link:
    """Gate or up of an MLP: one after the other, or apart; the only matrix where the activation is not gated."""
    parent, _, own = module.rpartition(".")
    suffix = _GATED[parent].format(w=what)
    gated = model.activation in ("swiglu", "geglu")
    apart = suffix + ("_w" if own == "gate_proj" else "_v")
    if gated and names.has(layer, apart):
        return _whole(shape, *names.layer(layer, apart))
    theirs, lead = names.layer(layer, suffix)
    start = shape[0] if gated and own == "up_proj" else 0
    there = Box(offsets=(start, *(0 for _ in shape[1:])), sizes=tuple(shape))
    return Link(ours_at=whole(shape), theirs=theirs, theirs_at=_led(there, lead), theirs_lead=len(lead))


def _experts(what: str, shape: torch.Size, model: ModelConfig, layer: int, names: Names) -> Iterator[Link]:
    """Ours are [E, inputs, F, C] and [E, C, F]; theirs [E, inputs * F, C] and [E, C, F], stacked or one by one."""
    kind, which = ("linear_fc1" if what.startswith("up_") else "linear_fc2"), what.partition("_")[2]
    alone = names.has(layer, f"mlp.experts.experts.0.{kind}.{which}") or names.has(
        layer, f"mlp.experts.experts.0.{kind}.{which}_w"
    )
    inputs = shape[1] if kind == "linear_fc1" else 1
    tail = tuple(shape[2:]) if kind == "linear_fc1" else tuple(shape[1:])
    for expert in range(shape[0]):
        for number in range(inputs):
            ours_lead = (expert, number) if kind == "linear_fc1" else (expert,)
            suffix = f"mlp.experts.experts.{expert}.{kind}.{which}" if alone else f"mlp.experts.experts.{kind}.{which}"
            start = number * tail[0]
            if inputs == 2 and names.has(layer, apart := f"{suffix}_{'wv'[number]}"):
                suffix, start = apart, 0
            theirs, lead = names.layer(layer, suffix)
            lead = lead if alone else (*lead, expert)
            there = Box(offsets=(start, *(0 for _ in tail[1:])), sizes=tail)
            yield Link(
                ours_at=_led(Box(offsets=(0,) * len(tail), sizes=tail), ours_lead),
                theirs=theirs,
                theirs_at=_led(there, lead),
                ours_lead=len(ours_lead),
                theirs_lead=len(lead),
            )
