"""How many cards a model speaks on is chosen by what they have free: with cards that are only said to be there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer

from paceline.cli import speaker
from paceline.cli.speaker import Asked, speak
from paceline.errors import ConfigError, LaunchError
from paceline.generate.fit import CONTEXT_BYTES, Speech
from paceline.runtime.elastic import Ended
from tests.cli.commands import LAUNCHER

MODEL = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
"""Of 8.03e9 parameters: 16.06 GB in bf16."""
GB = 10**9
SHORT = Speech(batch_size=1, tokens=64)


class StartedHereError(Exception):
    pass


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return tmp_path


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch):
    """Says that there are cards with so many free bytes, and records what would be started."""
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    started: list[tuple[list[str], int]] = []

    def there(*free: int) -> list[tuple[list[str], int]]:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda card: (free[card], 80 * GB))
        return started

    def start(arguments: list[str], degree: int, **_: object) -> Ended:
        started.append((list(arguments), degree))
        return Ended(0, 0)

    def load(*_: object) -> None:
        raise StartedHereError

    monkeypatch.setattr("paceline.runtime.elastic.start_local", start)
    monkeypatch.setattr(speaker, "_speaker", load)
    return there


def ask(folder: Path, tp: int = 0, speech: Speech = SHORT) -> None:
    speak(Asked(source=folder, tp=tp), lambda: speech, lambda: ["generate", "x"], lambda one, is_main: None)


def test_one_card_that_holds_it_is_enough(folder: Path, cards) -> None:
    started = cards(24 * GB, 24 * GB)
    with pytest.raises(StartedHereError):
        ask(folder)
    assert started == []


@pytest.mark.parametrize(("free", "degree"), [((12 * GB,) * 4, 2), ((8 * GB,) * 8, 4), ((15 * GB, 15 * GB), 2)])
def test_as_few_cards_as_hold_it(folder: Path, cards, free: tuple[int, ...], degree: int) -> None:
    started = cards(*free)
    with pytest.raises(typer.Exit) as ended:
        ask(folder)
    assert started == [(["generate", "x"], degree)] and ended.value.exit_code == 0


def test_many_texts_take_more(folder: Path, cards) -> None:
    started = cards(*(30 * GB,) * 4)
    with pytest.raises(typer.Exit):
        ask(folder, speech=Speech(batch_size=16, tokens=8192))  # 17 GB of keys and values
    assert started[0][1] == 2


def test_what_fits_nowhere_is_told_before_anything_starts(folder: Path, cards) -> None:
    started = cards(6 * GB, 6 * GB)
    with pytest.raises(ConfigError, match="does not fit on the 2 cards here"):
        ask(folder)
    assert started == [] and CONTEXT_BYTES < 6 * GB


def test_a_degree_that_is_asked_for(folder: Path, cards) -> None:
    started = cards(80 * GB, 80 * GB)
    with pytest.raises(typer.Exit):
        ask(folder, tp=2)
    assert started[0][1] == 2
    with pytest.raises(LaunchError, match="--tp 4 needs 4 GPUs, 2 are visible"):
        ask(folder, tp=4)
    cards(*(80 * GB,) * 8)
    with pytest.raises(ConfigError, match="cannot be spread over 3 ranks"):
        ask(folder, tp=3)
