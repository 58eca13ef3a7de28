"""The `[task]` section: what is learned from a batch."""

from __future__ import annotations

from typing import Literal

from paceline.config.base import Section

TaskKind = Literal["pretrain", "sft", "dpo", "orpo", "kto", "reward"]


class TaskConfig(Section):
    """What is learned from a batch."""

    kind: str = "pretrain"
    """`pretrain` predicts the next token. A plugin may add its own kinds."""
