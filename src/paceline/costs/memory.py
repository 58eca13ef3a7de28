"""How many bytes does a rank hold, and for what?

States are exact (from the shapes of a rank's parameters); activations are in `costs/activations.py`. Not in it: the
CUDA context and libraries (1-3 GB), communication buffers of NCCL, and fragmentation. Rule of thumb: an estimate under
80 % of the device's memory has not been seen to run out of it (arXiv:2411.06465, 454 runs).

Stages of a pipeline are never averaged: an estimate is of one position in the pipeline, and of the most loaded one.

States, bytes of a parameter on a rank. S shards: of dense parameters dp_shard x cp, of experts edp. g = 4 or 2 by
`accumulate_dtype`, m = moments (AdamW 8, 8-bit AdamW about 2.06, muon's matrices 4):

| engine | weights | gradients | masters | moments |
| --- | --- | --- | --- | --- |
| flat, bf16 (zero 0: S = 1) | 2 | g (+ 4 / S if bf16, unless `optim.fused_update`) | 4 / S | m / S |
| flat, fp32 | 4 | 4 | 0 (the weights) | m / S |
| fsdp | 4 / S, and gathered units in compute precision | 4 / S | 0 (the shards) | m / S |

With fp8 the flat engine also keeps the linears of blocks in fp8 twice, as they lie and transposed: 2 bytes an element
(`train.fp8_weight_cache`); with `train.fp8_weights_only` in place of the bf16 ones.

Frozen weights (`[lora]`) are held in compute precision, / S under FSDP, or in fp8 or NF4 (`lora.base`), and have
nothing else.

FSDP also holds whole: weights in compute precision (zero 2: all; zero 3: two blocks, one of them on its way, the head,
and an embedding that is used twice); and gradients that are not yet reduced (of one block, or, while several
micro-batches are accumulated, of all parameters in `reduce_dtype`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, fields

from paceline.config.optim import OptimConfig
from paceline.config.run import RunConfig
from paceline.costs.activations import activations_per_token, compute_bytes, logits_bytes
from paceline.costs.adapters import NF4_BYTES
from paceline.costs.grid import RankGrid
from paceline.costs.low_precision import linears_in_fp8
from paceline.costs.parameters import Shape, rank_shapes
from paceline.costs.placement import is_expert, local_box
from paceline.costs.reference import reference_bytes
from paceline.costs.stages import stages_of_rank

_EIGHT_BIT_MOMENTS = 2 * (1 + 4 / 256)
"""Two codes of a byte, and an fp32 scale for every 256 of each."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes on one rank."""

    weights: int
    """What the model computes with, or its shards."""
    gathered: int
    """FSDP: weights that are whole for a while, and gradients not yet reduced."""
    gradients: int
    masters: int
    moments: int
    activations: int
    """Kept for the backward pass of one micro-batch, and one block's more while it runs."""
    logits: int
    """Logits, their gradient, and what the loss keeps."""
    host: int
    """Offloaded states, in host memory; not in the total."""
    reference: int = 0
    """Weights of a reference model beside the trained one."""

    @property
    def total(self) -> int:
        """Bytes of device memory."""
        return sum(getattr(self, field.name) for field in fields(self) if field.name != "host")

    @property
    def states(self) -> int:
        return self.weights + self.gradients + self.masters + self.moments

    def as_dict(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"total": self.total}


def estimate(config: RunConfig, world_size: int) -> MemoryEstimate:
    """Device memory of the most loaded rank of `config` on `world_size` ranks.

    Raises:
        ConfigError: the degrees do not make the world size, or the layers do not make the stages.
    """
    return max(estimate_pipeline(config, world_size), key=lambda found: found.total)


def estimate_pipeline(config: RunConfig, world_size: int) -> tuple[MemoryEstimate, ...]:
    """Device memory at each position of the pipeline, of the most loaded rank there.

    Raises:
        ConfigError: as `estimate`.
    """
    grid = RankGrid(parallel=config.parallel, world_size=world_size)
    return tuple(_estimate_rank(config, grid, pipeline_rank) for pipeline_rank in range(config.parallel.pp))


