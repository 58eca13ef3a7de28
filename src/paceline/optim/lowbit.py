"""AdamW whose moments are kept in 8 bits, by torchao: about 2 bytes a parameter instead of 8.

torchao quantises in blocks of 256 elements, and only tensors whose size is a multiple of it. Shards have any size, so
each local tensor is handed to torchao as two views: whole blocks, and a remainder of less than one block in fp32.

Checkpoints hold the moments in fp32, laid out as without quantisation: a run may be resumed with other ranks, another
engine or with plain AdamW. Saving and loading at the same layout gives the same codes, and scales to within rounding of
fp32; at another layout the blocks begin elsewhere and the moments are quantised once more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint.pieces import ShardedValue
from paceline.config.optim import OptimConfig
from paceline.errors import ConfigError, to_install
from paceline.optim.clip import GradientNorm
from paceline.optim.groups import ParameterGroup
from paceline.parallel.engine import MainParameter

BLOCK_SIZE = 256
_SMALLEST_QUANTISED = 4096  # torchao leaves smaller tensors in fp32
_STATES = ("exp_avg", "exp_avg_sq")


class AdamW8bitRule:
    """`torchao.optim.AdamW8bit` for some groups.

    torchao has no way to skip an update on the device, so `step` waits for the device once to read `found_inf`.

    Raises:
        ConfigError: torchao is not installed.
    """

    def __init__(self, config: OptimConfig, groups: Sequence[ParameterGroup]) -> None:
        try:
            from torchao.optim import AdamW8bit
        except ImportError as error:
            raise ConfigError(
                "optim.name = 'adamw8bit' needs the package torchao, which is not installed",
                evidence=str(error),
                next_step=f"Set optim.name = 'adamw', or {to_install('lowbit')}.",
            ) from error
        self._groups = tuple(groups)
        self._views = {
            parameter.name: _views(parameter.param.detach()) for group in groups for parameter in group.parameters
        }
        self._optimizer = AdamW8bit(
            [
                {
                    "params": [view for parameter in group.parameters for view in self._views[parameter.name]],
                    "weight_decay": group.weight_decay,
                    "lr": group.lr,
                }
                for group in self._groups
            ],
            betas=config.betas,
            eps=config.eps,
            block_size=BLOCK_SIZE,
        )
        for views in self._views.values():
            for view in views:
                # private, torchao 0.12 to 0.18: it makes its state in the first step, and a checkpoint comes before
                self._optimizer.state[view] = {
                    "step": torch.zeros(()),
                    "exp_avg": self._optimizer._new_buffer(view, True),
                    "exp_avg_sq": self._optimizer._new_buffer(view, False),
                }

    @torch.no_grad()
    def step(self, lr_factor: float, gradients: GradientNorm) -> None:
        if bool(gradients.found_inf):
            return
        for group, torch_group in zip(self._groups, self._optimizer.param_groups, strict=True):
            torch_group["lr"].fill_(group.lr * lr_factor)
            for parameter in group.parameters:
                gradient = parameter.param.grad
                if gradient is not None:
                    gradient.div_(gradients.divisor.to(gradient.device))
                    self._hand_over(parameter, gradient)
        with self._compilation():
            self._optimizer.step()
        for views in self._views.values():
            for view in views:
                view.grad = None

    def _hand_over(self, parameter: MainParameter, gradient: Tensor) -> None:
        views = self._views[parameter.name]
        for view, part in zip(views, _split(gradient), strict=True):
            view.grad = part

    def _compilation(self) -> AbstractContextManager[object]:
        """torchao compiles its update. On CPU that would need a C++ compiler and save nothing that matters."""
        views = next(iter(self._views.values()), [])
        if views and views[0].device.type == "cpu":
            return torch.compiler.set_stance("force_eager")
        return nullcontext()

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Parameter name -> state name -> fp32 copy laid out like the parameter. Hand it back to `load_state`."""
        return {
            parameter.name: {
                key: torch.cat([self._dequantised(view, key) for view in self._views[parameter.name]]).view_as(
                    parameter.param
                )
                if self._views[parameter.name]
                else torch.zeros_like(parameter.param)
                for key in _STATES
            }
            for group in self._groups
            for parameter in group.parameters
        }

    def load_state(self, values: Mapping[str, ShardedValue]) -> None:
        """Quantises what was loaded. `values`: "<name>/<state>" -> the (filled) pieces that `state()` was saved as."""
        for group in self._groups:
            for parameter in group.parameters:
                for key in _STATES:
                    local = torch.zeros_like(parameter.param)
                    _copy_pieces(values[f"{parameter.name}/{key}"], parameter.pieces(local))
                    for view, part in zip(self._views[parameter.name], _split(local), strict=True):
                        _store(self._optimizer.state[view][key], part)

    def _dequantised(self, view: nn.Parameter, key: str) -> Tensor:
        stored = self._optimizer.state[view][key]
        full: Tensor = stored.dequantize() if hasattr(stored, "codes") else stored.clone()
        return full.float()

    def num_state_bytes(self) -> int:
        """Bytes of the moments on this rank, as stored (codes and scales; the shared tables of 256 values left out)."""
        return sum(
            stored.codes.nbytes + stored.scale.nbytes if hasattr(stored, "codes") else stored.nbytes
            for views in self._views.values()
            for view in views
            for stored in (self._optimizer.state[view][key] for key in _STATES)
        )

    @property
    def step_count(self) -> int:
        for views in self._views.values():
            for view in views:
                return int(self._optimizer.state[view]["step"].item())
        return 0

    def set_step_count(self, count: int) -> None:
        for views in self._views.values():
            for view in views:
                self._optimizer.state[view]["step"].fill_(count)


def _split(local: Tensor) -> list[Tensor]:
    """1-D views of a contiguous tensor: whole blocks (if enough to be quantised), and the rest; no empty ones."""
    flat = local.view(-1)
    whole = flat.numel() // BLOCK_SIZE * BLOCK_SIZE
    if whole < _SMALLEST_QUANTISED:
        whole = 0
    return [part for part in (flat[:whole], flat[whole:]) if part.numel()]


def _views(local: Tensor) -> list[nn.Parameter]:
    return [nn.Parameter(part, requires_grad=False) for part in _split(local)]


def _store(stored: Any, values: Tensor) -> None:
    """Writes fp32 values into a moment so that values that came out of one give the same codes again.

    torchao takes a block's largest magnitude as its scale, but its signed table ends at -0.993 and 1: a block whose
    largest element is negative would come back with a smaller scale and other codes.
    """
    if not hasattr(stored, "codes"):
        stored.copy_(values)
        return
    from torchao.optim.quant_utils import quantize_8bit_with_qmap

    blocks = values.view(-1, BLOCK_SIZE)
    low, high = blocks.amin(1), blocks.amax(1)
    scale = torch.where(high > -low, high, low / stored.qmap[0]) if stored.signed else high
    scaled = blocks / scale.clamp(min=1e-12)[:, None]
    stored.codes.copy_(quantize_8bit_with_qmap(scaled.view(-1), stored.qmap).view_as(stored.codes))
    stored.scale.copy_(scale)


def _copy_pieces(source: ShardedValue, target: ShardedValue) -> None:
    for piece, into in zip(source.pieces, target.pieces, strict=True):
        assert piece.offsets == into.offsets, (piece.offsets, into.offsets)
        into.tensor.copy_(piece.tensor)
