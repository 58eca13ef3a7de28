"""`paceline eval` of a hub folder gives Transformers' own loss, and the same for what it was converted to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer
from tokenizers import Tokenizer
from tokenizers.models import BPE
from typer.testing import CliRunner

from paceline.cli.evaluate import command
from paceline.data.indexed_writer import IndexedWriter
from paceline.errors import ConfigError, DataError
from paceline.interop.convert import Options, convert
from paceline.interop.sources import open_source
from tests.interop import hub_folders as hub

WORDS = [chr(ord("a") + i) for i in range(26)] + ["</s>"]


app = typer.Typer()
app.command()(command)


def call(*arguments: object) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments), "--device", "cpu"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = hub.save("qwen3", tmp_path / "hf")
    Tokenizer(BPE(vocab={word: i for i, word in enumerate(WORDS)}, merges=[])).save(str(source / "tokenizer.json"))
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": 26}))
    return source


def test_a_text_and_a_dataset(folder: Path, tmp_path: Path) -> None:
    text = "thequickbrownfoxjumpsoverthelazydog" * 3
    (tmp_path / "t.txt").write_text(text)
    ids = [26] + [WORDS.index(letter) for letter in text]
    with IndexedWriter(tmp_path / "data", vocab_size=27) as writer:
        writer.add_document(ids)
    expected = 0.0
    for start in range(0, len(ids) - 1, 20):
        window = torch.tensor([ids[start : start + 21]])
        with torch.no_grad():
            logits = hub.reference("qwen3")(input_ids=window[:, :-1]).logits
        expected += float(torch.nn.functional.cross_entropy(logits[0], window[0, 1:], reduction="sum"))
    convert(open_source(folder), tmp_path / "ours", Options(to="paceline"))
    for source in (folder, tmp_path / "ours"):
        for data in (tmp_path / "t.txt", tmp_path / "data"):
            found = json.loads(call(source, data, "--seq-len", 20, "--json"))
            assert found["tokens"] == len(text)
            assert found["loss"] == pytest.approx(expected / len(text), abs=1e-5)
            assert (found["bits_per_byte"] is None) == (data.name == "data")
    assert "perplexity" in call(folder, tmp_path / "data") and "bits a byte" in call(folder, tmp_path / "t.txt")


def test_what_does_not_fit_is_told(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read as text"):
        call(folder, tmp_path / "none.txt")
    (tmp_path / "t.txt").write_text("abc")
    with pytest.raises(ConfigError, match="--seq-len 1000 is longer than the model's 128 positions"):
        call(folder, tmp_path / "t.txt", "--seq-len", 1000)
    with pytest.raises(DataError):
        call(folder, tmp_path / "no-dataset")
