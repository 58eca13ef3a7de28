"""A run folder alone, moved anywhere, is enough to speak."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from paceline.checkpoint.manager import CheckpointManager
from paceline.checkpoint.pieces import ShardedValue
from paceline.checkpoint.state import TrainState
from paceline.checkpoint.store import Contents
from paceline.cli.generate import command
from paceline.config.checkpoint import CheckpointConfig
from paceline.config.load import dump_recipe, resolve
from paceline.data.tokenizer import load_tokenizer
from paceline.errors import CheckpointError, ConfigError
from paceline.generate.load import load_speaker
from paceline.models.transformer import Transformer

CPU = torch.device("cpu")
MODEL = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 260, "max_seq_len": 64}


def save_run(folder: Path, data: dict[str, object], steps: tuple[int, ...] = (1, 2), **model: object) -> Transformer:
    """A run folder whose newest checkpoint holds the returned model."""
    config = resolve({"model": {**MODEL, **model}, "data": data}).config
    manager = CheckpointManager(folder / "checkpoints", CheckpointConfig(keep=5))
    for step in steps:
        trained = Transformer(config.model)
        trained.init_weights(step)
        # as an engine hands it over: tied weights once, and the optimizer's moments beside them
        tensors = dict(trained.named_parameters()) | {
            name: tensor for name, tensor in trained.named_buffers() if name in trained.state_dict()
        }
        values = {f"model/{name}": ShardedValue.from_full(tensor) for name, tensor in tensors.items()}
        values |= {
            f"optim/{name}/exp_avg": ShardedValue.from_full(torch.zeros_like(p))
            for name, p in trained.named_parameters()
        }
        manager.save(Contents(values=values, state=TrainState(step=step), recipe=dump_recipe(config)))
    manager.close()
    return trained.eval()


def invoke(*arguments: object):
    import typer

    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"tie_embeddings": True, "position": "learned"},
        {"mtp_layers": 1},
        {"num_experts": 4, "top_k": 2, "moe": {"bias_balance": True, "score": "sigmoid"}},
    ],
)
def test_the_loaded_model_is_the_trained_one(tmp_path, model):
    trained = save_run(tmp_path / "run", {"tokenizer": "byte"}, **model)
    shutil.move(tmp_path / "run", tmp_path / "elsewhere")
    speaker = load_speaker(tmp_path / "elsewhere", device=CPU)
    assert speaker.checkpoint.step == 2 and speaker.tokenizer.name == "byte"
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(speaker.model(tokens).logits, trained(tokens).logits)


def test_a_damaged_checkpoint_is_told_and_passed_over(tmp_path):
    save_run(tmp_path, {"tokenizer": "byte"})
    (tmp_path / "checkpoints" / "step_00000002" / "state.json").unlink()
    findings = []
    assert load_speaker(tmp_path, device=CPU, report=findings.append).checkpoint.step == 1
    assert "state.json is missing" in findings[0].evidence


def test_the_tokenizer_kept_in_the_run_folder_comes_first(tmp_path):
    from tokenizers import Tokenizer, models

    save_run(tmp_path, {"tokenizer": "/nowhere/tokenizer.json"})
    (tmp_path / "tokenizer").mkdir()
    vocabulary = {"<|endoftext|>": 0, "a": 1, "b": 2}
    Tokenizer(models.WordLevel(vocabulary, unk_token="a")).save(str(tmp_path / "tokenizer" / "my-own.json"))
    speaker = load_speaker(tmp_path, device=CPU)
    assert speaker.tokenizer.vocab_size == 3
    assert speaker.tokenizer.fingerprint == load_tokenizer(tmp_path / "tokenizer" / "my-own.json").fingerprint


def test_without_a_tokenizer_the_way_out_is_told(tmp_path):
    save_run(tmp_path, {})
    with pytest.raises(ConfigError, match="no tokenizer is known") as caught:
        load_speaker(tmp_path, device=CPU)
    assert "--tokenizer" in str(caught.value)
    assert load_speaker(tmp_path, device=CPU, tokenizer="byte").tokenizer.name == "byte"


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path):
    save_run(tmp_path, {"tokenizer": "byte"}, vocab_size=100)
    with pytest.raises(ConfigError, match="has 257 ids, the model's vocabulary 100"):
        load_speaker(tmp_path, device=CPU)


def test_the_command_streams_one_text(tmp_path):
    save_run(tmp_path, {"tokenizer": "byte"})
    first = invoke(tmp_path, "--prompt", "Hello", "--max-tokens", 20, "--seed", 3)
    assert first.exit_code == 0 and first.stdout.startswith("Hello") and len(first.stdout) > len("Hello\n")
    assert invoke(tmp_path, "--prompt", "Hello", "--max-tokens", 20, "--seed", 3).stdout == first.stdout
    assert invoke(tmp_path, "--prompt", "Hello", "--max-tokens", 20, "--seed", 4).stdout != first.stdout


def test_the_command_prints_json_lines(tmp_path):
    import json

    save_run(tmp_path, {"tokenizer": "byte"})
    result = invoke(
        tmp_path / "checkpoints" / "step_00000001", "-p", "A", "-p", "long one", "--num-samples", 2, "-n", 5, "--json"
    )
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["prompt"] for line in lines] == ["A", "A", "long one", "long one"]
    assert lines[0]["text"] != lines[1]["text"] and {line["step"] for line in lines} == {1}


def test_a_prompt_from_a_file(tmp_path):
    save_run(tmp_path, {"tokenizer": "byte"})
    (tmp_path / "prompt.txt").write_text("From a file")
    result = invoke(tmp_path, "--prompt-file", tmp_path / "prompt.txt", "-n", 1, "-t", 0)
    assert result.stdout.startswith("From a file")
    both = invoke(tmp_path, "--prompt-file", tmp_path / "prompt.txt", "--prompt", "x")
    assert isinstance(both.exception, ConfigError)


def test_errors_of_the_command_name_what_is_wrong(tmp_path):
    nothing = invoke(tmp_path / "none")
    assert isinstance(nothing.exception, CheckpointError) and "There is no such folder" in str(nothing.exception)
    save_run(tmp_path, {"tokenizer": "byte"})
    for arguments in (["--temperature", -1], ["--top-p", 0], ["--device", "tpu"]):
        assert isinstance(invoke(tmp_path, *arguments).exception, ConfigError)
    (tmp_path / "checkpoints" / "step_00000001" / "recipe.toml").unlink()
    (tmp_path / "checkpoints" / "step_00000002" / "recipe.toml").unlink()
    assert "None of the 2 checkpoints" in str(invoke(tmp_path).exception)
