"""Bad input of post-training, through the real verbs: a message that says what is wrong, and nothing half-written."""

from __future__ import annotations

import json
import string
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from paceline.cli import main as command_line
from tests.cli.commands import LAUNCHER
from tests.interop import hub_folders as hub
from tests.interop.test_peft import write_adapter

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('there is no place for system') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
GOOD = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}
PAIR = {"prompt": "Hi", "chosen": "Hello.", "rejected": "Go away."}
Command = Callable[..., "Done"]


class Done:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err
        self.text = " ".join((out + err).split())


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """The command line in this process, in a folder of its own."""
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["paceline", *map(str, arguments)])
        code = 0
        try:
            command_line.main()
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return call


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = hub.save("llama", tmp_path_factory.mktemp("made") / "hf", shard="100KB")
    alphabet = [*string.ascii_letters, *".,!?<>|_", "Ġ", "Ċ"]  # the last two: how byte-level writes blank and newline
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML, "eos_token": "<|im_end|>"}))
    return folder


@pytest.fixture
def model(made: Path, tmp_path: Path) -> Path:
    """A model with its tokenizer and chat template; its weights are several files."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in made.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def write_rows(path: Path, *rows: Mapping[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train(command: Command, model: Path, rows: Path, **more: object) -> Done:
    settings = {
        "run.dir": "run",
        "model.init_from": model,
        "data.train": rows,
        "task.kind": "sft",
        "train.steps": 1,
        "train.seq_len": 64,
        "train.micro_batch_size": 1,
        "train.global_batch_size": 1,
        "train.precision": "fp32",
        "cluster.device": "cpu",
        "observe.tensorboard": "false",
        **{name.replace("__", "."): value for name, value in more.items()},
    }
    recipe = Path("recipe.toml")
    recipe.write_text("")
    return command("train", recipe, *(f"--set={name}={value}" for name, value in settings.items()))


def refused(done: Done, *words: str) -> None:
    """It failed with these words and without a stack trace, and left neither a run nor a model behind."""
    assert done.code in (1, 2), done.text
    assert "Traceback" not in done.text
    for word in words:
        assert word in done.text, done.text
    assert "→" in done.err, "there is a next step"
    for name in ("run", "out"):
        left = [file for file in Path(name).rglob("*") if file.is_file() and file.parent.name != "logs"]
        assert [str(file) for file in left if file.suffix in (".safetensors", ".distcp") or "step_" in str(file)] == []
    assert not Path("out").exists()
    assert [path.name for path in Path().iterdir() if path.name.endswith((".part", ".tmp"))] == []


def test_the_input_without_a_fault_is_taken(command: Command, model: Path, tmp_path: Path) -> None:
    """Guards the others: they are refused for their fault alone."""
    done = train(command, model, write_rows(tmp_path / "rows.jsonl", GOOD, GOOD))
    assert done.code == 0, done.text
    assert list(Path("run").glob("checkpoints/step_*"))
    pairs = write_rows(tmp_path / "pairs.jsonl", PAIR, PAIR)
    assert train(command, model, pairs, run__dir="run2", task__kind="dpo").code == 0
    assert command("convert", model, "ours").code == 0


@pytest.mark.parametrize(("rank", "template"), [(0, ""), (2, ""), (0, "zephyr"), (0, "mine.jinja")])
def test_pairs_go_on_from_a_run_of_conversations(
    rank: int, template: str, command: Command, model: Path, tmp_path: Path
) -> None:
    """Tokenizer and template are the run's, in all of its later steps: inspecting, DPO, answering."""
    Path("mine.jinja").write_text(CHATML.replace("im_start", "mine"))
    rows = write_rows(tmp_path / "rows.jsonl", GOOD, GOOD)
    if rank:  # adapters of a run of ours
        assert train(command, model, rows, run__dir="base").code == 0
    first = {"data.template": template, "lora.rank": rank} if template or rank else {}
    done = train(command, Path("base") if rank else model, rows, run__dir="sft", **first)
    assert done.code == 0, done.text
    assert 'generate sft --chat --prompt "..."' in done.text
    Path("mine.jinja").unlink()
    sign = {"": "<|im_start|>", "zephyr": "<|user|>", "mine.jinja": "<|mine|>"}[template]
    looked = command("data", "inspect", rows, "--task", "sft", "--tokenizer", "sft")
    assert looked.code == 0 and sign in looked.out, looked.text
    pairs = write_rows(tmp_path / "pairs.jsonl", PAIR, PAIR)
    done = train(command, Path("sft"), pairs, run__dir="dpo", task__kind="dpo", train__seq_len=96)
    assert done.code == 0, done.text
    looked = command("data", "inspect", pairs, "--task", "dpo", "--tokenizer", "dpo")
    assert looked.code == 0 and sign in looked.out, looked.text
    answer = command("generate", "dpo", "--chat", "--prompt", "Hi", "--max-tokens", "1", "--device", "cpu")
    assert answer.code == 0, answer.text


# ---- models


