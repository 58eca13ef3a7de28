"""Losses, gradients and metrics equal TRL's on the same batch (`trl/make_values.py`), to 1e-5.

TRL pads each answer to a row of its own; here all are packed into one row, or two, with padding behind.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from paceline.config.task import TaskConfig
from paceline.data.batch import Batch
from paceline.models.transformer import Transformer
from paceline.tasks.documents import REFERENCE, alone, log_prob_sums
from paceline.tasks.dpo import Dpo
from paceline.tasks.kto import Kto
from paceline.tasks.orpo import Orpo
from paceline.tasks.reward import Reward
from paceline.tasks.sft import Sft
from paceline.tasks.task import MEAN, Task, traits_of
from tests.tasks.answers import Text, our_name, pair_texts, row, rows, trl_batch, trl_model, trl_values

CLOSE = 1e-5
TASKS: dict[str, Task] = {
    "dpo_sigmoid": Dpo(TaskConfig(kind="dpo", beta=0.3)),
    "dpo_hinge": Dpo(TaskConfig(kind="dpo", beta=0.3, dpo_loss="hinge")),
    "dpo_ipo": Dpo(TaskConfig(kind="dpo", beta=0.3, dpo_loss="ipo")),
    "dpo_smoothed": Dpo(TaskConfig(kind="dpo", beta=0.3, label_smoothing=0.1)),
    "orpo": Orpo(TaskConfig(kind="orpo", beta=0.3)),
    "kto": Kto(TaskConfig(kind="kto", beta=0.3, undesirable_weight=1.5)),
    "reward": Reward(TaskConfig(kind="reward", center_rewards=0.01)),
    "sft": Sft(),
}
METRICS = {
    "rewards/chosen": "reward_chosen",
    "rewards/rejected": "reward_rejected",
    "rewards/margins": "reward_margin",
    "rewards/accuracies": "reward_accuracy",
    "accuracy": "reward_accuracy",
    "margin": "reward_margin",
    "logps/chosen": "log_prob_chosen",
    "logps/rejected": "log_prob_rejected",
    "nll_loss": "nll",
    "log_odds_ratio": "log_odds_ratio",
    "kl": "kl",
}


def batch_of(case: str) -> Batch:
    given = trl_batch()
    pairs = given["pairs"][:1] if case == "dpo_smoothed" else given["pairs"]
    if case == "sft":
        return rows([row([Text(pair["prompt"], pair["chosen"])], 14) for pair in pairs])
    if case == "kto":
        texts = [Text(each["prompt"], each[which]) for each in given["examples"] for which in ("answer", "mismatched")]
        desirable = [value for each in given["examples"] for value in (int(each["desirable"]), -1)]
        return rows([row(texts, 80)], desirable=[[*desirable, -1]])
    margins = {"margin": [[pair["margin"] for pair in pairs for _ in "ab"]]} if case == "reward" else {}
    return rows([row(pair_texts(pairs), 80)], **margins)


def prepared(task: Task, batch: Batch) -> Batch:
    """With the reference's log-probabilities, where the task reads them."""
    batch = task.prepare(batch)
    if not traits_of(task).needs_reference:
        return batch
    with torch.no_grad():
        output = trl_model("reference")(
            batch.tokens, batch.labels, positions=batch.positions, documents=batch.documents, log_probs=True
        )
    return Batch(**(vars(batch) | {"fields": {**batch.fields, REFERENCE: log_prob_sums(output, batch, alone)}}))


def mean_loss(task: Task, model: Transformer, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
    batch = prepared(task, batch)
    terms = task.loss(model, batch)
    assert torch.equal(terms.units, task.count(batch))
    return (terms.loss_sum / terms.units).sum(), terms.stats


@pytest.mark.parametrize("case", TASKS)
def test_equals_trl(case: str) -> None:
    model, expected = trl_model("score" if case == "reward" else "policy"), trl_values()
    loss, stats = mean_loss(TASKS[case], model, batch_of(case))
    loss.backward()
    torch.testing.assert_close(loss.detach().float(), expected[f"loss/{case}"], atol=CLOSE, rtol=CLOSE)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    prefix = f"gradient/{case}/"
    watched = {name.removeprefix(prefix): value for name, value in expected.items() if name.startswith(prefix)}
    assert len(watched) == 3
    for name, value in watched.items():
        found = gradients[our_name(name)]
        assert found is not None and float(value.norm()) > 0
        torch.testing.assert_close(found, value, atol=CLOSE, rtol=CLOSE)
    compared = 0
    for theirs, ours in METRICS.items():
        shown = expected.get(f"metric/{case}/{theirs}")
        ours = ours.replace("chosen", "desirable").replace("rejected", "undesirable") if case == "kto" else ours
        if shown is not None and MEAN + ours in stats:
            total, number = stats[MEAN + ours]
            torch.testing.assert_close((total / number).float(), shown, atol=CLOSE, rtol=CLOSE)
            compared += 1
    assert compared >= {"sft": 0, "reward": 2, "kto": 5}.get(case, 6)


@pytest.mark.parametrize("case", ["dpo_sigmoid", "dpo_ipo", "orpo", "reward"])
def test_rows_do_not_matter(case: str) -> None:
    """Pairs in rows of their own, of another length, give the same means."""
    pairs = trl_batch()["pairs"]
    more = {"margin": [[pair["margin"]] * 2 for pair in pairs]} if case == "reward" else {}
    apart = rows([row(pair_texts([pair]), 40) for pair in pairs], **more)
    model = trl_model("score" if case == "reward" else "policy")
    loss, _ = mean_loss(TASKS[case], model, apart)
    torch.testing.assert_close(loss.detach().float(), trl_values()[f"loss/{case}"], atol=CLOSE, rtol=CLOSE)
