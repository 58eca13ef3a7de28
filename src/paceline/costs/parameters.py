"""Which parameters are there, by name and shape, and which part of them does a rank hold?

Arithmetic over `ModelConfig.blocks()`: the names and shapes that `models/` builds (tests/costs hold them to it), cut
into stages and then as `costs/placement.py` says. Shapes, never elements, and each distinct place once, never each
rank: thousands of ranks and experts cost nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from paceline.config.lora import LoraConfig
from paceline.config.model import AttentionSpec, BlockSpec, FeedForwardSpec, ModelConfig, MoESpec
from paceline.config.run import RunConfig
from paceline.costs.grid import RankGrid
from paceline.costs.placement import Cut, CutAxis, LocalBox, is_expert, local_box, placement, share
from paceline.costs.stages import cut_stages, stages_of_rank

Shape = tuple[int, ...]


# ---- names and shapes


def model_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Every parameter of the plain model; a tied head has none of its own."""
    return part_shapes(model, range(model.num_layers), first=True, last=True)


def part_shapes(model: ModelConfig, blocks: range, *, first: bool, last: bool) -> dict[str, Shape]:
    """Every parameter of a part of the model: its blocks, the embedding in the first, norm, head and multi-token
    prediction in the last. The last has the embedding too if the head is tied to it or multi-token prediction reads it.
    """
    hidden = model.hidden_size
    shapes: dict[str, Shape] = {}
    if first or (last and (model.ties_head or model.mtp_layers)):
        shapes["embed.weight"] = (model.vocab_size, hidden)
        if model.position == "learned":
            shapes["embed.position_weight"] = (model.max_seq_len, hidden)
    specs = _specs(model)
    for index in blocks:
        shapes |= {f"blocks.{index}.{name}": shape for name, shape in block_shapes(model, specs[index]).items()}
    if last:
        shapes |= _norm("norm", model)
        if model.has_score:
            shapes["score.weight"] = (1, hidden)
        elif not model.tie_embeddings:
            shapes["head.weight"] = (model.vocab_size, hidden)
        for depth, block in enumerate(model.mtp_blocks(), start=1):
            shapes |= {f"mtp.{depth}.{name}": shape for name, shape in _mtp(model, block).items()}
    return shapes


@lru_cache(maxsize=8)
def _specs(model: ModelConfig) -> tuple[BlockSpec, ...]:
    return model.blocks()


def block_shapes(model: ModelConfig, block: BlockSpec) -> dict[str, Shape]:
    """Parameters of one layer, by their names inside it."""
    attention = _latent_attention if block.attention.kind == "mla" else _grouped_attention
    shapes = {f"attention.{name}": shape for name, shape in attention(block.attention)}
    for norm in ("attention", "feed_forward"):
        shapes |= _norm(f"{norm}_norm", model)
        if model.post_norm:
            shapes |= _norm(f"{norm}_post_norm", model)
    spec = block.feed_forward
    inside = _moe(spec) if isinstance(spec, MoESpec) else _feed_forward(spec)
    return shapes | {f"feed_forward.{name}": shape for name, shape in inside}


def _norm(name: str, model: ModelConfig) -> dict[str, Shape]:
    leaves = ("weight",) if model.norm == "rmsnorm" else ("weight", "bias")
    return {f"{name}.{leaf}": (model.hidden_size,) for leaf in leaves}


def _linear(name: str, rows: int, columns: int, bias: bool = False) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _grouped_attention(spec: AttentionSpec) -> Iterator[tuple[str, Shape]]:
    hidden, queries = spec.hidden_size, spec.num_heads * spec.qk_head_dim
    yield from _linear("q_proj", queries, hidden, spec.qkv_bias)
    for name in ("k_proj", "v_proj"):
        yield from _linear(name, spec.num_kv_heads * spec.qk_head_dim, hidden, spec.qkv_bias)
    yield from _linear("o_proj", hidden, queries, spec.out_bias)
    if spec.qk_norm:
        yield "q_norm.weight", (spec.qk_head_dim,)
        yield "k_norm.weight", (spec.qk_head_dim,)


