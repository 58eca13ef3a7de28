"""Expert parallelism on a plain model: which experts are here, how tokens come to them, what the router sees.

Expert ranks fold over all ranks of a pipeline stage, whatever these do for dense layers: the router and the dispatcher
take the tokens that are here, be it a part of a sequence, and every rank of `ep` x `etp` has others.
"""

from __future__ import annotations

import torch
from torch import nn

from paceline.config.model import ModelConfig
from paceline.costs.placement import CutAxis, copies, local_box, share
from paceline.models.moe import MoE, TokenDispatcher
from paceline.models.transformer import Transformer
from paceline.parallel.expert.all_gather import AllGatherDispatcher
from paceline.parallel.expert.all_to_all import AllToAllDispatcher
from paceline.parallel.expert.sequence import CutSequences
from paceline.parallel.mesh import ParallelMesh
from paceline.parallel.sequence import SequenceLayout
from paceline.parallel.shards import Shard


def shard_experts(stage: Transformer, mesh: ParallelMesh, layout: SequenceLayout) -> dict[str, Shard]:
    """Leaves each expert layer the experts of this rank, in place, on the meta device or with real values.

    Args:
        layout: how sequences are cut over `cp`; over `tp` each part is cut into neighbouring pieces.

    Returns:
        The expert parameters by name; empty without expert layers.
    """
    shards: dict[str, Shard] = {}
    cut_sequences = CutSequences(mesh, layout) if mesh.size("cp_tp") > 1 else None
    for path, layer in list(stage.named_modules()):
        if not isinstance(layer, MoE):
            continue
        if cut_sequences is not None:
            layer.router.sequences = cut_sequences
        num_experts = layer.experts.up_weight.shape[0]
        for leaf, parameter in list(layer.experts.named_parameters()):
            name = f"{path}.experts.{leaf}"
            shards[name], local = _cut(name, parameter, stage.config, mesh)
            setattr(layer.experts, leaf, local)
        if mesh.size("ep") * mesh.size("etp") > 1:
            _put_dispatcher(layer, mesh, make_dispatcher(mesh, num_experts))
    return shards


def make_dispatcher(mesh: ParallelMesh, num_experts: int) -> TokenDispatcher:
    """The one place where a dispatcher is chosen."""
    ep = mesh.size("ep")
    bounds = [share(num_experts, ep, index) for index in range(ep)]
    return AllToAllDispatcher(mesh["ep"], mesh["etp"], [stop - start for start, stop in bounds])


def gather_tokens(stage: Transformer, mesh: ParallelMesh) -> None:
    """Replaces the dispatchers of experts that take rows as they come (`parallel.expert_dispatch = "all_gather"`)."""
    if mesh.size("ep") * mesh.size("etp") == 1:
        return
    for layer in stage.modules():
        if isinstance(layer, MoE) and layer.experts.kernels is not None:
            start, end = share(layer.router.weight.shape[0], mesh.size("ep"), mesh["ep"].index)
            layer.dispatcher = AllGatherDispatcher(mesh["ep"], mesh["etp"], start, end)
            # shapes are fixed: nothing speaks against compiling it
            vars(layer).pop("run_experts", None)


def _put_dispatcher(layer: MoE, mesh: ParallelMesh, dispatcher: TokenDispatcher) -> None:
    layer.dispatcher = dispatcher
    # outputs of the ranks of `etp` are added up: one of them adds the bias
    layer.experts.down_bias_share = 1.0 if mesh["etp"].index == 0 else 0.0
    # numbers of rows differ from step to step: a graph for fixed shapes would be compiled again and again
    layer.run_experts = torch.compiler.disable(layer.run_experts)  # type: ignore[method-assign]


def _cut(name: str, parameter: nn.Parameter, model: ModelConfig, mesh: ParallelMesh) -> tuple[Shard, nn.Parameter]:
    axes: tuple[CutAxis, ...] = ("ep", "etp")
    for axis in axes:
        assert copies(name, parameter.shape, model, axis, mesh.size(axis)) in (1, mesh.size(axis)), (name, axis)
    assert copies(name, parameter.shape, model, "ep", mesh.size("ep")) == 1, "more ranks than experts"
    sizes: dict[str, int] = {axis: mesh.size(axis) for axis in axes}
    index: dict[str, int] = {axis: mesh[axis].index for axis in axes}
    box = local_box(name, parameter.shape, model, sizes, index)
    local = parameter.detach()
    for dim, (offset, length) in enumerate(zip(box.offsets, box.shape, strict=True)):
        local = local.narrow(dim, offset, length)
    # a copy: a view would keep the whole parameter in memory
    local = local.clone(memory_format=torch.contiguous_format)
    whole_over_etp = copies(name, parameter.shape, model, "etp", mesh.size("etp")) > 1
    shard = Shard(
        whole=parameter.shape,
        offsets=box.offsets,
        replicas=(mesh["etp"],) if whole_over_etp else (),
        expert=True,
    )
    return shard, nn.Parameter(local, requires_grad=parameter.requires_grad)
