"""The `[task]` section: what is learned from a batch."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field

from paceline.config.base import Section

TaskKind = Literal["pretrain", "sft", "dpo", "orpo", "kto", "reward"]
TASK_KINDS: tuple[str, ...] = get_args(TaskKind)

PREFERENCE_KINDS = ("dpo", "orpo", "kto", "reward")
"""Losses over whole answers."""


class TaskConfig(Section):
    """What is learned from a batch."""

    kind: str = "pretrain"
    """`pretrain` and `sft` predict the next token (where there is a label), `dpo`, `orpo` and `reward` learn from pairs
    of answers, `kto` from answers that are desirable or not. A plugin may add its own kinds."""
    beta: float = Field(0.1, gt=0)
    """dpo, kto: how closely the policy is held to the reference; orpo: weight of the odds ratio."""
    dpo_loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """How a pair's log-ratios become a loss; `ipo` takes means over an answer's tokens."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """dpo, sigmoid: share of the pairs whose preference is taken to be the wrong way round."""
    reference: str = "initial"
    """dpo, kto: the reference model. `initial` is a copy of the weights that the run begins with (with adapters: the
    model without them), `none` a uniform one (dpo), anything else a folder: of Hugging Face, a run or a checkpoint."""
    precompute_reference: bool = False
    """Compute the reference's log-probabilities of all samples before the first step and keep them in a file
    (`data.cache_dir`, else the run folder): no second model in memory. Taken again by a run with the same samples and
    reference."""
    orpo_nll: Literal["all", "answer"] = "all"
    """orpo: what of the chosen text is fine-tuned on, prompt and answer or the answer alone."""
    desirable_weight: float = Field(1.0, ge=0)
    """kto: weight of desirable answers."""
    undesirable_weight: float = Field(1.0, ge=0)
    """kto: weight of undesirable answers."""
    center_rewards: float = Field(0.0, ge=0)
    """reward: weight of the squared sum of a pair's scores, which keeps them about 0."""
    neftune_alpha: float = Field(0.0, ge=0)
    """Uniform noise on embeddings while training, of width alpha / sqrt(tokens of the document * hidden_size); 0 = none
    (arXiv:2310.05914)."""

    @property
    def reads_reference(self) -> bool:
        """Whether the loss compares with a reference model."""
        return self.kind in ("dpo", "kto") and self.reference != "none"

    @property
    def learns_from_answers(self) -> bool:
        """Whether the loss is over whole answers, not tokens."""
        return self.kind in PREFERENCE_KINDS

    @property
    def reads_turns(self) -> bool:
        """Whether its data are turns, which a chat template makes into text; False for kinds of plugins."""
        return self.kind == "sft" or self.kind in PREFERENCE_KINDS
