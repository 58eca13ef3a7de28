"""Evaluation: the same number for every layout, over every token once, with the weights of now."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from distributed import run as on_ranks
from paceline.checkpoint.weights import CheckpointSource
from paceline.config.load import resolve
from paceline.data.sidecar import Sidecar, write_sidecar
from paceline.observe.events import read_events
from paceline.runtime.process import ProcessInfo
from paceline.training.feed import open_datasets
from paceline.training.setup import build_model, build_parts
from paceline.training.validate import Evaluation, Evaluator, _entropy, with_prefix
from tests.training import runs

BYTES = 3.5
"""UTF-8 bytes a token of the held-out data stands for."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Training data and held-out data."""
    folder = tmp_path_factory.mktemp("data")
    train, valid = folder / "train", folder / "valid"
    for prefix, documents, seed in ((train, 60, 0), (valid, 9, 1)):
        runs.write_dataset(prefix, documents=documents, seed=seed)
        tokens = (prefix.parent / f"{prefix.name}.bin").stat().st_size // 2
        write_sidecar(
            prefix,
            Sidecar(
                tokenizer="made up",
                tokenizer_fingerprint="0" * 64,
                vocab_size=runs.VOCAB,
                eod_id=0,
                eod_appended=False,
                documents=documents,
                tokens=tokens,
                text_bytes=int(BYTES * tokens),
            ),
        )
    return str(train), str(valid)


def _evaluate(
    rank: int, world_size: int, recipes: Sequence[Sequence[str]], batches: int | None, weights: str = ""
) -> list[dict[str, Any]]:
    found = []
    for overrides in recipes:
        recipe = resolve({}, list(overrides))
        config = recipe.config
        info = ProcessInfo(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size)
        parts = build_parts(config, recipe.registry, info, torch.device("cpu"))
        if weights:
            CheckpointSource(Path(weights)).fill(parts.engine.weights())
            parts.engine.publish_weights()
            parts.engine.wait_for_weights()
        split = open_datasets(config, recipe.registry, train_samples=8).valid
        assert split is not None
        evaluator = Evaluator(config, split, staged=parts.staged, device=torch.device("cpu"))
        result = evaluator.run(batches, should_stop=lambda: False)
        assert result is not None
        found.append(asdict(result))
        # asked on one rank, heard on all
        assert evaluator.run(batches, should_stop=lambda: rank == world_size - 1) is None
        assert all(stage.training for stage in parts.stages)
    return found


def recipe(folder: Path, data: tuple[str, str], *more: str, steps: int = 8) -> list[str]:
    return runs.tiny(folder, data[0], f"data.valid={data[1]}", *more, steps=steps)


@pytest.mark.parametrize("batches", [None, 2])
def test_every_layout_gives_the_same_numbers(batches: int | None, data: tuple[str, str], tmp_path: Path) -> None:
    layouts = [f"train.micro_batch_size={micro}" for micro in (1, 2)]
    recipes = [recipe(tmp_path, data, layout, "model.dropout=0.3") for layout in layouts]
    recipes.append(recipe(tmp_path, data, "parallel.zero=3", "parallel.accumulate_dtype=fp32", "model.dropout=0.3"))
    found = [each for ranks in (1, 2) for own in on_ranks(_evaluate, ranks, recipes, batches) for each in own]
    assert len(found) == 9
    for each in found:
        assert each["loss"] == pytest.approx(found[0]["loss"], abs=1e-6)
        assert {**each, "loss": 0} == {**found[0], "loss": 0}
    assert found[0]["bytes_per_token"] == pytest.approx(BYTES, rel=0.01)
    if batches:
        assert found[0]["tokens"] == 2 * 4 * 16


def test_every_token_counts_once_and_padding_does_not(data: tuple[str, str], tmp_path: Path) -> None:
    """Against a loop over the samples with a plain model."""
    overrides = recipe(tmp_path, data, "train.micro_batch_size=2")
    (found,) = on_ranks(_evaluate, 2, [overrides], None)[0]
    resolved = resolve({}, overrides)
    config = resolved.config
    model = build_model(config, "cpu")
    model.init_weights(config.run.seed)
    split = open_datasets(config, resolved.registry, train_samples=8).valid
    assert split is not None and len(split) % config.train.global_batch_size, "the last batch is padded"
    total, labels = 0.0, []
    for sample in (split[i] for i in range(len(split))):
        tokens, wanted = torch.from_numpy(sample.tokens)[None], torch.from_numpy(sample.labels)
        with torch.no_grad():
            logits = model(tokens).logits
        assert logits is not None
        total += float(F.cross_entropy(logits[0].double(), wanted, ignore_index=-100, reduction="sum"))
        labels += wanted[wanted != -100].tolist()
    tokens_in_file = Path(f"{data[1]}.bin").stat().st_size // 2
    assert found["tokens"] == len(labels) == tokens_in_file - 1
    assert found["loss"] == pytest.approx(total / len(labels), abs=1e-5)
    shares = torch.tensor(labels).bincount().double() / len(labels)
    assert found["unigram_loss"] == pytest.approx(-float((shares * shares.clamp(min=1e-9).log()).sum()), abs=1e-6)


