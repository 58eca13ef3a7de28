"""The verb as a user types it, in this process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from paceline.cli.convert import convert
from paceline.errors import CheckpointError, ConfigError
from tests.interop import hub_folders as hub
from tests.interop.test_peft import write_adapter

app = typer.Typer()
app.command()(convert)
runner = CliRunner()


def call(*arguments: object) -> str:
    result = runner.invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_format_is_found_and_both_sides_are_compared(tmp_path: Path) -> None:
    source = hub.save("qwen3_moe", tmp_path / "hf")
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    output = call(source, tmp_path / "ours", "--check")
    assert "25 tensors" in output and "run by transformers and paceline, fp32" in output
    output = call(tmp_path / "ours", tmp_path / "back", "--check", "--dtype", "bf16", "--shard-gb", "0.001")
    assert "largest logit difference" in output
    names = {path.name for path in (tmp_path / "back").iterdir()}
    assert {"tokenizer.json", "chat_template.jinja", "generation_config.json", "config.json"} <= names


def test_numbers_that_are_not_finite_are_told(tmp_path: Path) -> None:
    source = hub.save("qwen3", tmp_path / "hf")
    tensors = hub.tensors(source)
    adapter = write_adapter(tmp_path / "adapter", tensors, ["model.layers.1.mlp.gate_proj"])
    assert "NaN" not in call(source, tmp_path / "plain", "--to", "hf")
    weights = {name: tensor.clone() for name, tensor in load_file(adapter / "adapter_model.safetensors").items()}
    for tensor in weights.values():
        tensor[0, 0] = float("nan")
    save_file(weights, adapter / "adapter_model.safetensors")
    output = call(source, tmp_path / "merged", "--to", "hf", "--adapter", adapter)
    assert "1 tensor holds NaN or infinity as written: blocks.1.feed_forward.gate_proj.weight" in " ".join(
        output.split()
    )
    large = {name: tensor * 1e7 if name.endswith("down_proj.weight") else tensor for name, tensor in tensors.items()}
    save_file(large, source / "model.safetensors", metadata={"format": "pt"})
    output = call(source, tmp_path / "half", "--to", "hf", "--dtype", "fp16")
    assert "2 tensors hold NaN or infinity as written" in " ".join(output.split())


def test_nothing_is_written_into_the_source(tmp_path: Path) -> None:
    source = hub.save("qwen3", tmp_path / "hf")
    before = sorted(source.iterdir())
    with pytest.raises(ConfigError, match=r"lies in .* which is converted"):
        call(source, source / "sub" / "ours")
    with pytest.raises(ConfigError, match="which is converted"):
        call(source, source / "adapter", "--to", "peft")
    assert sorted(source.iterdir()) == before


def test_a_model_that_says_something_else_fails_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = hub.save("llama", tmp_path / "hf")
    from paceline.interop import hf_names

    swapped = dict(hf_names.LLAMA)
    up, gate = (f"blocks.{{i}}.feed_forward.{name}_proj.{{w}}" for name in ("up", "gate"))
    swapped[up], swapped[gate] = swapped[gate], swapped[up]
    monkeypatch.setitem(hf_names.TABLES, "llama", swapped)
    with pytest.raises(CheckpointError, match="do not say the same"):
        call(source, tmp_path / "ours", "--check")


def test_an_adapter_is_merged_on_the_way(tmp_path: Path) -> None:
    source = hub.save("qwen3", tmp_path / "hf")
    adapter = write_adapter(tmp_path / "adapter", hub.tensors(source), ["model.layers.1.mlp.gate_proj"])
    output = call(source, tmp_path / "merged", "--to", "hf", "--adapter", adapter, "--check")
    assert "run by paceline and transformers" in output
    assert not hub.same(hub.tensors(source), hub.tensors(tmp_path / "merged"))
    with pytest.raises(ConfigError, match="--unmerge without --adapter"):
        call(source, tmp_path / "out", "--unmerge")


SLOW = """
import sys, time
from paceline.interop.safetensors_files import SafetensorsFolder
read = SafetensorsFolder.read
SafetensorsFolder.read = lambda self, name, box: (time.sleep(0.3), read(self, name, box))[1]
from paceline.cli.main import main
sys.argv[1:1] = ["convert"]
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_ended_conversion_leaves_nothing(number: int, tmp_path: Path) -> None:
    source = hub.save("llama", tmp_path / "hf")
    command = [sys.executable, "-c", SLOW, str(source), str(tmp_path / "out"), "--threads", "2"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        for _ in range(600):
            if list(tmp_path.glob("out.tmp-*/*")):
                break
            time.sleep(0.1)
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(60) != 0
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "gguf"], "--to gguf is unknown"),
        (["--dtype", "int4"], "--dtype int4 is unknown"),
        (["--family", "bloom", "--to", "hf"], "model_type = 'bloom'"),
        (["--vocab-size", "500"], "--vocab-size 500 is not between 2 and the model's vocabulary of 101"),
    ],
)
def test_options_that_do_not_fit(arguments: list[str], message: str, tmp_path: Path) -> None:
    source = hub.save("llama", tmp_path / "hf")
    with pytest.raises(ConfigError, match=message):
        call(source, tmp_path / "out", *arguments)
    assert not (tmp_path / "out").exists()


def test_a_key_that_has_no_effect_can_be_passed_over(tmp_path: Path) -> None:
    source = hub.save("llama", tmp_path / "hf")
    hub.change_config(source, my_note="made on a Monday")
    with pytest.raises(ConfigError, match="my_note"):
        call(source, tmp_path / "out")
    call(source, tmp_path / "out", "--ignore-key", "my_note")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "It is empty"),
        ({"adapter_config.json": "{}"}, "PEFT adapter"),
        ({"a.txt": "", "b.txt": ""}, "It has a.txt, b.txt"),
        ({"config.json": "{}"}, "names no model_type"),
    ],
)
def test_folders_that_hold_no_model(files: dict[str, str], message: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        call(tmp_path, tmp_path / "out")
    with pytest.raises(CheckpointError, match="there is no folder"):
        call(tmp_path / "nowhere", tmp_path / "out")
