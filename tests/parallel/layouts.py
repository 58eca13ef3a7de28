"""A model whose gradients are made up, spread in every way: what is left is the engines' own work.

Each rank pulls at the part of each parameter that it holds with numbers of its own, ``loss = sum(pull * parameter)``.
So the gradient of an element is the sum of the pulls of all ranks that hold it, whatever the layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.config.parallel import ParallelConfig
from paceline.costs.placement import share
from paceline.models.transformer import Transformer
from paceline.parallel.collectives import Axis
from paceline.parallel.engine import Engine
from paceline.parallel.flat import FlatEngine
from paceline.parallel.fsdp import FsdpEngine
from paceline.parallel.mesh import ParallelMesh
from paceline.parallel.shards import Shard

CPU = torch.device("cpu")
BLOCKS = 4


@dataclass(frozen=True)
class Layout:
    """``stages``: blocks of each stage; ``held``: which stages each pipeline rank has."""

    parallel: Mapping[str, Any]
    stages: Sequence[range] = (range(BLOCKS),)
    held: Sequence[Sequence[int]] = ((0,),)
    tied: bool = False
    apart: bool = False
    """Gradients of weights are computed after those of activations, as in a zero-bubble schedule."""


HALVES = (range(2), range(2, 4))
QUARTERS = tuple(range(index, index + 1) for index in range(4))
LAYOUTS = {
    "tp": Layout({"tp": 2}),
    "tp, heads on runs": Layout({"tp": 4}),
    "tp outside": Layout({"tp": 2, "order": ("tp", "pp", "dp_replicate", "cp", "dp_shard")}),
    "cp": Layout({"cp": 2}),
    "experts over tp": Layout({"tp": 2, "ep": 2}),
    "experts and replicas": Layout({"dp_replicate": 2, "ep": 2}),
    "more ranks than experts": Layout({"ep": 1, "tp": 2, "dp_replicate": 2}),
    "ends": Layout({"pp": 2, "tp": 2}, HALVES, ((0,), (1,)), tied=True),
    "ends, sharded": Layout({"pp": 2}, HALVES, ((0,), (1,)), tied=True),
    "interleaved": Layout({"pp": 2}, QUARTERS, ((0, 2), (1, 3)), tied=True),
    "one rank, two stages": Layout({"ep": 2}, HALVES, ((0, 1),), tied=True),
    "v": Layout(
        {"pp": 2, "ep": 2, "pipeline_schedule": "zbv", "stages_per_rank": 2},
        QUARTERS,
        ((0, 3), (1, 2)),
        tied=True,
        apart=True,
    ),
}


def shapes(tied: bool) -> dict[str, torch.Size]:
    """Of the whole model, in its order."""
    found: dict[str, tuple[int, ...]] = {"embed.weight": (13, 4), "embed.position_weight": (5, 4)}
    for index in range(BLOCKS):
        found |= {
            f"blocks.{index}.norm_weight": (4,),
            f"blocks.{index}.q_weight": (8, 4),
            f"blocks.{index}.k_weight": (6, 4),
            f"blocks.{index}.o_weight": (4, 8),
            f"blocks.{index}.router_weight": (4, 6),
            f"blocks.{index}.feed_forward.experts.up_weight": (6, 2, 3, 4),
            f"blocks.{index}.feed_forward.experts.down_weight": (6, 4, 3),
        }
    found |= {"norm.weight": (4,)} | ({} if tied else {"head.weight": (13, 4)})
    return {name: torch.Size(shape) for name, shape in found.items()}


class Part(nn.Module):
    def __init__(self, prefix: str, local: Mapping[str, Sequence[int]]) -> None:
        super().__init__()
        self.prefix = prefix
        self.register_parameter("weight", None)
        for name, shape in local.items():
            if name.rpartition(".")[0] == prefix:
                value = torch.empty(*shape, dtype=torch.float64, device="meta")
                self.register_parameter(name.rpartition(".")[2], nn.Parameter(value))

    def forward(self, x: Tensor, pulls: Mapping[str, Tensor]) -> Tensor:
        for name, parameter in self.named_parameters(recurse=False):
            x = x + (parameter * pulls[f"{self.prefix}.{name}"]).sum()
        return x


class ToyBlock(Part):
    def __init__(self, prefix: str, local: Mapping[str, Sequence[int]]) -> None:
        super().__init__(prefix, local)
        self.feed_forward = nn.Module()
        self.feed_forward.experts = Part(f"{prefix}.feed_forward.experts", local)

    def forward(self, x: Tensor, pulls: Mapping[str, Tensor]) -> Tensor:
        return self.feed_forward.experts(super().forward(x, pulls), pulls)


class ToyStage(nn.Module):
    def __init__(
        self, blocks: range, local: Mapping[str, Sequence[int]], embed: Part | None, *, first: bool, last: bool
    ) -> None:
        super().__init__()
        self.is_first, self.is_last = first, last
        self.embed = embed
        self.blocks = nn.ModuleDict({str(index): ToyBlock(f"blocks.{index}", local) for index in blocks})
        self.norm = Part("norm", local) if last else None
        self.head = Part("head", local) if last else None
        self.mtp = nn.ModuleDict()

    def forward(self, x: Tensor, pulls: Mapping[str, Tensor]) -> Tensor:
        if self.embed is not None and self.is_first:
            x = self.embed(x, pulls)
        for block in self.blocks.values():
            x = block(x, pulls)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x, pulls), pulls)
            if "tied" in pulls and self.embed is not None:
                x = x + (self.embed.weight * pulls["tied"]).sum()
        return x

    def reset_buffers(self) -> None:
        pass


@dataclass
class Toy:
    """An engine and what it was made from."""

    engine: Engine
    mesh: ParallelMesh
    shards: dict[str, Shard]
    local: dict[str, tuple[int, ...]]
    layout: Layout
    rank: int
    expected: dict[str, Tensor] = field(default_factory=dict)
    """Gradients of the last step, whole."""

    def step(self, number: int, *, micro_batches: int = 3) -> Tensor:
        """Gradients are there, reduced, afterwards. Returns this rank's loss."""
        stages = [cast(ToyStage, stage) for stage in self.engine.stages]
        self.expected = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in self.engine.shapes.items()}
        outputs: list[list[Tensor]] = []
        inputs: list[list[Tensor]] = []
        self.engine.zero_gradients()
        for index, stage in enumerate(stages):
            pulls = [self._pulls(stage, 100 * number + 10 * index + batch) for batch in range(micro_batches)]
            inputs.append([torch.zeros((), dtype=torch.float64, requires_grad=True) for _ in pulls])
            outputs.append([stage(x, pull) for x, pull in zip(inputs[-1], pulls, strict=True)])
        for index in reversed(range(len(stages))):
            for batch, out in enumerate(outputs[index]):
                last = batch == micro_batches - 1
                with self.engine.accumulate(last and not self.layout.apart, index):
                    if self.layout.apart:
                        torch.autograd.grad(out, inputs[index][batch], retain_graph=True)
                    else:
                        out.backward()
        if self.layout.apart:
            for index, stage in enumerate(stages):
                for batch, out in enumerate(outputs[index]):
                    with self.engine.accumulate(batch == micro_batches - 1, index):
                        out.backward(inputs=list(stage.parameters()))
        self.engine.reduce_gradients()
        flat = torch.cat([value.flatten() for value in self.expected.values()])
        dist.all_reduce(flat)
        sizes = [value.numel() for value in self.expected.values()]
        for (name, value), total in zip(self.expected.items(), flat.split(sizes), strict=True):
            self.expected[name] = total.view_as(value)
        return torch.stack([out.detach() for row in outputs for out in row]).sum()

    def _pulls(self, stage: ToyStage, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1000 * seed + self.rank)
        names = [name for name in self.local if _in_stage(name, stage)]
        pulls = {name: torch.randn(self.local[name], generator=generator, dtype=torch.float64) for name in names}
        if self.layout.tied and stage.is_last:
            pulls["tied"] = torch.randn(self.local["embed.weight"], generator=generator, dtype=torch.float64)
        for name, pull in pulls.items():
            own = "embed.weight" if name == "tied" else name
            self.expected[own][box(self.shards[own].offsets, pull.shape)] += pull
        return pulls


