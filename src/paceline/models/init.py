"""How each parameter starts, decided by its name and shape alone.

Every parameter has its own random stream, seeded by (seed, name, block of rows): the start does not depend on the order
of modules, on how many ranks share a parameter, or on rows added to pad the vocabulary. A CPU and a GPU draw different
numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.config.lora import LoraConfig
from paceline.config.model import ModelConfig

# rows are drawn in blocks of this many, always whole blocks, so that a row's numbers do not depend on how many follow
_ROWS = 1024

# projections that add to the residual stream, twice a layer
_RESIDUAL = ("o_proj.weight", "down_proj.weight", "experts.down_weight")


def initial_std(name: str, config: ModelConfig) -> float:
    """Standard deviation of the normal distribution that a matrix is drawn from."""
    if config.scaled_residual_init and name.endswith(_RESIDUAL):
        return config.init_std / math.sqrt(2 * config.num_layers)
    return config.init_std


@dataclass(frozen=True)
class WeightInit:
    """Fills parts of parameters: the same numbers whoever holds which part.

    Biases are 0, norms the identity, matrices normal with `initial_std`. Adapters are as `[lora]` says; what DoRA takes
    from the weights (lengths of rows) is 1 here.
    """

    config: ModelConfig
    seed: int
    lora: LoraConfig = field(default_factory=LoraConfig)

    @torch.no_grad()
    def __call__(self, name: str, value: Tensor, whole: Sequence[int], offsets: Sequence[int]) -> None:
        """Fills ``value``, the part that begins at ``offsets`` of the parameter ``name`` of shape ``whole``."""
        if "norm" in name.split(".")[-2] and name.endswith(".weight"):
            value.fill_(0.0 if self.config.norm_unit_offset else 1.0)
        elif name.endswith(("bias", ".lora_b")):
            value.zero_()
        elif name.endswith(".lora_magnitude"):
            value.fill_(1.0)
        elif name.endswith(".lora_a"):
            self._fill_adapter(value, whole, offsets, f"{self.seed}/{name}")
        else:
            _fill(value, whole, offsets, initial_std(name, self.config), f"{self.seed}/{name}")

    def _fill_adapter(self, value: Tensor, whole: Sequence[int], offsets: Sequence[int], stream: str) -> None:
        if self.lora.init == "gaussian":
            _fill(value, whole, offsets, 1 / whole[0], stream)
            return
        _fill(value, whole, offsets, 1 / math.sqrt(whole[1]), stream, draw=_uniform)


Draw = Callable[..., Tensor]
"""As `torch.randn`."""


def _uniform(*sizes: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Within -1 and 1."""
    return torch.rand(*sizes, generator=generator, device=device).mul_(2).sub_(1)


def _fill(
    value: Tensor,
    whole: Sequence[int],
    offsets: Sequence[int],
    factor: float,
    stream: str,
    *,
    draw: Draw = torch.randn,
) -> None:
    """Random numbers times ``factor``, in place, a block of `_ROWS` rows of the flattened matrix at a time; others are
    not drawn."""
    if not value.numel():
        return
    rows = _row_numbers(value.shape, whole, offsets)
    columns = slice(offsets[-1], offsets[-1] + value.shape[-1])
    own = value.view(-1, value.shape[-1])
    generator = torch.Generator(device=value.device)
    blocks, counts = (rows // _ROWS).unique_consecutive(return_counts=True)
    start = 0
    for number, count in zip(blocks.tolist(), counts.tolist(), strict=True):
        digest = hashlib.sha256(f"{stream}/{number}".encode()).digest()
        generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        drawn = draw(_ROWS, whole[-1], generator=generator, device=value.device)
        first = int(rows[start]) - number * _ROWS
        if int(rows[start + count - 1]) - number * _ROWS == first + count - 1:
            part = drawn[first : first + count, columns]
        else:
            part = drawn[rows[start : start + count].to(value.device) - number * _ROWS, columns]
        own[start : start + count].copy_(part * factor)
        start += count


def _row_numbers(shape: Sequence[int], whole: Sequence[int], offsets: Sequence[int]) -> Tensor:
    """int64, ascending: which rows of the flattened whole (all dims but the last) a part has, in its own order."""
    rows = torch.zeros(1, dtype=torch.int64)
    for size, here, offset in zip(whole[:-1], shape[:-1], offsets[:-1], strict=True):
        rows = (rows[:, None] * size + torch.arange(offset, offset + here)).flatten()
    return rows