def _estimate_rank(config: RunConfig, grid: RankGrid, pipeline_rank: int) -> MemoryEstimate:
    parallel, train = config.parallel, config.train
    held = _HeldParameters.of(config, grid, pipeline_rank)
    # cp deals out the tokens of a sequence; the head of every tp rank sees all of them
    tokens = train.micro_batch_size * train.seq_len // parallel.cp
    micro_batches = max(1, train.global_batch_size // (train.micro_batch_size * parallel.dp_degree(grid.world_size)))
    states = _flat_states(config, held) if parallel.engine == "flat" else _fsdp_states(config, held, micro_batches)
    has_loss = parallel.stages - 1 in stages_of_rank(parallel, pipeline_rank)
    return MemoryEstimate(
        **states,
        reference=reference_bytes(config, grid, pipeline_rank),
        activations=tokens * activations_per_token(config, pipeline_rank, micro_batches),
        logits=logits_bytes(config.model, train, tokens, parallel.tp, frozen=config.lora.on) if has_loss else 0,
    )


# ---- parameters of a rank


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Elements on a rank that are sharded over the same ranks."""

    total: int
    matrices: int
    """Those that muon updates."""
    shards: int

    @property
    def share(self) -> int:
        return -(-self.total // self.shards)


@dataclass(frozen=True, kw_only=True)
class _HeldParameters:
    """Of the first rank (tp, ep and etp 0) at a position of the pipeline, which has the most of what cannot be dealt
    out evenly."""

    groups: tuple[_Group, ...]
    """Of what learns."""
    frozen: tuple[_Group, ...]
    largest_block: int
    largest_learned_block: int
    embedding: int
    head: int
    fp8: int
    """Elements that are cast to fp8 and kept."""
    nf4: int
    """Elements that are kept in NF4 alone."""

    @classmethod
    def of(cls, config: RunConfig, grid: RankGrid, pipeline_rank: int) -> _HeldParameters:
        model, parallel, sizes = config.model, config.parallel, grid.sizes
        shapes = rank_shapes(config, pipeline_rank)
        numel = {name: local_box(name, shape, model, sizes, {}).numel for name, shape in shapes.items()}
        lora, zero = config.lora, parallel.zero > 0
        learned = {name for name in numel if not lora.on or lora.learns(name)}
        shards = (sizes["dp_shard"] * sizes["cp"], sizes["edp"]) if zero else (1, 1)
        return cls(
            groups=_groups(learned, numel, shapes, shards),
            frozen=_groups(numel.keys() - learned, numel, shapes, shards),
            largest_block=_largest_block(numel),
            largest_learned_block=_largest_block({name: numel[name] for name in learned}),
            embedding=sum(count for name, count in numel.items() if name.startswith("embed.")),
            head=numel.get("head.weight", 0),
            fp8=_in_fp8(numel, config),
            nf4=sum(count for name, count in numel.items() if lora.base == "nf4" and lora.adapts_linear(name)),
        )

    @property
    def total(self) -> int:
        return sum(group.total for group in self.groups)

    @property
    def whole(self) -> int:
        """All elements, frozen ones among them."""
        return self.total + sum(group.total for group in self.frozen)

    @property
    def frozen_share(self) -> int:
        return sum(group.share for group in self.frozen)

    def frozen_bytes(self, config: RunConfig, width: int) -> int:
        """Of the flat engine's frozen weights, at ``width`` bytes in the precision that the model computes in."""
        total = sum(group.total for group in self.frozen)
        if config.lora.base == "nf4":
            return width * (total - self.nf4) + int(NF4_BYTES * self.nf4)
        # fp8 twice, as they lie and transposed, in place of bf16
        return width * (total - self.fp8) if config.lora.base == "fp8" else width * total

    @property
    def share(self) -> int:
        return sum(group.share for group in self.groups)

    def moments(self, optim: OptimConfig) -> int:
        """Bytes of the optimizer's state on this rank."""
        return sum(moment_bytes(optim, group.total, group.matrices) // group.shards for group in self.groups)


def _groups(
    names: Set[str], numel: Mapping[str, int], shapes: Mapping[str, Shape], shards: tuple[int, int]
) -> tuple[_Group, ...]:
    """Dense parameters, and experts where there are some, over so many shards each."""
    experts = {name for name in names if is_expert(name)}
    dense = _group(names - experts, numel, shapes, shards[0])
    return (dense, _group(experts, numel, shapes, shards[1])) if experts else (dense,)


def _largest_block(numel: Mapping[str, int]) -> int:
    blocks: dict[str, int] = {}
    for name, count in numel.items():
        if name.startswith("blocks."):
            index = name.split(".", 2)[1]
            blocks[index] = blocks.get(index, 0) + count
    return max(blocks.values(), default=0)


def _group(names: Iterable[str], numel: Mapping[str, int], shapes: Mapping[str, Shape], shards: int) -> _Group:
    names = list(names)
    return _Group(
        total=sum(numel[name] for name in names),
        matrices=sum(numel[name] for name in names if is_matrix(name, shapes[name])),
        shards=shards,
    )


def _in_fp8(numel: Mapping[str, int], config: RunConfig) -> int:
    """Elements of the weights that are multiplied in fp8."""
    if config.train.precision != "fp8":
        return 0
    linears = {block.index: linears_in_fp8(config, block) for block in config.model.blocks()}
    of_linear = re.compile(r"blocks\.(\d+)\.(attention|feed_forward)\.(\w+_proj)\.weight")
    named = ((of_linear.fullmatch(name), count) for name, count in numel.items())
    return sum(count for found, count in named if found and found[3] in linears.get(int(found[1]), ()))


def is_matrix(name: str, shape: Shape) -> bool:
    """Whether muon would update a parameter of that whole shape: matrices of the blocks, no bias, embedding or head."""
    outside = name.startswith(("embed.", "head."))
    return not outside and len(shape) > 1 and not name.endswith("bias") and min(shape[-2:]) > 1


def moment_bytes(optim: OptimConfig, parameters: int, matrices: int) -> int:
    """Bytes of the optimizer's state for so many parameters, ``matrices`` of them matrices, before sharding."""
    if optim.name == "adamw":
        return 8 * parameters
    if optim.name == "adamw8bit":
        return int(_EIGHT_BIT_MOMENTS * parameters)
    return 8 * parameters - 4 * matrices


# ---- states


def _flat_states(config: RunConfig, held: _HeldParameters) -> dict[str, int]:
    compute, accumulate = compute_bytes(config.train), 2 if config.parallel.accumulate_dtype == "bf16" else 4
    parameters, share, moments = held.total, held.share, held.moments(config.optim)
    masters = 4 * share if compute < 4 else 0
    gradients, gradient_share = (
        accumulate * parameters,
        4 * share if accumulate < 4 and not config.optim.reads_any_gradient else 0,
    )
    if config.parallel.offload == "none":
        kept, train = parameters, config.train
        alone = train.fp8_weight_cache and train.fp8_weights_only and held.fp8 > 0
        if alone:  # in bf16 they are there for a block that casts its own, and for the one after it
            kept -= held.fp8
        return {
            "weights": compute * kept
            + held.frozen_bytes(config, compute)
            + (2 * held.fp8 if train.fp8_weight_cache else 0),
            "gathered": compute * min(held.fp8, 2 * held.largest_block) if alone else 0,
            "gradients": gradients + gradient_share,
            "masters": masters,
            "moments": moments,
            "host": 0,
        }
    # offloaded: weights, gradients and moments of the shard in fp32, and staging for the way back
    staging = compute * share if compute < 4 else 0
    return {
        "weights": compute * parameters + held.frozen_bytes(config, compute),
        "gathered": 0,
        "gradients": gradients,
        "masters": 0,
        "moments": 0,
        "host": 8 * share + staging + moments,
    }


def _fsdp_states(config: RunConfig, held: _HeldParameters, micro_batches: int) -> dict[str, int]:
    model, parallel, compute = config.model, config.parallel, compute_bytes(config.train)
    share, moments, whole = held.share, held.moments(config.optim), held.whole
    if parallel.zero == 3:
        # an embedding that is used twice (tied, or by multi-token prediction) is not given back after its first use
        kept = held.embedding if model.ties_head or model.mtp_layers else 0
        whole = min(whole, 2 * held.largest_block + held.head + kept)
    unreduced = 4 * held.largest_learned_block
    if micro_batches > 1:
        unreduced = (2 if parallel.reduce_dtype == "bf16" else 4) * held.total
    states = {
        "weights": 4 * share + compute * held.frozen_share,
        "gathered": compute * whole + unreduced,
        "gradients": 4 * share,
        "masters": 0,
        "moments": moments,
        "host": 0,
    }
    if parallel.offload == "none":
        return states
    on_host = {"moments": 0, "host": 8 * share + moments}
    # "optimizer": the host works on a copy of the shards
    return states | on_host | ({"weights": 0, "gradients": 0} if parallel.offload == "parameters" else {})
