"""Rows of examples: what stands where, for each task; and that no document sees another, through the real model."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from paceline.config.data import DataConfig
from paceline.config.model import ModelConfig
from paceline.config.presets import preset
from paceline.data.batch import IGNORE_INDEX, Batch
from paceline.data.build import Datasets
from paceline.data.example_files import RowRequest
from paceline.data.example_sets import build_row_datasets
from paceline.data.loader import Loader, collate
from paceline.data.sources import Sample
from paceline.kernels.attention import AttentionKernel, attention_core
from paceline.models.transformer import Transformer

ROW = 192
SEED = 3


def write(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def build(
    path: str, task: str = "sft", *, samples: int = 24, seq_len: int = ROW, batch: int = 4, **options: Any
) -> Datasets:
    config = DataConfig(**{"train": path, "tokenizer": "byte", "template": "zephyr", **options})
    request = RowRequest(task=task, seq_len=seq_len, seed=SEED, global_batch_size=batch, vocab_size=257)
    return build_row_datasets(config, request, train_samples=samples)


def chats(count: int) -> list[dict[str, Any]]:
    return [{"instruction": "q" * (i % 23 + 1), "output": f"{i} " + "a" * (i * 5 % 31)} for i in range(count)]


def pairs(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{i}?", "chosen": f"good {i}", "rejected": "bad" + "!" * (i % 9)} for i in range(count)]


def judged(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{i}?", "completion": f"answer {i}", "label": i % 3 == 0} for i in range(count)]


def documents(sample: Sample) -> list[tuple[str, str]]:
    """(tokens, labels that have a loss) of each real document, as text; its positions and end are checked."""
    assert sample.documents is not None and sample.positions is not None
    found = []
    for number in range(int(sample.documents.max()) + 1):
        where = np.flatnonzero(sample.documents == number)
        assert np.array_equal(where, np.arange(where[0], where[0] + len(where))), "a document is one stretch"
        assert np.array_equal(sample.positions[where], np.arange(len(where))), "positions begin again"
        labels = sample.labels[where]
        assert labels[-1] == IGNORE_INDEX, "the last token of a document predicts nothing"
        has = labels != IGNORE_INDEX
        if not has.any():
            assert number == sample.documents.max(), "only padding has no label, and it is the last document"
            assert not sample.tokens[where].any()
            continue
        assert np.array_equal(labels[:-1][has[:-1]], sample.tokens[where][1:][has[:-1]]), "labels are the next tokens"
        found.append((text(sample.tokens[where]), text(labels[has])))
    return found


def text(ids: Any) -> str:
    return "".join(chr(i) if i < 256 else "$" for i in ids.tolist())


# ---- what stands where


def test_conversations(tmp_path: Path) -> None:
    rows = chats(40)
    data = build(write(tmp_path, rows)).train
    epoch = data.source.rows_an_epoch  # type: ignore[attr-defined]
    found = Counter(entry for i in range(min(epoch, 24)) for entry in documents(data[i]))
    expected = Counter(
        (f"<|user|>\n{row['instruction']}$\n<|assistant|>\n{row['output']}$", f"{row['output']}$") for row in rows
    )
    assert epoch < 24
    whole = Counter(entry for i in range(epoch) for entry in documents(data[i]))
    assert whole == expected, "an epoch has every example once"
    assert sum(found.values()) >= sum(whole.values())
    assert data[0].fields == {}
    (report,) = data.reports
    assert report.documents == 40
    assert "40 examples in" in report.note


def test_pairs_stand_beside_each_other(tmp_path: Path) -> None:
    data = build(write(tmp_path, pairs(21)), "dpo").train
    seen = []
    for i in range(data.source.rows_an_epoch):  # type: ignore[attr-defined]
        found = documents(data[i])
        assert len(found) % 2 == 0
        for (chosen, good), (rejected, bad) in zip(found[0::2], found[1::2], strict=True):
            number = good.removeprefix("good ").removesuffix("$")
            assert chosen == f"<|user|>\n{number}?$\n<|assistant|>\n{good}"
            assert rejected == f"<|user|>\n{number}?$\n<|assistant|>\n{bad}"
            assert bad.startswith("bad")
            seen.append(int(number))
        sizes = data[i].fields["lengths"]
        assert sizes.sum() == ROW
        assert np.array_equal(sizes[: data[i].documents.max() + 1], np.bincount(data[i].documents))  # type: ignore[union-attr,arg-type]
    assert sorted(seen) == list(range(21))
    assert len({data[i].fields["lengths"].shape for i in range(24)}) == 1, "D is the same for all rows"


def test_numbers_of_pairs(tmp_path: Path) -> None:
    rows = [
        row | {"ref_chosen_logps": -i - 0.5, "ref_rejected_logps": -100.0 - i, "margin": i}
        for i, row in enumerate(pairs(12))
    ]
    data = build(write(tmp_path, rows), "reward").train
    for i in range(12):
        sample = data[i]
        for k, (_, good) in enumerate(documents(sample)[0::2]):
            number = int(good.removeprefix("good ").removesuffix("$"))
            assert sample.fields["reference_logps"][2 * k : 2 * k + 2].tolist() == [-number - 0.5, -100.0 - number]
            assert sample.fields["margin"][2 * k] == number


def test_judged_answers_have_mismatched_ones(tmp_path: Path) -> None:
    data = build(write(tmp_path, judged(20)), "kto").train
    seen = []
    for i in range(data.source.rows_an_epoch):  # type: ignore[attr-defined]
        sample, found = data[i], documents(data[i])
        numbers = [int(answer.removeprefix("answer ").removesuffix("$")) for _, answer in found[0::2]]
        for k, number in enumerate(numbers):
            following = numbers[(k + 1) % len(numbers)]
            assert found[2 * k][0] == f"<|user|>\n{number}?$\n<|assistant|>\nanswer {number}$"
            assert found[2 * k + 1][0] == f"<|user|>\n{number}?$\n<|assistant|>\nanswer {following}$"
        desirable = sample.fields["desirable"]
        assert desirable.dtype == np.int8
        assert desirable[0 : 2 * len(numbers) : 2].tolist() == [int(number % 3 == 0) for number in numbers]
        assert (desirable[1::2] == -1).all() and (desirable[2 * len(numbers) :] == -1).all()
        seen += numbers
    assert sorted(seen) == list(range(20))


def test_an_example_alone_in_its_row_is_mismatched_with_the_next_row(tmp_path: Path) -> None:
    data = build(write(tmp_path, judged(5)), "kto", packing="none", seq_len=84).train
    for i in range(5):
        (own, _), (other, answer) = documents(data[i])
        prompt = own.partition("answer")[0]
        assert other.startswith(prompt + "answer")
        assert answer not in own


def test_text_needs_no_template(tmp_path: Path) -> None:
    data = build(write(tmp_path, [{"text": f"line {i}"} for i in range(9)]), "pretrain", template="").train
    assert {entry for i in range(3) for entry in documents(data[i])} >= {("line 3$", "ine 3$")}


# ---- order


def test_epochs_have_orders_of_their_own_and_a_longer_run_begins_the_same(tmp_path: Path) -> None:
    path = write(tmp_path, chats(60))
    short, long = build(path, samples=10).train, build(path, samples=500).train
    assert short.identity == long.identity
    rows = long.source.rows_an_epoch  # type: ignore[attr-defined]

    def epoch(number: int) -> list[bytes]:
        return [long[i].tokens.tobytes() for i in range(number * rows, (number + 1) * rows)]

    assert [short[i].tokens.tobytes() for i in range(10)] == epoch(0)[:10]
    assert epoch(0) != epoch(1) and sorted(epoch(0)) == sorted(epoch(1))


def test_a_resumed_loader_goes_on_with_any_number_of_ranks(tmp_path: Path) -> None:
    """Also in the second epoch: rows do not depend on ranks, threads or where a loader begins."""
    data = build(write(tmp_path, chats(30)), samples=400).train

    def read(start: int, dp_size: int, workers: int) -> list[list[int]]:
        loaders = [
            Loader(
                data,
                micro_batch_size=2,
                global_batch_size=8,
                dp_rank=rank,
                dp_size=dp_size,
                start_sample=start,
                num_workers=workers,
            )
            for rank in range(dp_size)
        ]
        steps = []
        for _ in range(4):
            batches = [next(loader) for _ in range(8 // (2 * dp_size)) for loader in loaders]
            steps.append(torch.cat([batch.tokens for batch in batches]).sum(dim=1).tolist())
        for loader in loaders:
            loader.close()
        return steps

    rows = data.source.rows_an_epoch  # type: ignore[attr-defined]
    start = rows // 8 * 8 + 8  # in the second epoch
    expected = read(start, 1, 0)
    assert read(start, 2, 2) == expected
    assert read(start - 8, 4, 1)[1:] == expected[:-1]


def test_buckets_give_each_batch_the_length_that_it_needs(tmp_path: Path) -> None:
    path = write(tmp_path, chats(45))
    data = build(path, packing="buckets", samples=200).train
    rows = data.source.rows_an_epoch  # type: ignore[attr-defined]
    assert rows == 48
    lengths = [[len(data[i].tokens) for i in range(start, start + 4)] for start in range(0, rows, 4)]
    assert all(len(set(batch)) == 1 for batch in lengths)
    assert {batch[0] for batch in lengths} > {72, 96}
    seen = Counter(entry for i in range(rows) for entry in documents(data[i]))
    assert len(seen) == 45
    assert sum(seen.values()) == 48, "three fill the last batch"
    plain = build(path, packing="none", samples=200).train
    assert all(len(plain[i].tokens) == ROW and len(documents(plain[i])) == 1 for i in range(45))


# ---- no leak, through the model


@cache
def model(name: str = "tiny_llama", kernel: AttentionKernel = "auto") -> Transformer:
    found = Transformer(ModelConfig(**preset(name) | {"num_layers": 2, "vocab_size": 257}))
    found.set_attention_core(attention_core(kernel))
    found.init_weights(0)
    return found.eval()


def losses(batch: Batch, *which: str) -> dict[tuple[int, ...], torch.Tensor]:
    """Losses of the labels of each document, by its tokens."""
    assert batch.documents is not None
    with torch.no_grad():
        logits = model(*which)(batch.tokens, positions=batch.positions, documents=batch.documents).logits
    assert logits is not None
    found = {}
    for b in range(len(batch.tokens)):
        for number in batch.documents[b].unique().tolist():
            where = batch.documents[b] == number
            labels = batch.labels[b, where]
            if (labels == IGNORE_INDEX).all():
                continue
            each = F.cross_entropy(logits[b, where], labels, reduction="none")
            found[tuple(batch.tokens[b, where].tolist())] = each
    return found


@pytest.mark.parametrize(
    ("task", "which"),
    [
        ("sft", ("tiny_llama", "reference")),
        ("sft", ("tiny_llama", "sdpa")),
        ("dpo", ("tiny_gpt", "auto")),
        ("kto", ("tiny_deepseek", "auto")),
    ],
)
def test_packed_losses_are_those_of_each_document_alone(tmp_path: Path, task: str, which: tuple[str, str]) -> None:
    """The promise of packing; and the test fails where a document can see another (a planted leak)."""
    rows = {"sft": chats, "dpo": pairs, "kto": judged}[task](16)
    data = build(write(tmp_path, rows), task).train
    count = data.source.rows_an_epoch  # type: ignore[attr-defined]
    packed = collate([data[i] for i in range(count)])
    together = losses(packed, *which)
    for tokens, expected in together.items():
        ids = torch.tensor([tokens])
        with torch.no_grad():
            logits = model(*which)(ids).logits
        assert logits is not None
        labels = torch.cat((ids[0, 1:], torch.tensor([IGNORE_INDEX])))
        has = expected != 0
        alone = F.cross_entropy(logits[0], labels, reduction="none")
        torch.testing.assert_close(expected[has], alone[has], atol=2e-5, rtol=2e-5)  # fp32, other shapes of sums
    assert packed.documents is not None
    # planted: the second document of each row has the number of the first
    leaky = replace(packed, documents=torch.where(packed.documents == 1, 0, packed.documents))
    with torch.no_grad():
        logits = model(*which)(leaky.tokens, positions=leaky.positions, documents=leaky.documents).logits
    assert logits is not None
    second = packed.documents == 1
    right = torch.cat([together[tuple(packed.tokens[b, second[b]].tolist())] for b in range(count)])
    labels = packed.labels[second]
    wrong = F.cross_entropy(logits[second], labels, reduction="none")
    worst = float((wrong - right).abs().max())
    assert worst > 1e-3, "a leak of one document changes losses far beyond the tolerance"


def test_positions_that_run_on_are_seen(tmp_path: Path) -> None:
    """The other way to get packing wrong; with learned positions it shows."""
    data = build(write(tmp_path, chats(16))).train
    packed = collate([data[0]])
    assert packed.documents is not None
    second = tuple(packed.tokens[0, packed.documents[0] == 1].tolist())
    right = losses(packed, "tiny_gpt")[second]
    wrong = losses(replace(packed, positions=torch.arange(ROW)[None]), "tiny_gpt")[second]
    assert float((right - wrong).abs().max()) > 1e-4