def _latent_attention(spec: AttentionSpec) -> Iterator[tuple[str, Shape]]:
    hidden, heads, latent = spec.hidden_size, spec.num_heads, spec.kv_lora_rank
    if spec.q_lora_rank:
        yield from _linear("q_down_proj", spec.q_lora_rank, hidden, spec.qkv_bias)
        yield "q_norm.weight", (spec.q_lora_rank,)
        yield from _linear("q_up_proj", heads * spec.qk_head_dim, spec.q_lora_rank)
    else:
        yield from _linear("q_proj", heads * spec.qk_head_dim, hidden)
    yield from _linear("kv_down_proj", latent + spec.qk_rope_head_dim, hidden, spec.qkv_bias)
    yield "kv_norm.weight", (latent,)
    yield from _linear("kv_up_proj", heads * (spec.qk_nope_head_dim + spec.v_head_dim), latent)
    yield from _linear("o_proj", hidden, heads * spec.v_head_dim, spec.out_bias)


def _feed_forward(spec: FeedForwardSpec) -> Iterator[tuple[str, Shape]]:
    for name in ("gate_proj", "up_proj") if spec.gated else ("up_proj",):
        yield from _linear(name, spec.ffn_size, spec.hidden_size, spec.bias)
    yield from _linear("down_proj", spec.hidden_size, spec.ffn_size, spec.bias)


def _moe(spec: MoESpec) -> Iterator[tuple[str, Shape]]:
    experts, hidden, width = spec.num_experts, spec.hidden_size, spec.expert.ffn_size
    inputs = 2 if spec.expert.gated else 1
    yield "router.weight", (experts, hidden)
    yield "experts.up_weight", (experts, inputs, width, hidden)
    yield "experts.down_weight", (experts, hidden, width)
    if spec.expert.bias:
        yield "experts.up_bias", (experts, inputs, width)
        yield "experts.down_bias", (experts, hidden)
    if spec.shared is not None:
        for name, shape in _feed_forward(spec.shared):
            yield f"shared.{name}", shape
        if spec.routing.shared_gate:
            yield from _linear("shared_gate", 1, hidden)


def _mtp(model: ModelConfig, block: BlockSpec) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {"proj.weight": (model.hidden_size, 2 * model.hidden_size)}
    for name in ("hidden_norm", "embed_norm", "norm"):
        shapes |= _norm(name, model)
    return shapes | {f"block.{name}": shape for name, shape in block_shapes(model, block).items()}


def shapes_numel(shapes: Mapping[str, Shape]) -> int:
    """Elements."""
    return sum(math.prod(shape) for shape in shapes.values())


# ---- what a rank holds


def rank_shapes(config: RunConfig, pipeline_rank: int) -> dict[str, Shape]:
    """Whole shapes of the parameters whose stages lie on a rank of the pipeline, adapters among them."""
    total = config.parallel.stages
    stages = cut_stages(config, total)
    shapes: dict[str, Shape] = {}
    for stage in stages_of_rank(config.parallel, pipeline_rank):
        # a V schedule has first and last stage on one rank: what they share is there once
        shapes |= part_shapes(config.model, stages[stage], first=stage == 0, last=stage == total - 1)
    return with_adapters(shapes, config.lora)


def with_adapters(shapes: Mapping[str, Shape], lora: LoraConfig) -> dict[str, Shape]:
    """The same, and the parameters of the adapters beside them."""
    found = dict(shapes)
    for name, shape in shapes.items():
        found |= lora.adapter_shapes(name, shape)
    return found


def rank_parameters(config: RunConfig, world_size: int, coordinate: Mapping[str, int]) -> dict[str, LocalBox]:
    """The part of each parameter that the rank at ``coordinate`` (pp, tp, ep, etp; others do not matter) holds."""
    sizes = RankGrid(parallel=config.parallel, world_size=world_size).sizes
    shapes = rank_shapes(config, coordinate.get("pp", 0))
    return {name: local_box(name, shape, config.model, sizes, coordinate) for name, shape in shapes.items()}


def count_boxes(boxes: Mapping[str, LocalBox]) -> int:
    """Elements."""
    return sum(box.numel for box in boxes.values())


