"""What a trained model says at the end, and when it says nothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from paceline.data.indexed_writer import IndexedWriter
from paceline.data.sidecar import Sidecar, write_sidecar
from paceline.data.tokenizer import load_tokenizer
from tests.training import runs


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A dataset of bytes: the alphabet, again and again."""
    prefix = tmp_path_factory.mktemp("data") / "text"
    tokenizer = load_tokenizer("byte")
    ids = list(b"abcdefghijklmnopqrstuvwxyz" * 4)
    with IndexedWriter(prefix, vocab_size=tokenizer.vocab_size) as writer:
        for _ in range(40):
            writer.add_document(np.array(ids))
    assert tokenizer.eod_id is not None
    write_sidecar(
        prefix,
        Sidecar(
            tokenizer="byte",
            tokenizer_fingerprint=tokenizer.fingerprint,
            vocab_size=tokenizer.vocab_size,
            eod_id=tokenizer.eod_id,
            eod_appended=False,
            documents=40,
            tokens=40 * len(ids),
            text_bytes=40 * len(ids),
        ),
    )
    return str(prefix)


def samples(folder: Path) -> list[list[str]]:
    found: list[list[str]] = json.loads((folder / "summary.json").read_text())["samples"]
    return found


def test_the_model_goes_on_with_each_prompt(text: str, tmp_path: Path) -> None:
    asked = (
        'observe.sample_prompts=["abcd", "mnop"]',
        "observe.sample_tokens=5",
        "observe.sample_temperature=0",
        "model.vocab_size=300",
        "optim.lr=0.03",
    )
    runs.alone(runs.tiny(tmp_path / "run", text, *asked, steps=40))
    assert samples(tmp_path / "run") == [["abcd", "efghi"], ["mnop", "qrstu"]]


def test_without_a_tokenizer_there_are_none_and_the_log_says_why(tmp_path: Path) -> None:
    data = runs.write_dataset(tmp_path / "corpus")
    runs.alone(runs.tiny(tmp_path / "run", data, 'observe.sample_prompts=["abcd"]', steps=2))
    assert samples(tmp_path / "run") == []
    assert "no samples" in "".join(path.read_text() for path in (tmp_path / "run" / "logs").iterdir())


def test_without_a_last_checkpoint_there_are_none(text: str, tmp_path: Path) -> None:
    asked = ('observe.sample_prompts=["abcd"]', "model.vocab_size=300", "checkpoint.save_last=false")
    runs.alone(runs.tiny(tmp_path / "run", text, *asked, "checkpoint.interval=0", steps=2))
    assert samples(tmp_path / "run") == []


def test_a_model_that_learned_from_turns_is_asked_in_its_template(tmp_path: Path) -> None:
    """Greedily, what it has learned by heart; the same as `paceline generate --chat` says."""
    rows = tmp_path / "rows.jsonl"
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]
    rows.write_text((json.dumps({"messages": turns}) + "\n") * 8)
    wanted = ("task.kind=sft", "data.tokenizer=byte", "data.template=alpaca", "model.vocab_size=300")
    sizes = ("model.max_seq_len=256", "train.seq_len=128", "train.global_batch_size=1", "optim.lr=0.03")
    asked = ('observe.sample_prompts=["Hi"]', "observe.sample_tokens=8", "observe.sample_temperature=0")
    runs.alone(runs.tiny(tmp_path / "run", str(rows), *wanted, *sizes, *asked, steps=40))
    assert samples(tmp_path / "run") == [["Hi", "Yes."]]


def test_a_prompt_that_is_too_long_does_not_end_a_run_that_is_done(text: str, tmp_path: Path) -> None:
    asked = (f'observe.sample_prompts=["{"a" * 40}"]', "model.vocab_size=300")
    runs.alone(runs.tiny(tmp_path / "run", text, *asked, steps=2))
    assert samples(tmp_path / "run") == []
    logs = "".join(path.read_text() for path in (tmp_path / "run" / "logs").iterdir())
    assert "no samples: the prompt has 40 tokens, but the model's longest sequence is 32" in logs
