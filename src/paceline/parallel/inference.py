"""How is a model spread over cards that only reads and writes?

The cuts of parameters are those of training (`costs/placement.py`), experts by their width. But a step of writing is
one token, which no sequence can be cut by: every rank sees all tokens, and sublayers end in an all-reduce.

    embedding     rows of this rank, summed            all-reduce
    attention     heads of this rank, summed           all-reduce
    feed-forward  width of this rank, summed           all-reduce; of experts one for all of them
    head          rows of this rank, joined            all-gather

Logits are joined from the same parts on every rank, so all draw the same token, bit for bit.

Source: Megatron-LM, arXiv:1909.08053, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config.model import ModelConfig
from paceline.costs.placement import local_box, share
from paceline.models.attention import GroupedQueryAttention, LatentAttention
from paceline.models.feed_forward import FeedForward
from paceline.models.moe import MoE
from paceline.models.router import Routing
from paceline.models.transformer import Transformer
from paceline.parallel.collectives import Axis
from paceline.parallel.regions import sum_replicated
from paceline.parallel.shards import Shard
from paceline.parallel.tensor import assert_divides
from paceline.parallel.vocabulary import Rows, gather_logits, look_up, vocabulary_head_loss


def spread_to_read(model: Transformer, axis: Axis) -> Mapping[str, Shard]:
    """Cuts a plain model on the meta device over ``axis``, in place. Without dropout, recomputation or gradients.

    Returns:
        Where each parameter of this rank lies in the plain model; nothing where the axis has one rank.
    """
    if axis.size == 1:
        return {}
    assert all(parameter.is_meta for parameter in model.parameters()), "build the model on the meta device"
    assert_divides(model.config, axis.size)
    rows = _rows(model.config, axis)
    shards = _cut_parameters(model, axis)
    for module in model.modules():
        if isinstance(module, GroupedQueryAttention | LatentAttention):
            _sum_output(module.o_proj, axis, "tp/attention")
        elif isinstance(module, FeedForward):
            _sum_output(module.down_proj, axis, "tp/feed_forward")
        elif isinstance(module, MoE):
            _sum_experts(module, axis)
    assert model.embed is not None and model.head is not None, "a whole model"
    _look_up_in_parts(model, rows)
    _join_logits(model, rows)
    return shards


def _rows(config: ModelConfig, axis: Axis) -> Rows:
    bounds = [share(config.vocab_size, axis.size, index) for index in range(axis.size)]
    start, stop = bounds[axis.index]
    return Rows(axis=axis, start=start, stop=stop, sizes=tuple(end - begin for begin, end in bounds))


def _cut_parameters(model: Transformer, axis: Axis) -> dict[str, Shard]:
    sizes, index = {"tp": axis.size, "etp": axis.size}, {"tp": axis.index, "etp": axis.index}
    shards = {}
    for name, parameter in list(model.named_parameters()):
        box = local_box(name, parameter.shape, model.config, sizes, index)
        shards[name] = Shard(whole=parameter.shape, offsets=box.offsets)
        if parameter.shape != torch.Size(box.shape):
            owner, _, leaf = name.rpartition(".")
            local = nn.Parameter(parameter.new_empty(box.shape), requires_grad=False)
            setattr(model.get_submodule(owner), leaf, local)
    return shards


def _sum_output(proj: nn.Linear, axis: Axis, name: str) -> None:
    def forward(x: Tensor) -> Tensor:
        out = sum_replicated(F.linear(x, proj.weight), axis, name)
        return out if proj.bias is None else out + proj.bias  # after the sum: once

    proj.forward = forward  # type: ignore[method-assign, assignment]


def _sum_experts(layer: MoE, axis: Axis) -> None:
    plain = layer.run_experts
    layer.experts.down_bias_share = 1.0 if axis.index == 0 else 0.0

    def run_experts(x_NC: Tensor, routing: Routing) -> Tensor:
        return sum_replicated(plain(x_NC, routing), axis, "tp/experts")

    layer.run_experts = run_experts  # type: ignore[method-assign]


def _look_up_in_parts(model: Transformer, rows: Rows) -> None:
    embed = model.embed
    assert embed is not None

    def look_up_part(tokens_BT: Tensor) -> Tensor:
        return sum_replicated(look_up(tokens_BT, embed.weight, rows), rows.axis, "tp/embedding")

    embed.look_up = look_up_part  # type: ignore[method-assign]


def _join_logits(model: Transformer, rows: Rows) -> None:
    head = model.head
    assert head is not None
    plain = head.forward

    def forward(*arguments: object) -> tuple[Tensor, Tensor | None]:
        result, num_tokens = plain(*arguments)  # type: ignore[arg-type]
        return (gather_logits(result, rows, "tp/logits") if num_tokens is None else result), num_tokens

    head.forward = forward  # type: ignore[method-assign, assignment]
    model.head_loss = vocabulary_head_loss(model.head_loss, rows)
