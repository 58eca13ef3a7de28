"""Which parts of a stage does FSDP2 gather together, and over which ranks?"""

from __future__ import annotations

from collections.abc import Callable, Set

import torch
import torch.distributed.tensor as distributed_tensor
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from paceline.config.parallel import ParallelConfig
from paceline.models.transformer import Transformer
from paceline.parallel.mesh import ParallelMesh
from paceline.parallel.parameters import DTYPES, Precision


def shard_stage(
    stage: Transformer,
    config: ParallelConfig,
    mesh: ParallelMesh,
    precision: Precision,
    device: torch.device,
    *,
    experts: Set[nn.Module],
    ignored: Set[nn.Parameter],
    keep_whole: bool,
) -> None:
    """Units: each block, the embedding, norm and head, experts by themselves, and what is left with the root.

    An embedding that is used in two places of the stage (tied, or by multi-token prediction) stays with the root, which
    is whole for the whole step: a unit of its own would be reduced once for each use.

    Args:
        experts: the modules that are sharded over `edp` instead.
        ignored: parameters that somebody else looks after.
        keep_whole: units are not freed after their forward.
    """
    dense_mesh = mesh.device_mesh(*(("dp_replicate",) if mesh.size("dp_replicate") > 1 else ()), "dp_shard_cp")
    expert_mesh = mesh.device_mesh("edp") if experts else None
    policy = _precision_policy(config, precision, stage)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if config.offload == "parameters" else OffloadPolicy()

    def shard(unit: nn.Module | list[nn.Module], *, reshard: bool, over: DeviceMesh = dense_mesh) -> None:
        inside = {id(p) for module in (unit if isinstance(unit, list) else [unit]) for p in module.parameters()}
        fully_shard(
            unit,
            mesh=over,
            reshard_after_forward=reshard,
            shard_placement_fn=None if over is dense_mesh else _even_cut(over.size()),
            mp_policy=policy,
            offload_policy=offload,
            ignored_params={parameter for parameter in ignored if id(parameter) in inside} or None,
        )

    embed, head = stage.embed, stage.head
    used_twice = head is not None and (head.weight is None or len(stage.mtp) > 0)
    if embed is not None and not used_twice and not any(parameter in ignored for parameter in embed.parameters()):
        shard(embed, reshard=not keep_whole)
    blocks = [*stage.blocks.values(), *stage.mtp.values()]
    for block in blocks:
        # backward begins with the last one: freeing it after its forward would only gather it again at once
        reshard = not keep_whole and block is not blocks[-1]
        for module in block.modules():
            if module in experts:
                assert expert_mesh is not None
                shard(module, reshard=reshard, over=expert_mesh)
        shard(block, reshard=reshard)
    if head is not None and not used_twice:
        assert stage.norm is not None
        shard([stage.norm, head], reshard=False)
    shard(stage, reshard=False)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            # SUM: the loss is already divided by all tokens. Forced, since a factor alone becomes PREMUL_SUM, which
            # gloo has not
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def finish_backward(root: FSDPModule) -> None:
    """Sends the gradients of all units of a stage now, outside of any backward.

    FSDP2 does this in hooks that run when gradients of activations are there. A zero-bubble schedule computes those of
    weights later, and there is no public way to say so: torch's own pipelines call the same private functions (2.11 to
    2.13).
    """
    root.set_requires_gradient_sync(True)
    root.set_is_last_backward(True)
    root.set_reshard_after_backward(True)
    state = fully_shard.state(root)  # type: ignore[attr-defined]
    for unit in state._state_ctx.all_states:
        several = getattr(unit, "_fsdp_param_groups", None)
        groups = several if several is not None else [unit._fsdp_param_group]
        for group in groups:
            if group is not None:
                group.post_backward()
    state._root_post_backward_final_callback()


def _precision_policy(config: ParallelConfig, precision: Precision, stage: nn.Module) -> MixedPrecisionPolicy:
    # inputs are not cast: hidden states come in the compute dtype, and angles and router losses must stay in fp32
    doubles = any(parameter.dtype == torch.float64 for parameter in stage.parameters())
    return MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if precision == "bf16" else None,
        reduce_dtype=None if doubles else DTYPES[config.reduce_dtype],
        cast_forward_inputs=False,
    )


def _even_cut(size: int) -> Callable[[nn.Parameter], distributed_tensor.Shard | None]:
    """Few experts do not divide by many ranks, and rows that are padded are memory: a dimension that does is cut."""

    def placement(parameter: nn.Parameter) -> distributed_tensor.Shard | None:
        return next(
            (distributed_tensor.Shard(dim) for dim, rows in enumerate(parameter.shape) if rows % size == 0), None
        )

    return placement
