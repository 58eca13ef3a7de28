"""Supervised fine-tuning: predict the next token, of answers alone."""

from __future__ import annotations

from paceline.tasks.pretrain import Pretrain


class Sft(Pretrain):
    """As pretraining. What is to be learned is what has a label: masks of roles and turns are the data's."""

    kind = "sft"