def test_entropy_and_bits_on_an_example_by_hand() -> None:
    assert _entropy(torch.tensor([1, 1, 2, 0])) == pytest.approx(1.5 * math.log(2))
    result = Evaluation(loss=3 * math.log(2), tokens=4, unigram_loss=math.log(16), bytes_per_token=2.0)
    assert result.perplexity == pytest.approx(8)
    assert result.bits_per_byte == pytest.approx(1.5)
    assert result.unigram_bits_per_byte == pytest.approx(2)
    assert set(with_prefix("valid", result.values())) >= {"valid/loss", "valid/bits_per_byte"}
    unknown = Evaluation(loss=1.0, tokens=4, unigram_loss=1.0, bytes_per_token=None)
    assert unknown.bits_per_byte is None and "bits_per_byte" not in unknown.values()
    assert Evaluation(loss=1e4, tokens=1, unigram_loss=1.0, bytes_per_token=None).perplexity < math.inf


def test_a_run_evaluates_as_it_goes_and_at_its_end(data: tuple[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    overrides = recipe(
        folder, data, "train.eval_interval=3", "train.eval_steps=99", "observe.tensorboard=true", steps=6
    )
    on_ranks(runs.run, 2, overrides)
    events = [event for event in read_events(folder) if event["event"] == "evaluation"]
    assert [event["step"] for event in events] == [3, 6, 6]
    while_training, last, whole = events
    loss = {"valid/loss": last["valid/loss"]}
    # the last evaluation and the one of everything saw the same weights and, with so many steps, the same tokens
    assert whole["whole"] and whole["valid/loss"] == pytest.approx(loss["valid/loss"], abs=1e-9)
    assert while_training["valid/loss"] - last["valid/loss"] > 0.01
    # those are the weights of now: the checkpoint of step 6 gives the same
    (again,) = on_ranks(_evaluate, 1, [overrides], None, str(folder))[0]
    assert again["loss"] == pytest.approx(whole["valid/loss"], abs=1e-5)
    assert in_tensorboard(folder / "tensorboard", "valid/loss") == pytest.approx(
        {3: while_training["valid/loss"], 6: last["valid/loss"]}, abs=1e-5
    )
    # evaluation changes nothing that is learned
    without = on_ranks(runs.run, 2, recipe(tmp_path / "without", data, "data.valid=", steps=6))[0]
    assert runs.losses(without) == runs.losses(runs.read_metrics(folder))


def in_tensorboard(folder: Path, tag: str) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder))
    reader.Reload()
    return {event.step: event.value for event in reader.Scalars(tag)}


def test_the_test_split_is_scored_once_at_the_end(data: tuple[str, str], tmp_path: Path) -> None:
    runs.alone(recipe(tmp_path / "run", data, f"data.test={data[1]}", "train.eval_interval=2", steps=4))
    events = [event for event in read_events(tmp_path / "run") if event["event"] == "evaluation"]
    assert ["test/loss" in event for event in events] == [False, False, True]
    runs.alone(
        runs.tiny(
            tmp_path / "cut", data[0], "data.split=80,10,10", "model.mtp_layers=1", "train.eval_steps=99", steps=4
        )
    )
    (event,) = [event for event in read_events(tmp_path / "cut") if event["event"] == "evaluation"]
    assert event["test/tokens"] > 50
    # with multi-token prediction the loss is the next token's alone, in training as in evaluation
    record = runs.read_metrics(tmp_path / "cut")[-1]
    assert record.loss == pytest.approx(event["test/loss"], rel=0.2)
    assert record.extra["mtp_loss"] is not None and record.extra["mtp_loss"] > 1


def test_held_out_data_of_synthetic_training_are_made_up_or_real(data: tuple[str, str], tmp_path: Path) -> None:
    for name, valid, tokens in (("unsaid", "", 2 * 4 * 16), ("said", "synthetic", 2 * 4 * 16), ("real", data[1], None)):
        folder = tmp_path / name
        runs.alone(runs.tiny(folder, "synthetic", f"data.valid={valid}", "train.eval_steps=2", steps=2))
        (event,) = [event for event in read_events(folder) if event["event"] == "evaluation"]
        assert event["valid/tokens"] == (tokens or Path(f"{data[1]}.bin").stat().st_size // 2 - 1)