@dataclass(frozen=True, kw_only=True)
class Held:
    """Elements of parameters on one rank, before data parallelism shards anything."""

    dense: int
    experts: int

    @property
    def total(self) -> int:
        return self.dense + self.experts


class Holdings:
    """Elements on every rank of a layout.

    Dense parameters depend on a rank's place along pp and tp alone, experts on pp, ep and etp. Tensors that are cut
    alike are counted once, and nothing is listed by rank.
    """

    def __init__(self, config: RunConfig, world_size: int) -> None:
        self.grid = RankGrid(parallel=config.parallel, world_size=world_size)
        self._model = config.model
        self._shapes = [rank_shapes(config, rank) for rank in range(config.parallel.pp)]
        self._alike = [Counter(map(self._tensor, shapes.items())) for shapes in self._shapes]

    def of_rank(self, rank: int) -> Held:
        """What one rank holds; of the ranks of a stage the first holds the most, and the last the least."""
        place = self.grid.coordinate(rank)
        dense = experts = 0
        for tensor, times in self._alike[place["pp"]].items():
            count = times * tensor.numel_at(place, self.grid.sizes)
            dense, experts = (dense, experts + count) if tensor.expert else (dense + count, experts)
        return Held(dense=dense, experts=experts)

    @cached_property
    def one_copy(self) -> tuple[int, int]:
        """(elements that the ranks of one copy of the model hold together, elements among them that another rank of
        the copy holds too). The difference is the model's parameter count, whatever the layout.

        One copy: for dense parameters the pp x tp ranks of one data-parallel place, for experts pp x ep x etp ranks.
        """
        held = sum(times * self._held(tensor) for alike in self._alike for tensor, times in alike.items())
        once = {name: self._tensor((name, shape)) for shapes in self._shapes for name, shape in shapes.items()}
        distinct = sum(times * self._distinct(tensor) for tensor, times in Counter(once.values()).items())
        return held, held - distinct

    @cached_property
    def of_all_ranks(self) -> int:
        """Elements on all ranks together, data-parallel copies among them."""
        sizes = self.grid.sizes
        copies = {False: self.grid.world_size // (sizes["pp"] * sizes["tp"]), True: sizes["edp"]}
        return sum(
            times * copies[tensor.expert] * self._held(tensor)
            for alike in self._alike
            for tensor, times in alike.items()
        )

    def _tensor(self, named: tuple[str, Shape]) -> _Tensor:
        name, shape = named
        return _Tensor(shape=shape, cuts=placement(name, shape, self._model), expert=is_expert(name))

    def _held(self, tensor: _Tensor) -> int:
        return tensor.numel_over(self.grid.sizes, distinct=False)

    def _distinct(self, tensor: _Tensor) -> int:
        return tensor.numel_over(self.grid.sizes, distinct=True)


@dataclass(frozen=True, kw_only=True)
class _Tensor:
    """Tensors of one shape that are cut alike."""

    shape: Shape
    cuts: tuple[Cut, ...]
    expert: bool

    def numel_at(self, index: Mapping[str, int], sizes: Mapping[str, int]) -> int:
        """Elements of the part at ``index``, with axes of ``sizes``."""
        numel = math.prod(self.shape)
        for cut in self.cuts:
            start, stop = share(cut.units, sizes.get(cut.axis, 1), index.get(cut.axis, 0))
            numel = numel // cut.units * (stop - start)
        return numel

    def numel_over(self, sizes: Mapping[str, int], *, distinct: bool) -> int:
        """Elements on all ranks along tp, or ep and etp, together; or in their distinct parts.

        Each axis cuts a dimension of its own, so sums along axes multiply.
        """
        numel, cut_over = math.prod(self.shape), {cut.axis: cut.units for cut in self.cuts}
        axes: tuple[CutAxis, ...] = ("ep", "etp") if self.expert else ("tp",)
        for axis in axes:
            units = cut_over.get(axis)
            if units is None:
                numel *= 1 if distinct else sizes[axis]
                continue
            parts = [share(units, sizes[axis], index) for index in range(sizes[axis])]
            numel = numel // units * sum(stop - start for start, stop in (set(parts) if distinct else parts))
        return numel