@pytest.mark.parametrize("verb", ["train", "convert", "generate", "eval"])
def test_a_wrong_family(verb: str, command: Command, model: Path, tmp_path: Path) -> None:
    hub.change_config(model, model_type="bert")
    rows = write_rows(tmp_path / "rows.jsonl", GOOD)
    done = by_verb(command, verb, model, rows)
    refused(done, "model_type = 'bert' is not a family that can be read", "llama")


@pytest.mark.parametrize("verb", ["train", "convert", "generate"])
def test_a_missing_shard(verb: str, command: Command, model: Path, tmp_path: Path) -> None:
    shards = sorted(model.glob("model-*.safetensors"))
    assert len(shards) > 1
    shards[1].unlink()
    done = by_verb(command, verb, model, write_rows(tmp_path / "rows.jsonl", GOOD))
    refused(done, shards[1].name)


@pytest.mark.parametrize("verb", ["train", "convert", "generate"])
def test_a_truncated_file(verb: str, command: Command, model: Path, tmp_path: Path) -> None:
    shard = sorted(model.glob("model-*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])
    done = by_verb(command, verb, model, write_rows(tmp_path / "rows.jsonl", GOOD))
    refused(done, shard.name)


def by_verb(command: Command, verb: str, model: Path, rows: Path) -> Done:
    if verb == "train":
        return train(command, model, rows)
    if verb == "convert":
        return command("convert", model, "out")
    if verb == "generate":
        return command("generate", model, "--prompt", "Hi", "--device", "cpu", "--max-tokens", 2)
    Path("text.txt").write_text("Hi")
    return command("eval", model, "text.txt", "--device", "cpu")


@pytest.mark.parametrize("verb", ["train", "convert", "generate"])
def test_an_adapter_of_another_model(verb: str, command: Command, model: Path, tmp_path: Path) -> None:
    other = {"model.layers.0.self_attn.q_proj.weight": hub.tensors(model)["lm_head.weight"]}
    adapter = write_adapter(tmp_path / "adapter", other, ["model.layers.0.self_attn.q_proj"])
    rows = write_rows(tmp_path / "rows.jsonl", GOOD)
    if verb == "train":
        done = train(command, model, rows, lora__rank=3, lora__targets="q_proj", lora__init_adapter=adapter)
    elif verb == "convert":
        done = command("convert", model, "out", "--to", "hf", "--adapter", adapter)
    else:
        done = command("generate", model, "--prompt", "Hi", "--device", "cpu", "--adapter", adapter)
    refused(done, "adapter", "q_proj")


# ---- rows


@pytest.mark.parametrize("verb", ["train", "generate"])
def test_a_chat_template_without_the_asked_role(verb: str, command: Command, model: Path, tmp_path: Path) -> None:
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": NO_SYSTEM, "eos_token": "<|im_end|>"}))
    turns = [{"role": "system", "content": "Be brief."}, *GOOD["messages"]]
    if verb == "train":
        done = train(command, model, write_rows(tmp_path / "rows.jsonl", {"messages": turns}))
        refused(done, "has no place for a system turn", "there is no place for system")
        return
    done = command("generate", model, "--chat", "-p", "Hi", "--system", "Be brief.", "--device", "cpu")
    refused(done, "refuses these turns", "there is no place for system")


def test_preference_pairs_with_equal_answers(command: Command, model: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", PAIR, {**PAIR, "rejected": PAIR["chosen"]}, PAIR)
    refused(train(command, model, rows, task__kind="dpo"), "equal answers", "rows.jsonl:2")


def test_an_empty_assistant_turn(command: Command, model: Path, tmp_path: Path) -> None:
    empty = {"messages": [GOOD["messages"][0], {"role": "assistant", "content": "  "}]}
    rows = write_rows(tmp_path / "rows.jsonl", GOOD, GOOD, empty)
    refused(train(command, model, rows), "rows.jsonl:3", "empty")


def test_rows_longer_than_a_sequence(command: Command, model: Path, tmp_path: Path) -> None:
    long = {"messages": [GOOD["messages"][0], {"role": "assistant", "content": "word " * 50}]}
    rows = write_rows(tmp_path / "rows.jsonl", GOOD, long)
    refused(train(command, model, rows), "64", "data.too_long")


def test_sequences_longer_than_the_model(command: Command, model: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", GOOD)
    refused(train(command, model, rows, train__seq_len=4096), "train.seq_len = 4096", "max_seq_len = 128")
    prompt = "word " * 100
    done = command("generate", model, "--prompt", prompt, "--device", "cpu")
    refused(done, "the model's longest sequence is 128")


def test_conversations_are_not_scored_as_one_text(command: Command, model: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", GOOD)
    refused(command("eval", model, rows, "--device", "cpu"), "rows.jsonl holds rows, not one text", "data.valid = ")


def test_rows_of_another_task(command: Command, model: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", PAIR)
    refused(train(command, model, rows), "preference pair", "rows.jsonl:1")
    rows = write_rows(tmp_path / "rows.jsonl", GOOD)
    refused(train(command, model, rows, task__kind="dpo"), "conversation", "rows.jsonl:1")
