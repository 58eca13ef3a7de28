"""Each loss against its formula, written out for answers that stand alone: one text, all logits, no packing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.config.model import ModelConfig
from paceline.config.task import TaskConfig
from paceline.data.batch import IGNORE_INDEX, Batch
from paceline.models.transformer import Transformer
from paceline.tasks.documents import LABELS, LENGTHS, REFERENCE, alone, log_prob_sums, with_label_counts, with_lengths
from paceline.tasks.dpo import Dpo
from paceline.tasks.kto import Kto
from paceline.tasks.orpo import Orpo, log_odds
from paceline.tasks.reward import Reward
from paceline.tasks.task import MEAN, Task
from tests.tasks.answers import Text, row, rows

V, LENGTH = 31, 48
EXACT = {"atol": 1e-11, "rtol": 1e-9}
"""float64; sums in another order."""


def model(seed: int, **more: Any) -> Transformer:
    config = ModelConfig(
        num_layers=2, hidden_size=16, num_heads=2, vocab_size=V, max_seq_len=64, init_std=0.3, tie_embeddings=True
    )
    built = Transformer(config.model_copy(update=more), dtype=torch.float64)
    built.init_weights(seed)
    return built


def ids(count: int, seed: int) -> list[int]:
    found: list[int] = torch.randint(V, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return found


PAIRS = [
    (Text(ids(p, p), ids(c, c + 10)), Text(ids(p, p), ids(r, r + 20))) for p, c, r in ((3, 4, 2), (5, 1, 6), (2, 3, 3))
]


def packed(groups: Sequence[Sequence[tuple[Text, Text]]], **fields: Any) -> Batch:
    """A row for each group."""
    return rows([row([text for pair in group for text in pair], LENGTH) for group in groups], **fields)


def log_probs(net: Transformer, text: Text) -> Tensor:
    """[tokens of the answer], of the text alone."""
    whole = torch.tensor([[*text.prompt, *text.answer]])
    logits = net(whole).logits
    assert logits is not None
    found = logits[0].log_softmax(-1)[:-1].gather(1, whole[0, 1:, None])[:, 0]
    return found[len(text.prompt) - 1 :]


def with_reference(batch: Batch, reference: Transformer) -> Batch:
    with torch.no_grad():
        output = reference(
            batch.tokens, batch.labels, positions=batch.positions, documents=batch.documents, log_probs=True
        )
    return replace(batch, fields={**batch.fields, REFERENCE: log_prob_sums(output, batch, alone)})


def check(task: Task, net: Transformer, batch: Batch, expected: Tensor, reference: Transformer | None = None) -> Any:
    """Value and every gradient."""
    batch = task.prepare(batch)
    terms = task.loss(net, batch if reference is None else with_reference(batch, reference))
    found = (terms.loss_sum / task.count(batch)).sum()
    torch.testing.assert_close(found, expected, **EXACT)
    parameters = list(net.parameters())
    for ours, plain in zip(
        torch.autograd.grad(found, parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        torch.testing.assert_close(ours, plain, **EXACT)
    return terms


@pytest.mark.parametrize("groups", [[PAIRS], [PAIRS[:1], PAIRS[1:]], [[], PAIRS]], ids=("a row", "two", "an empty one"))
@pytest.mark.parametrize("loss", ["sigmoid", "smoothed", "hinge", "ipo", "free"])
def test_dpo(loss: str, groups: list[list[tuple[Text, Text]]]) -> None:
    policy, reference, beta = model(1), model(2), 0.4
    losses = []
    for chosen, rejected in PAIRS:
        (c, r), ratios = (log_probs(policy, text) for text in (chosen, rejected)), []
        for own, text in ((c, chosen), (r, rejected)):
            base = torch.zeros(()) if loss == "free" else log_probs(reference, text).sum().detach()
            ratios.append(own.sum() - base)
        margin = beta * (ratios[0] - ratios[1])
        losses.append(
            {
                "sigmoid": -torch.log(torch.sigmoid(margin)),
                "free": -torch.log(torch.sigmoid(margin)),
                "smoothed": -0.8 * torch.log(torch.sigmoid(margin)) - 0.2 * torch.log(torch.sigmoid(-margin)),
                "hinge": torch.relu(1 - margin),
                "ipo": (ratios[0] / len(c) - ratios[1] / len(r) - 1 / (2 * beta)) ** 2,
            }[loss]
        )
    config = TaskConfig(
        kind="dpo",
        beta=beta,
        dpo_loss=loss if loss in ("ipo", "hinge") else "sigmoid",
        label_smoothing=0.2 if loss == "smoothed" else 0.0,
        reference="none" if loss == "free" else "initial",
    )
    expected = torch.stack(losses).mean()
    terms = check(Dpo(config), policy, packed(groups), expected, None if loss == "free" else reference)
    total, number = terms.stats[MEAN + "reward_accuracy"].tolist()
    assert number == len(PAIRS) and 0 <= total <= number


@pytest.mark.parametrize("nll", ["all", "answer"])
def test_orpo(nll: str) -> None:
    policy, beta = model(1), 0.4
    tokens, ratios = [], []
    for chosen, rejected in PAIRS:
        means = [log_probs(policy, text).mean() for text in (chosen, rejected)]
        odds = [torch.exp(mean) / (1 - torch.exp(mean)) for mean in means]
        ratios.append(torch.log(torch.sigmoid(torch.log(odds[0] / odds[1]))))
        # the whole text is an answer to its first token
        tokens.append(log_probs(policy, Text(chosen.prompt[:1], [*chosen.prompt[1:], *chosen.answer])))
        if nll == "answer":
            tokens[-1] = log_probs(policy, chosen)
    expected = -torch.cat(tokens).mean() - beta * torch.stack(ratios).mean()
    task = Orpo(TaskConfig(kind="orpo", beta=beta, orpo_nll=nll))
    check(task, policy, packed([PAIRS[:1], [], PAIRS[1:]]), expected)


def test_odds_near_certainty() -> None:
    means = torch.tensor([-1e-9, -0.5, -2.0, 0.0], dtype=torch.float64, requires_grad=True)
    found = log_odds(means)
    exact = [math.log(1 / 1e-9), math.log(math.exp(-0.5) / (1 - math.exp(-0.5))), -2 - math.log1p(-math.exp(-2))]
    assert found[:3].tolist() == pytest.approx(exact, rel=1e-6)
    (gradient,) = torch.autograd.grad(found.sum(), means)
    assert bool(found.isfinite().all() and gradient.isfinite().all())


def test_kto_has_a_baseline_for_each_row() -> None:
    policy, reference, beta = model(1), model(2), 0.4
    desirable = [[1, -1, 0, -1, 0, 0], [1, -1, -1, -1, -1, -1]]
    groups, losses = [PAIRS[:2], PAIRS[2:]], []
    baselines = []
    for group, judged in zip(groups, desirable, strict=True):
        gaps = [(log_probs(policy, other).sum() - log_probs(reference, other).sum()) for _, other in group]
        baseline = torch.stack(gaps).mean().clamp(min=0).detach()
        baselines.append(float(baseline))
        for index, (text, _) in enumerate(group):
            gain = beta * (log_probs(policy, text).sum() - log_probs(reference, text).sum().detach() - baseline)
            good = judged[2 * index] == 1
            losses.append(1 - torch.sigmoid(gain) if good else 1.5 * (1 - torch.sigmoid(-gain)))
    assert max(baselines) > 0
    task = Kto(TaskConfig(kind="kto", beta=beta, undesirable_weight=1.5))
    expected = torch.stack(losses).mean()
    terms = check(task, policy, packed(groups, desirable=desirable), expected, reference)
    assert terms.stats[MEAN + "kl"].tolist() == pytest.approx([sum(baselines), 2])


@pytest.mark.parametrize("center", [0.0, 0.3])
def test_reward(center: float) -> None:
    net, margins = model(1, head="score"), [0.5, 0.0, 1.25]
    losses = []
    for (chosen, rejected), margin in zip(PAIRS, margins, strict=True):
        scores = []
        for text in (chosen, rejected):
            found = net(torch.tensor([[*text.prompt, *text.answer]])).scores
            assert found is not None
            scores.append(found[0, -1])
        loss = -torch.log(torch.sigmoid(scores[0] - scores[1] - margin))
        losses.append(loss + center * (scores[0] + scores[1]) ** 2)
    fields = {"margin": [[margins[0], 0.0, 0.0, 0.0], [margins[1], 9.0, margins[2], 9.0]]}
    task = Reward(TaskConfig(kind="reward", center_rewards=center))
    check(task, net, packed([PAIRS[:1], PAIRS[1:]], **fields), torch.stack(losses).mean())


def test_a_row_of_padding_has_loss_zero_and_finite_gradients() -> None:
    empty = rows([row([], LENGTH)], desirable=[[-1, -1]])
    for task in (
        Dpo(TaskConfig(kind="dpo", reference="none")),
        Orpo(TaskConfig(kind="orpo")),
        Kto(TaskConfig(kind="kto")),
    ):
        net = model(1)
        batch = task.prepare(empty)
        if isinstance(task, Kto):
            batch = with_reference(batch, net)
        terms = task.loss(net, batch)
        assert float(terms.loss_sum.sum()) == 0 and int(task.count(batch).sum()) == 0
        terms.loss_sum.sum().backward()
        assert all(p.grad is None or bool((p.grad == 0).all()) for p in net.parameters())


def test_counts_and_lengths_of_documents() -> None:
    batch = packed([PAIRS[:1], PAIRS[1:]])
    counted = with_label_counts(batch).fields[LABELS]
    assert counted.shape == (2, LENGTH)
    assert counted[0, :3].tolist() == [4, 2, 0] and counted[1, :5].tolist() == [1, 6, 3, 3, 0]
    lengths = with_lengths(batch).fields[LENGTHS]
    assert lengths[0, :3].tolist() == [7, 5, LENGTH - 12] and int(lengths.sum()) == 2 * LENGTH
    narrow = replace(batch, fields={"margin": torch.zeros(2, 3)})
    widened = with_label_counts(narrow).fields
    assert widened[LABELS].shape == widened["margin"].shape == (2, 4), "pairs need an even number"
    assert widened[LABELS].tolist() == [[4, 2, 0, 0], [1, 6, 3, 3]]


def test_a_leak_between_documents_would_be_noticed() -> None:
    """Without the documents' numbers in attention the second answer sees the first: the loss is another."""
    policy, task = model(1), Dpo(TaskConfig(kind="dpo", reference="none"))
    batch = task.prepare(packed([PAIRS]))
    right = float(task.loss(policy, batch).loss_sum.detach())

    def leaking(tokens: Tensor, labels: Tensor, *, documents: Tensor, **more: Any) -> Any:
        return policy(tokens, labels, documents=torch.zeros_like(documents), **more)

    assert abs(float(task.loss(leaking, batch).loss_sum.detach()) - right) > 1e-3
    assert int((batch.labels != IGNORE_INDEX).sum()) == 19
