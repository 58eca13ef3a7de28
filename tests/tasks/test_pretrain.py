"""What next-token prediction contributes: sums over labels that count, never means."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from paceline.config.model import ModelConfig
from paceline.data.batch import IGNORE_INDEX, Batch
from paceline.models.transformer import Transformer
from paceline.tasks.pretrain import Pretrain

V = 31


def model(**more: int) -> Transformer:
    built = Transformer(
        ModelConfig(num_layers=2, hidden_size=16, num_heads=2, vocab_size=V, max_seq_len=16, init_std=0.2, **more)
    )
    built.init_weights(3)
    return built


def batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    tokens, labels = (torch.randint(V, (3, 8), generator=generator) for _ in "ab")
    labels[0, :5] = IGNORE_INDEX
    return Batch(tokens=tokens, labels=labels)


def test_sum_and_units_over_labels_that_count() -> None:
    task, data, net = Pretrain(), batch(), model()
    assert int(task.count(data)) == 19 and task.prepare(data) is data
    terms = task.loss(net, data)
    logits = net(data.tokens).logits
    assert logits is not None
    expected = F.cross_entropy(logits.flatten(0, 1), data.labels.flatten(), reduction="sum")
    assert float(terms.loss_sum) == pytest.approx(float(expected), rel=1e-5)
    assert int(terms.units) == 19 and terms.aux_loss is None
    assert terms.loss_sum.requires_grad and not terms.stats["loss_sum_main"].requires_grad


def test_positions_and_documents_reach_the_model() -> None:
    task, data, net = Pretrain(), batch(), model()
    documents = (torch.arange(8) >= 4).int().expand(3, 8)
    positions = torch.arange(8).remainder(4).expand(3, 8)
    split = Batch(tokens=data.tokens, labels=data.labels, positions=positions, documents=documents)
    parts = [Batch(tokens=data.tokens[:, a:b], labels=data.labels[:, a:b]) for a, b in ((0, 4), (4, 8))]
    apart = sum(float(task.loss(net, part).loss_sum) for part in parts)
    assert float(task.loss(net, split).loss_sum) == pytest.approx(apart, rel=1e-5)
    assert float(task.loss(net, data).loss_sum) != pytest.approx(apart, rel=1e-3)


def test_a_batch_without_labels_gives_zero_and_zero_gradients() -> None:
    data, net = batch(), model(num_experts=4, top_k=2)
    terms = Pretrain().loss(net, Batch(tokens=data.tokens, labels=torch.full_like(data.labels, IGNORE_INDEX)))
    assert float(terms.loss_sum) == 0 and int(terms.units) == 0 and terms.aux_loss is not None
    terms.loss_sum.backward()
    assert all(p.grad is None or bool((p.grad == 0).all()) for p in net.parameters())
