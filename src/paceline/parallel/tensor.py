"""Tensor parallelism: which matrices are cut over the ranks of tp, and where they meet.

    residual stream      cut along the sequence, [B, T/tp, C]: norms, dropout, residual additions, routers, experts
      gather_sequence        all-gather            (backward: reduce-scatter)
    inside a sublayer    heads, or columns of the MLP, cut; every rank sees the whole sequence
      scatter_sum            reduce-scatter        (backward: all-gather)
    residual stream

Outside of sublayers a rank sees a part of the tokens, inside a part of the heads or columns: either way, the gradient
of a parameter that is whole on all ranks is partial on each, and is to be summed over them (`Shard.replicas`).

The model is changed from outside: its first and last products of a sublayer become those of `linear.py`, where they
overlap with their collectives.

Source: Megatron-LM, arXiv:1909.08053; sequence parallelism, arXiv:2205.05198.

Dims: B sequences, T tokens, C hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.config.model import ModelConfig
from paceline.costs.placement import copies, local_box, share
from paceline.kernels.cross_entropy import HeadLoss
from paceline.models.attention import GroupedQueryAttention, LatentAttention
from paceline.models.feed_forward import FeedForward
from paceline.models.transformer import Embedding, Head, Score, Transformer
from paceline.parallel.accumulate import place_of
from paceline.parallel.collectives import Axis
from paceline.parallel.linear import Meeting, column_products, row_product
from paceline.parallel.mesh import ParallelMesh
from paceline.parallel.regions import gather_replicated, gather_sequence, own_part, scatter_sum
from paceline.parallel.shards import Shard
from paceline.parallel.vocabulary import Rows, gather_logits, look_up, vocabulary_head_loss, vocabulary_log_probs

Sublayer = GroupedQueryAttention | LatentAttention | FeedForward

_TOKENS = 0
"""The dim that a feed-forward is gathered along. It treats every token alike, so their order does not matter, and
along the first dim nothing is copied."""
_SEQUENCE = 1


def shard_tensors(stage: Transformer, mesh: ParallelMesh) -> dict[str, Shard]:
    """Cuts a plain model, or a stage of one, over tp; in place, on the meta device or with its weights.

    Experts are left whole: see `expert/`. Collective: all ranks of the world call it for as many stages.

    Returns:
        An entry for every parameter of the stage that is no expert's; nothing where tp is 1.
    """
    axis, config = mesh["tp"], stage.config
    if axis.size == 1:
        return {}
    assert_divides(config, axis.size)
    kv_run, rows = _kv_run(config, mesh), _rows(config, axis)
    cut_already = stage.embed is not None and stage.embed.weight.shape[0] != config.vocab_size
    shards = _cut_parameters(stage, axis, kv_run)
    for name, module in stage.named_modules():
        if isinstance(module, GroupedQueryAttention | LatentAttention):
            _cut_sublayer(module, module.o_proj, meeting_of(module, axis))
        elif isinstance(module, FeedForward):
            shared = "tp/shared_experts" if name.endswith(".shared") else ""
            _cut_sublayer(module, module.down_proj, meeting_of(module, axis, shared))
    if stage.embed is not None and not cut_already:
        # an embedding that two stages of this rank share is changed once
        _cut_embedding(stage.embed, rows)
    if stage.head is not None:
        _gather_for_head(stage.head, rows)
        stage.head_loss = vocabulary_head_loss(stage.head_loss, rows)
        stage.log_probs = vocabulary_log_probs(stage.log_probs, rows)
    if stage.score is not None:
        _gather_scores(stage.score, axis)
    return shards


def assert_divides(config: ModelConfig, tp: int) -> None:
    """`config.check` tells the user; this is for us."""
    assert config.num_heads % tp == 0, f"{config.num_heads} heads over tp {tp}"
    if config.attention == "gqa":
        heads = config.kv_heads
        assert heads % tp == 0 or tp % heads == 0, f"{heads} key/value heads over tp {tp}"
    assert config.vocab_size >= tp


def _kv_run(config: ModelConfig, mesh: ParallelMesh) -> Axis | None:
    """The neighbours that hold the same key/value head, where there are some but not all. Whatever the stage has:
    making it is collective."""
    holders = mesh.size("tp") // config.kv_heads
    return mesh.runs("tp", holders) if config.attention == "gqa" and 1 < holders < mesh.size("tp") else None


def _rows(config: ModelConfig, axis: Axis) -> Rows:
    bounds = [share(config.vocab_size, axis.size, index) for index in range(axis.size)]
    start, stop = bounds[axis.index]
    return Rows(axis=axis, start=start, stop=stop, sizes=tuple(end - begin for begin, end in bounds))


# ---- parameters


def _cut_parameters(stage: Transformer, axis: Axis, kv_run: Axis | None) -> dict[str, Shard]:
    shards = {}
    for name, parameter in list(stage.named_parameters()):
        if ".experts." in name:
            continue
        whole = parameter.shape
        if name == "embed.weight":
            whole = torch.Size((stage.config.vocab_size, parameter.shape[1]))
        box = local_box(name, whole, stage.config, {"tp": axis.size}, {"tp": axis.index})
        shards[name] = Shard(
            whole=whole, offsets=box.offsets, replicas=_replicas(name, whole, stage.config, axis, kv_run)
        )
        if parameter.shape != torch.Size(box.shape):
            owner, _, leaf = name.rpartition(".")
            part = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.shape, strict=True))
            local = parameter.detach()[part].clone(memory_format=torch.contiguous_format)
            setattr(stage.get_submodule(owner), leaf, nn.Parameter(local, requires_grad=parameter.requires_grad))
    return shards


def _replicas(name: str, whole: torch.Size, config: ModelConfig, axis: Axis, kv_run: Axis | None) -> tuple[Axis, ...]:
    number = copies(name, whole, config, "tp", axis.size)
    if number == 1:
        return ()
    if number == axis.size:
        return (axis,)
    assert kv_run is not None and kv_run.size == number, f"{name}: {number} copies"
    return (kv_run,)


# ---- sublayers


def meeting_of(sublayer: Sublayer, axis: Axis, name: str = "") -> Meeting:
    """Where the ranks meet for its products, under ``name`` in place of the usual one."""
    if isinstance(sublayer, FeedForward):
        return Meeting(axis=axis, name=name or "tp/feed_forward", dim=_TOKENS)
    return Meeting(axis=axis, name=name or "tp/attention", dim=_SEQUENCE)


def _cut_sublayer(sublayer: Sublayer, out_proj: nn.Linear, meeting: Meeting) -> None:
    """Its first products gather the input; its last one scatters its output, summed."""
    axis, name, dim = meeting.axis, meeting.name, meeting.dim

    def project(x: Tensor) -> tuple[Tensor, ...]:
        projs = sublayer.in_projs
        weights, biases = tuple(proj.weight for proj in projs), tuple(proj.bias for proj in projs)
        places = tuple(place_of(proj) for proj in projs)
        return column_products(x, weights, biases, axis, name, dim=dim, places=places)

    def combine(x: Tensor) -> Tensor:
        return row_product(x, out_proj.weight, out_proj.bias, axis, name, dim=dim, place=place_of(out_proj))

    sublayer.project = project  # type: ignore[method-assign]
    out_proj.forward = combine  # type: ignore[method-assign, assignment]


# ---- both ends


def _cut_embedding(embed: Embedding, rows: Rows) -> None:
    plain = embed.forward

    def look_up_part(tokens_BT: Tensor) -> Tensor:
        return scatter_sum(look_up(tokens_BT, embed.weight, rows), rows.axis, "tp/embedding", dim=_SEQUENCE)

    def forward(tokens_BT: Tensor, positions_BT: Tensor) -> Tensor:
        return plain(tokens_BT, own_part(positions_BT, rows.axis, dim=_SEQUENCE))

    embed.look_up = look_up_part  # type: ignore[method-assign]
    embed.forward = forward  # type: ignore[method-assign]


def _gather_for_head(head: Head, rows: Rows) -> None:
    plain = head.forward

    def forward(
        hidden_BTC: Tensor, labels_BT: Tensor | None, head_loss: HeadLoss, tied_weight_VC: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        hidden_BTC = gather_sequence(hidden_BTC, rows.axis, "tp/head", dim=_SEQUENCE)
        result, num_tokens = plain(hidden_BTC, labels_BT, head_loss, tied_weight_VC)
        return (gather_logits(result, rows, "tp/logits") if labels_BT is None else result), num_tokens

    head.forward = forward  # type: ignore[method-assign]


def _gather_scores(score: Score, axis: Axis) -> None:
    """Each rank scores its part of the tokens; then all have every score, and go on alike."""
    plain = score.forward

    def forward(hidden_BTC: Tensor) -> Tensor:
        return gather_replicated(plain(hidden_BTC), axis, "tp/score", dim=_SEQUENCE)

    score.forward = forward  # type: ignore[method-assign]
