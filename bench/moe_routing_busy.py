"""A plugin that sends every fifth token to the first expert of each layer, and no other token there.

    paceline train RECIPE --set 'run.plugins=["bench/moe_routing_busy.py"]'

The other experts of a token stay those that its router likes best. It takes the place of `select` in
`paceline.models.router` for the whole process: for measuring what an uneven load costs, not for training.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.config.model import MoEConfig
from paceline.config.plugins import Registry
from paceline.models import router

EVERY = 5
plain_select = getattr(router.select, "plain", router.select)
"""A recipe may be read, and so this file loaded, more than once in a process."""


def select(scores_NE: Tensor, bias_E: Tensor | None, top_k: int, routing: MoEConfig) -> tuple[Tensor, Tensor]:
    """As `paceline.models.router.select`. The weight of the first expert is its score, as for any other."""
    tokens_N = torch.arange(scores_NE.shape[0], device=scores_NE.device)
    push_N = torch.where(tokens_N % EVERY == 0, math.inf, -math.inf)
    first_E = torch.arange(scores_NE.shape[1], device=scores_NE.device) == 0
    push_NE = torch.where(first_E, push_N[:, None], torch.zeros((), device=scores_NE.device))
    return plain_select(scores_NE, push_NE if bias_E is None else bias_E + push_NE, top_k, routing)


select.plain = plain_select  # type: ignore[attr-defined]


def register(registry: Registry) -> None:
    router.select = select
