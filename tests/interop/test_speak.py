"""`paceline generate` from a hub folder, and from what a hub folder was converted to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer
from tokenizers import Tokenizer
from tokenizers.models import BPE
from typer.testing import CliRunner

from paceline.cli.generate import command
from paceline.errors import DataError
from paceline.interop.convert import Options, convert
from paceline.interop.peft import merge, read_adapter
from paceline.interop.sources import open_source
from paceline.interop.speak import load_hub_speaker
from tests.interop import hub_folders as hub
from tests.interop.test_peft import write_adapter

WORDS = [chr(ord("a") + i) for i in range(26)] + ["</s>"] + [f"<{i}>" for i in range(70)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = hub.save("llama", tmp_path / "hf")
    tokenizer = Tokenizer(BPE(vocab={word: i for i, word in enumerate(WORDS)}, merges=[]))
    tokenizer.save(str(source / "tokenizer.json"))
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [40, 26]}))
    return source


app = typer.Typer()
app.command()(command)


def call(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_same_text_from_all_three(folder: Path, tmp_path: Path) -> None:
    """And the same ids as Transformers writes, greedily."""
    ask = ["--prompt", "bcd", "--temperature", "0", "--max-tokens", "12", "--device", "cpu", "--json"]
    said = json.loads(call(folder, *ask))
    convert(open_source(folder), tmp_path / "ours", Options(to="paceline"))
    assert json.loads(call(tmp_path / "ours", *ask))["token_ids"] == said["token_ids"]
    with torch.no_grad():
        ids = hub.reference("llama").generate(
            torch.tensor([[1, 2, 3]]), max_new_tokens=12, do_sample=False, eos_token_id=40, pad_token_id=100
        )
    assert said["token_ids"] == [token for token in ids[0, 3:].tolist() if token != 40]


def test_the_end_is_what_the_folder_says(folder: Path) -> None:
    cpu = torch.device("cpu")
    speaker = load_hub_speaker(folder, device=cpu)
    assert speaker.tokenizer.eod_id == 40 and speaker.stop_ids == (40, 26)
    (folder / "generation_config.json").unlink()
    assert load_hub_speaker(folder, device=cpu).tokenizer.eod_id == 1  # of config.json
    assert load_hub_speaker(folder, device=cpu).step == 0
    (folder / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"no tokenizer.json"):
        load_hub_speaker(folder, device=cpu)


def test_an_adapter_says_what_the_merged_model_says(folder: Path, tmp_path: Path) -> None:
    targets = ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"]
    adapter = write_adapter(tmp_path / "adapter", hub.tensors(folder), targets, lora_alpha=60)
    ask = ["--prompt", "bcd", "--temperature", "0", "--max-tokens", "12", "--device", "cpu", "--json"]
    convert(merge(open_source(folder), read_adapter(adapter)), tmp_path / "merged", Options(to="hf"))
    merged = json.loads(call(tmp_path / "merged", *ask))
    assert json.loads(call(folder, "--adapter", adapter, *ask))["token_ids"] == merged["token_ids"]
    assert json.loads(call(folder, *ask))["token_ids"] != merged["token_ids"]
    convert(open_source(folder), tmp_path / "ours", Options(to="paceline"))
    assert json.loads(call(tmp_path / "ours", "--adapter", adapter, *ask))["token_ids"] == merged["token_ids"]
