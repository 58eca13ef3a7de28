"""What does backward compute again instead of finding it stored?

| mode | stored of a block | computed again |
| --- | --- | --- |
| none | everything that backward needs | nothing |
| selective | outputs of matrix products and of attention | norms, activations, rotary positions, dropout |
| full | its input | the whole block |

Dropout draws the same numbers again (the state of the generators is kept).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from paceline.config.parallel import RecomputeMode
from paceline.errors import ConfigError
from paceline.kernels import experts, flash4, lora, lora_fp8
from paceline.parallel.ring import RING_OPERATION

_SAVED_NAMES = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_scaled_mm",
    "_grouped_mm",
    "_scaled_grouped_mm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)


def recompute(blocks: Sequence[nn.Module], modes: RecomputeMode | Sequence[RecomputeMode]) -> None:
    """Makes blocks recompute in their backward, in place: ``forward`` is wrapped, names of parameters stay.

    Args:
        modes: one for all blocks, or one for each.

    Raises:
        ConfigError: a list of another length than the number of blocks, or an unknown mode.
    """
    each = [modes] * len(blocks) if isinstance(modes, str) else list(modes)
    if len(each) != len(blocks):
        raise ConfigError(
            f"parallel.recompute lists {len(each)} layers, the model has {len(blocks)}",
            next_step="Give one entry a layer, or one mode for all.",
        )
    for block, mode in zip(blocks, each, strict=True):
        if mode == "none":
            continue
        if mode not in get_args(RecomputeMode):
            raise ConfigError(
                f"parallel.recompute = {mode!r} is not a mode", next_step="Use 'none', 'selective' or 'full'."
            )
        block.forward = _checkpointed(block.forward, mode)


def _checkpointed(forward: Callable[..., Any], mode: RecomputeMode) -> Callable[..., Any]:
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}
    if mode == "selective":
        options["context_fn"] = _selective_contexts

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if mode == "full" and torch.compiler.is_compiling():
            # said of each operation: torch 2.11 stores results of autograd functions in a graph that are not marked so
            return checkpoint(forward, *args, **options, context_fn=_full_contexts, **kwargs)
        return checkpoint(forward, *args, **options, **kwargs)

    return run


def _full_contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Marks for the compiler that nothing is to be stored."""
    return create_selective_checkpoint_contexts(_nothing_stored)


def _nothing_stored(context: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


def _selective_contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """What a block runs in, forward and again."""
    forward, again = create_selective_checkpoint_contexts(_policy)
    return forward, _OnlyStored(again)


class _OnlyStored(TorchDispatchMode):
    """Asks torch's mode about stored operations alone; all others simply run.

    Torch's mode insists that computing again calls nothing more often than the forward did. FSDP2's hooks on experts
    inside the block do: they wait for other things, and open other profiler spans, in the backward.
    """

    def __init__(self, stored: TorchDispatchMode) -> None:
        super().__init__()
        self._stored = stored

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation in _saved_operations():
            return self._stored.__torch_dispatch__(operation, types, args, kwargs)
        return operation(*args, **(kwargs or {}))


def _policy(context: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operation in _saved_operations():
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


@functools.cache
def _saved_operations() -> frozenset[Any]:
    """Overloads of the operations above, as far as this torch has them, our ring attention, FlashAttention-4,
    our experts, and linears with adapters."""
    found = [RING_OPERATION, experts.FORWARD_OPERATION, flash4.FORWARD_OPERATION]
    found += [lora.FORWARD_OPERATION, lora_fp8.FORWARD_OPERATION]
    for name in _SAVED_NAMES:
        packet = getattr(torch.ops.aten, name, None)
        if packet is not None:
            found += [getattr(packet, overload) for overload in packet.overloads()]
    return frozenset(found)
