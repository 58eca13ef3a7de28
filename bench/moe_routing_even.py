"""A plugin that gives every expert as many tokens: token n goes to the experts K n, K n + 1, ... of all, in turn.

    paceline train RECIPE --set 'run.plugins=["bench/moe_routing_even.py"]'

It takes the place of `select` in `paceline.models.router` for the whole process: for measuring what an even load would
bring, not for training.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.config.model import MoEConfig
from paceline.config.plugins import Registry
from paceline.models import router

plain_select = getattr(router.select, "plain", router.select)
"""A recipe may be read, and so this file loaded, more than once in a process."""


def select(scores_NE: Tensor, bias_E: Tensor | None, top_k: int, routing: MoEConfig) -> tuple[Tensor, Tensor]:
    """As `paceline.models.router.select`; groups of experts are not looked at."""
    tokens_N1 = torch.arange(scores_NE.shape[0], device=scores_NE.device)[:, None]
    experts_E = torch.arange(scores_NE.shape[1], device=scores_NE.device)
    chosen_NE = (experts_E - tokens_N1 * top_k) % scores_NE.shape[1] < top_k
    push_NE = torch.where(chosen_NE, 0.0, -math.inf)
    ungrouped = routing.model_copy(update={"num_groups": 1})
    return plain_select(scores_NE, push_NE, top_k, ungrouped)


select.plain = plain_select  # type: ignore[attr-defined]


def register(registry: Registry) -> None:
    router.select = select
