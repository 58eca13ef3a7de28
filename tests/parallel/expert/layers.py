"""One expert layer on many ranks beside the same layer of one process: outputs, losses and every gradient.

Each rank is fed its own part of the batch and of each sequence by hand; what comes out, and the gradients of all ranks
put together from their places, must be those of the plain layer on everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.config.model import ModelConfig, MoEConfig
from paceline.config.parallel import ParallelConfig
from paceline.models.moe import BlockExtras, MoE
from paceline.models.transformer import Transformer
from paceline.parallel.compile import compile_blocks
from paceline.parallel.expert.fuse import fuse_experts
from paceline.parallel.expert.shard import gather_tokens, shard_experts
from paceline.parallel.mesh import ParallelMesh
from paceline.parallel.sequence import SequenceLayout
from paceline.parallel.shards import Shard
from tests.parallel.tiny import tiny_config, tiny_model

TOLERANCE = 1e-9
"""Relative error of a tensor in float64: sums in another order, nothing else."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout, an expert layer, and what is fed to it."""

    parallel: Mapping[str, Any]
    routing: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    sequences: int = 4
    """Of the global batch."""
    length: int = 8
    change: str = ""
    """Name of a function in `CHANGES`, applied to the layer and its whole input."""
    main_loss: float = 1.0
    compiled: bool = False
    kernels: bool = False
    """The experts of the spread layer take rows as they come."""
    gathered: bool = False
    """From all ranks, and pick their own."""


def _skip_first_expert(layer: MoE, x_BTC: Tensor) -> None:
    assert layer.router.expert_bias is not None
    layer.router.expert_bias[0] = -100.0