def _in_stage(name: str, stage: ToyStage) -> bool:
    top, _, rest = name.partition(".")
    if top == "blocks":
        return rest.partition(".")[0] in stage.blocks
    return stage.is_first if top == "embed" else stage.is_last


def build(rank: int, world_size: int, layout: Layout, zero: int, **options: Any) -> Toy:
    config = ParallelConfig(zero=zero, **layout.parallel, **options)
    mesh = ParallelMesh(config, world_size=world_size, rank=rank, device_type="cpu")
    whole = shapes(layout.tied)
    runs = mesh.runs("tp", mesh.size("tp") // 2) if mesh.size("tp") > 1 else Axis.alone("tp")
    held = layout.held[mesh["pp"].index]
    ends_apart = layout.tied and not any({0, len(layout.stages) - 1} <= set(stages) for stages in layout.held)
    shards, local = {}, {}
    for name, shape in whole.items():
        last_only = 0 not in held
        shards[name], local[name] = _place(name, shape, mesh, runs, ends_apart=ends_apart, saved=not last_only)
    stages, embed = [], None
    for index in held:
        first, last = index == 0, index == len(layout.stages) - 1
        if first or (last and layout.tied):
            embed = embed or Part("embed", local)
        own = embed if first or (last and layout.tied) else None
        stages.append(ToyStage(layout.stages[index], local, own, first=first, last=last))
    mine = {name for stage in stages for name, _ in stage.named_parameters()}
    shards = {name: shard for name, shard in shards.items() if name in mine}
    kind = FlatEngine if config.engine == "flat" else FsdpEngine
    engine = kind(cast(list[Transformer], stages), config, mesh, "fp32", CPU, shards, whole)
    if isinstance(engine, FlatEngine):
        _cut_smaller(engine)
    engine.materialize(init)
    here = {name: shape for name, shape in local.items() if name in mine}
    return Toy(engine=engine, mesh=mesh, shards=shards, local=here, layout=layout, rank=rank)


def _place(
    name: str, whole: torch.Size, mesh: ParallelMesh, runs: Axis, *, ends_apart: bool, saved: bool
) -> tuple[Shard, tuple[int, ...]]:
    tp, ep = mesh["tp"], mesh["ep"]
    offsets, shape, replicas = [0] * len(whole), list(whole), (tp,)
    leaf = name.rpartition(".")[2]

    def cut(dim: int, axis: Axis, units: int) -> None:
        start, stop = share(units, axis.size, axis.index)
        width = whole[dim] // units
        offsets[dim], shape[dim] = start * width, (stop - start) * width

    if ".experts." in name:
        cut(0, ep, 6)
        shard = Shard(whole=whole, offsets=tuple(offsets), expert=True)
        return shard, tuple(shape)
    if leaf in ("q_weight", "o_weight") or name in ("embed.weight", "head.weight"):
        dim = int(leaf == "o_weight")
        cut(dim, tp, whole[dim])
        replicas = ()
    elif leaf == "k_weight":
        cut(0, tp, 2)
        replicas = (runs,) if tp.size > 2 else ()
    if name.startswith("embed.") and ends_apart:
        replicas = (*replicas, mesh["ends"])
        return Shard(whole=whole, offsets=tuple(offsets), replicas=replicas, saved=saved), tuple(shape)
    return Shard(whole=whole, offsets=tuple(offsets), replicas=replicas), tuple(shape)


def _cut_smaller(engine: FlatEngine) -> None:
    """parallel.bucket_mb starts at 1 MiB: more than the whole toy."""
    from paceline.parallel.buckets import plan_buckets

    for group in engine._groups:
        local = {name: site.parameter.shape for name, site in group._sites.items()}
        group.layout = plan_buckets(local, shard_degree=group.layout.shard_degree, bucket_elements=100)
        group._slots = group.layout.slots


def start(name: str, whole: Sequence[int]) -> Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(*whole, generator=generator, dtype=torch.float64)


def init(name: str, value: Tensor, whole: torch.Size, offsets: tuple[int, ...]) -> None:
    value.copy_(start(name, whole)[box(offsets, value.shape)])


def box(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
