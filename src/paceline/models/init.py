"""How each parameter starts, decided by its name and shape alone.

Every parameter has its own random stream, seeded by (seed, name, block of rows): the start does not depend on the order
of modules, on how many ranks share a parameter, or on rows added to pad the vocabulary. A CPU and a GPU draw different
numbers.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

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


@torch.no_grad()
def init_parameter(name: str, value: Tensor, config: ModelConfig, seed: int) -> None:
    """Fills the full value of the parameter called `name` in place.

    Biases are 0, norms the identity, matrices normal with `initial_std`.
    """
    if "norm" in name.split(".")[-2] and name.endswith(".weight"):
        value.fill_(0.0 if config.norm_unit_offset else 1.0)
    elif name.endswith("bias"):
        value.zero_()
    else:
        fill_normal(value, initial_std(name, config), seed, name)


@torch.no_grad()
def fill_normal(value: Tensor, std: float, seed: int, name: str) -> None:
    """Normal numbers in place, a block of `_ROWS` rows of the flattened matrix at a time."""
    rows = value.view(-1, value.shape[-1])
    generator = torch.Generator(device=value.device)
    for number, start in enumerate(range(0, rows.shape[0], _ROWS)):
        digest = hashlib.sha256(f"{seed}/{name}/{number}".encode()).digest()
        generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        part = rows[start : start + _ROWS]
        drawn = torch.randn(_ROWS, rows.shape[1], generator=generator, device=value.device)
        part.copy_(drawn[: part.shape[0]] * std)