def _to_last_experts(layer: MoE, x_BTC: Tensor) -> None:
    """Every token chooses among the second half of the experts: half of the ranks of ep compute nothing."""
    layer.router.weight[: layer.router.weight.shape[0] // 2, 0] = -50.0
    x_BTC[..., 0] = 1.0


def _to_the_other_side(layer: MoE, x_BTC: Tensor) -> None:
    """Tokens of the first half of the batch choose among the last experts, and the other way round."""
    half = layer.router.weight.shape[0] // 2
    layer.router.weight[:half, 0], layer.router.weight[half:, 0] = -25.0, 25.0
    x_BTC[: len(x_BTC) // 2, :, 0], x_BTC[len(x_BTC) // 2 :, :, 0] = 1.0, -1.0


CHANGES: dict[str, Callable[[MoE, Tensor], None]] = {
    "": lambda layer, x_BTC: None,
    "nobody chooses expert 0": _skip_first_expert,
    "nobody chooses the first half": _to_last_experts,
    "tokens go elsewhere": _to_the_other_side,
}


@dataclass
class Side:
    """What one of the two sides computed."""

    out: Tensor
    extras: BlockExtras
    x_grad: Tensor
    gradients: dict[str, Tensor]


def model_of(case: Case) -> tuple[ModelConfig, Transformer]:
    """A float64 model with numbers that do not depend on the rank."""
    config = tiny_config(moe=True, **case.model)
    routing = MoEConfig(**{"ffn_size": 8, "layer_period": 2, "layer_offset": 1, **case.routing})
    config = config.model_copy(update={"moe": routing})
    model = tiny_model(config, dtype=torch.float64, device="cpu")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.4, generator=generator)
        for layer in model.moe_layers():
            if layer.router.expert_bias is not None:
                layer.router.expert_bias.normal_(0, 0.05, generator=generator)
    return config, model


def mesh_of(case: Case, rank: int, world_size: int) -> ParallelMesh:
    return ParallelMesh(ParallelConfig(**case.parallel), world_size=world_size, rank=rank, device_type="cpu")


def layout_of(case: Case) -> SequenceLayout:
    return SequenceLayout(case.parallel.get("cp", 1), case.parallel.get("cp_method", "ring"))


def own_part(whole_BT: Tensor, mesh: ParallelMesh, layout: SequenceLayout) -> Tensor:
    """This rank's sequences, and of each the positions it holds."""
    rows_BT = whole_BT.chunk(mesh.dp_size)[mesh.dp_rank]
    cp_length = whole_BT.shape[1] // mesh.size("cp")
    positions = layout.positions(mesh["cp"].index, cp_length).chunk(mesh.size("tp"))[mesh["tp"].index]
    return rows_BT[:, positions].contiguous()


def compare_all(rank: int, world_size: int, cases: Sequence[Case]) -> list[dict[str, float]]:
    """`compare` for each case; those of one layout share a mesh, since making one is slow."""
    meshes: dict[str, ParallelMesh] = {}
    results = []
    for case in cases:
        layout = str(case.parallel)
        if layout not in meshes:
            meshes[layout] = mesh_of(case, rank, world_size)
        results.append(compare(case, meshes[layout]))
    return results


def compare(case: Case, mesh: ParallelMesh) -> dict[str, float]:
    """The largest relative error of each kind, and sizes that show that the case is not empty. Collective."""
    config, model = model_of(case)
    C = config.hidden_size
    generator = torch.Generator().manual_seed(5)
    x_BTC, g_BTC = torch.randn(2, case.sequences, case.length, C, generator=generator, dtype=torch.float64)
    (layer,) = model.moe_layers()
    with torch.no_grad():
        CHANGES[case.change](layer, x_BTC)
    plain = _run(layer, x_BTC, g_BTC, case)

    layout = layout_of(case)
    shards = shard_experts(model, mesh, layout)
    if case.kernels:
        fuse_experts(model, "grouped", "bf16", torch.device("cpu"))
        assert layer.experts.kernels is not None
    if case.gathered:
        gather_tokens(model, mesh)
    if case.compiled:
        compile_blocks([layer], backend="aot_eager")
    mesh.traffic.take()
    ours = _run(layer, own_part(x_BTC, mesh, layout), own_part(g_BTC, mesh, layout), case)

    if case.compiled:
        torch._dynamo.reset()

    aux, load, dropped = ours.extras.aux_loss.clone(), ours.extras.load.clone(), ours.extras.dropped.clone()
    for value in (aux, load, dropped):
        dist.all_reduce(value, group=mesh["stage"].group)
    assert torch.equal(load, plain.extras.load) and int(dropped) == int(plain.extras.dropped)
    assert ours.out.dtype == aux.dtype == torch.float64
    whole = put_together(ours.gradients, plain.gradients, shards, mesh)
    return {
        "out": error(ours.out, own_part(plain.out, mesh, layout)),
        "x": error(ours.x_grad, own_part(plain.x_grad, mesh, layout)),
        "aux": error(aux, plain.extras.aux_loss),
        "gradients": max(error(whole[name], gradient) for name, gradient in plain.gradients.items()),
        "rows": float(sum(mesh.traffic.calls[f"{axis}/dispatch/{kind}"] for axis, kind in _DISPATCHES)),
        "router": plain.gradients[f"{_path(model)}.router.weight"].norm().item(),
        "dropped": float(plain.extras.dropped),
        "idle": float((plain.extras.load == 0).sum()),
    }


def put_together(
    gradients: Mapping[str, Tensor], like: Mapping[str, Tensor], shards: Mapping[str, Shard], mesh: ParallelMesh
) -> dict[str, Tensor]:
    """Gradients of whole parameters: every rank's at its place, summed over the ranks of the stage. Collective."""
    whole = {}
    for name, reference in like.items():
        total = torch.zeros_like(reference)
        place(total, gradients[name], shards.get(name))
        dist.all_reduce(total, group=mesh["stage"].group)
        whole[name] = total
    return whole


def place(whole: Tensor, local: Tensor, shard: Shard | None) -> None:
    """Writes a local tensor where it lies in the whole one."""
    if shard is None:
        whole.copy_(local)
        return
    assert whole.shape == shard.whole
    whole[tuple(slice(o, o + s) for o, s in zip(shard.offsets, local.shape, strict=True))] = local


def error(ours: Tensor, plain: Tensor) -> float:
    """||a - b|| / ||b||, or ||a|| where b is zero."""
    scale = plain.norm()
    return float((ours - plain).norm() / scale) if scale else float(ours.norm())


_DISPATCHES = (("ep", "all_to_all"), ("ep", "all_gather"), ("etp", "all_gather"))


def _run(layer: MoE, x_BTC: Tensor, g_BTC: Tensor, case: Case) -> Side:
    layer.zero_grad()
    x_BTC = x_BTC.clone().requires_grad_()
    out_BTC, extras = layer(x_BTC)
    loss = case.main_loss * (out_BTC * g_BTC).sum() + extras.aux_loss
    loss.backward()
    assert x_BTC.grad is not None
    gradients = {}
    for name, parameter in layer.named_parameters(prefix="blocks.1.feed_forward"):
        assert parameter.grad is not None, f"{name} has no gradient"
        gradients[name] = parameter.grad.clone()
    return Side(out_BTC.detach(), BlockExtras(*(value.detach() for value in extras)), x_BTC.grad, gradients)


def _path(model: Transformer) -> str:
    (path,) = (name for name, module in model.named_modules() if isinstance(module, MoE))
    return path
