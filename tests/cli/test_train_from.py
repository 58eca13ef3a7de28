"""`paceline train --from`: what is printed is a recipe that runs as it is, and what was lost is told."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.cli import main as command_line
from paceline.config.load import load_recipe
from tests.data.chat_tokenizers import write_tokenizer

YAML = """
### model
model_name_or_path: tiny
### method
stage: sft
finetuning_type: lora
lora_rank: 4
lora_target: q_proj,v_proj
### dataset
dataset: mine, yours
dataset_dir: rows
template: chatml
cutoff_len: 64
### train
per_device_train_batch_size: 2
gradient_accumulation_steps: 1
learning_rate: 1e-4
num_train_epochs: 2.0
bf16: true
"""
SCRIPT = """
MODEL=tiny
NPROC_PER_NODE=4 \\
CUDA_VISIBLE_DEVICES=0,1,2,3 \\
swift rlhf \\
    --rlhf_type dpo \\
    --model $MODEL \\
    --train_type full \\
    --dataset rows/mine.jsonl \\
    --per_device_train_batch_size 1 \\
    --gradient_accumulation_steps 2 \\
    --max_steps 7 --torch_dtype bfloat16 --deepspeed zero3
"""
MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "rows").mkdir()
    row = json.dumps({"instruction": "a", "output": "b"})
    (tmp_path / "rows" / "mine.jsonl").write_text(f"{row}\n" * 3)
    (tmp_path / "rows" / "yours.json").write_text(f"[{', '.join([row] * 6)}]")
    names = {"mine": {"file_name": "mine.jsonl"}, "yours": {"file_name": "yours.json"}}
    (tmp_path / "rows" / "dataset_info.json").write_text(json.dumps(names))
    (tmp_path / "x.yaml").write_text(YAML)
    return tmp_path


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["paceline", "train", *arguments])
        with pytest.raises(SystemExit) as ended:
            command_line.main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


def test_a_yaml_becomes_a_recipe_that_loads(folder: Path, command: Command) -> None:
    code, out, err = command("--from", "llamafactory", "x.yaml", "--nproc", "2", "--set", "run.name=mine")
    assert code == 0 and err == ""
    Path("x.toml").write_text(out)
    config = load_recipe("x.toml").config
    assert config.model.hidden_size == 64 and config.model.init_from == "tiny"
    assert (config.lora.rank, config.lora.alpha, config.lora.targets) == (4, 8.0, ("q_proj", "v_proj"))
    assert config.train.global_batch_size == 4 and config.train.steps == 6  # 2 x ceil(9 rows / 4)
    assert [source.weight for source in config.data.train] == [3, 6] and config.run.name == "mine"
    assert "lr = 0.0001  # learning_rate: 1e-4" in out and "seed = 42  # seed (the default there)" in out


def test_unknown_keys_are_listed_and_the_recipe_is_printed_all_the_same(folder: Path, command: Command) -> None:
    with Path("x.yaml").open("a") as file:
        file.write("packng: true\nuse_galore: true\nplot_loss: true\n")
    code, out, err = command("--from", "llamafactory", "x.yaml")
    assert code == 1
    assert "error: packng: true is not a key that is known of LLaMA-Factory" in err and "Did you mean packing?" in err
    assert "error: use_galore: true has no counterpart" in err
    assert "1 key has no field in the recipe and needs none: plot_loss" in err
    assert "[lora]" in out and "#   packng: true is not a key" in out
    Path("x.toml").write_text(out)
    load_recipe("x.toml")


def test_all_that_is_wrong_is_told_at_once(folder: Path, command: Command) -> None:
    wrong = {"stage: sft": "stage: sff", "mine, yours": "mine, your", "1e-4": "-1"}
    text = YAML
    for right, value in wrong.items():
        text = text.replace(right, value)
    (folder / "x.yaml").write_text(text)
    code, out, err = command("--from", "llamafactory", "x.yaml")
    assert code == 1 and 'template = "chatml"' in out
    assert "stage: sff has no counterpart" in err and "has no data set 'your'" in err and "optim.lr = -1" in err
    assert "Did you mean 'yours'?" in err


def test_a_script_and_the_same_words_in_quotes(folder: Path, command: Command) -> None:
    Path("run.sh").write_text(SCRIPT)
    code, out, err = command("--from", "ms-swift", "run.sh")
    assert code == 0 and err == ""
    Path("x.toml").write_text(out)
    config = load_recipe("x.toml").config
    assert config.task.kind == "dpo" and config.parallel.zero == 3 and config.lora.rank == 0
    assert config.train.global_batch_size == 8 and config.train.steps == 7 and config.model.init_from == "tiny"
    same = command("--from", "ms-swift", SCRIPT)
    assert same[0] == 0 and same[1].splitlines()[1:] == out.splitlines()[1:]
    flags = "--rlhf_type dpo --model tiny --dataset rows/mine.jsonl --max_steps 7"
    assert command("--from", "ms-swift", "--nproc", "4", "--", flags)[0] == 0


def test_a_model_that_is_not_here_is_told(folder: Path, command: Command) -> None:
    code, out, err = command(
        "--from", "ms-swift", "swift sft --model Qwen/Qwen3-8B --max_steps 3 --dataset AI-ModelScope/alpaca"
    )
    assert code == 0 and 'init_from = "Qwen/Qwen3-8B"' in out
    assert "hf download Qwen/Qwen3-8B --local-dir Qwen/Qwen3-8B" in err
    assert "data.train names what is not here: AI-ModelScope/alpaca" in err
    for path in ("models/qwen/8b", "/models/qwen", "./qwen"):  # paths: no name of a hub
        code, _, err = command(
            "--from", "ms-swift", f"swift sft --model {path} --max_steps 3 --dataset rows/mine.jsonl"
        )
        assert code == 0 and "is no folder here" in err and "It is a path" in err and "hf download" not in err


@pytest.mark.parametrize(
    ("source", "processes", "rate"),
    [
        ("llamafactory-cli train x.yaml", 1, 1e-4),
        ("llamafactory-cli train x.yaml --learning_rate 3e-5", 1, 3e-5),
        ("train x.yaml learning_rate=3e-5", 1, 3e-5),
        ("FORCE_TORCHRUN=1 NNODES=2 NPROC_PER_NODE=8 llamafactory-cli train x.yaml", 16, 1e-4),
        ("torchrun --nproc_per_node 4 src/train.py x.yaml", 4, 1e-4),
        ("accelerate launch --num_processes 4 src/train.py x.yaml --learning-rate 3e-5", 4, 3e-5),
        ("accelerate launch --num_machines 2 --num_processes 8 src/train.py x.yaml", 8, 1e-4),
    ],
)
def test_a_command_reads_its_file_and_then_its_words(
    source: str, processes: int, rate: float, folder: Path, command: Command
) -> None:
    code, out, err = command("--from", "llamafactory", source)
    assert code == 0 and "error" not in err
    Path("x.toml").write_text(out)
    config = load_recipe("x.toml").config
    assert (config.train.global_batch_size, config.optim.lr) == (2 * processes, rate)
    assert config.model.init_from == "tiny"


def test_a_value_behind_a_flag_is_no_subcommand(folder: Path, command: Command) -> None:
    words = "--model_name_or_path tiny --dataset mine --dataset_dir rows --cutoff_len 64 --max_steps 3 --bf16 true"
    code, out, err = command("--from", "llamafactory", f"src/train.py --stage sft {words}")
    assert code == 0 and 'kind = "sft"' in out and "error" not in err


@pytest.mark.parametrize("program", ["swift sft", "torchrun --nproc_per_node 1 swift/cli/sft.py"])
def test_ms_swift_reads_a_file_behind_config_and_the_file_has_the_last_word(
    program: str, folder: Path, command: Command
) -> None:
    (folder / "sft.yaml").write_text(
        "model: tiny\ndataset: [rows/mine.jsonl]\nmax_steps: 3\nlearning_rate: 1e-4\nmax_length: 64\n"
    )
    code, out, err = command("--from", "ms-swift", f"{program} --config sft.yaml --learning_rate 3e-5 --lora_rank 4")
    assert code == 0 and "learning_rate is 3e-5 in the command and 1e-4 in sft.yaml" in err
    Path("x.toml").write_text(out)
    config = load_recipe("x.toml").config
    assert (config.optim.lr, config.lora.rank, config.train.steps, config.train.seq_len) == (1e-4, 4, 3, 64)
    assert config.model.init_from == "tiny" and config.data.train == "rows/mine.jsonl"


@pytest.mark.parametrize("program", ["megatron sft", "torchrun --nproc_per_node 1 swift/cli/_megatron/sft.py"])
def test_megatron_is_read_in_the_command(program: str, folder: Path, command: Command) -> None:
    code, out, _ = command("--from", "ms-swift", f"{program} --model tiny --dataset rows/mine.jsonl --train_iters 3")
    assert code == 0 and "rank = 0  # train_type: full (the default there)" in out and "lr = 1e-05" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--from", "deepspeed", "x.yaml"), "--from deepspeed is unknown"),
        (("--from", "llamafactory", "none.yaml"), "none.yaml cannot be read"),
        (("--from", "ms-swift", "none.sh"), "none.sh cannot be read"),
        (("--from", "ms-swift", "echo hello"), "no command with flags"),
        (("--from", "ms-swift", "swift sft --learning_rate much"), "learning_rate: much is no number"),
        (("--from", "ms-swift", "swift sft --learning_rate -1"), "optim.lr = -1"),
        (("--from", "llamafactory"), "needs a recipe"),
        (("--from", "ms-swift", "swift stf --model tiny"), "Did you mean swift sft?"),
        (("--from", "ms-swift", "swift infer --model tiny"), "swift infer is no training"),
        (("--from", "ms-swift", "NPROC_PER_NODE=2 megatron export --model tiny"), "megatron export is no training"),
        (("--from", "llamafactory", "llamafactory-cli chat x.yaml"), "llamafactory-cli chat is no training"),
        (("--from", "llamafactory", "llamafactory-cli tran x.yaml"), "Did you mean llamafactory-cli train?"),
        (("--from", "ms-swift", "swift sft --config"), "--config names no file"),
        (("--from", "ms-swift", "swift sft --config none.yaml"), "none.yaml cannot be read"),
        (("--from", "llamafactory", "x 'unclosed"), "a quote is not closed: 'unclosed"),
        (("--from", "llamafactory", "train x.yaml more.yaml"), "a run has one file of arguments"),
        (
            ("--from", "ms-swift", "swift sft --gradient_accumulation_steps $(expr 16 / $nproc_per_node)"),
            "--gradient_accumulation_steps: $(expr 16 / $nproc_per_node) is for the shell to compute",
        ),
    ],
)
def test_bad_use_is_refused(arguments: tuple[str, ...], message: str, folder: Path, command: Command) -> None:
    code, out, err = command(*arguments)
    assert code == 2 and message in err and out == ""


ROWS = """
model_name_or_path: tiny
stage: sft
finetuning_type: lora
dataset: many
dataset_dir: rows
template: chatml
cutoff_len: 64
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
num_train_epochs: 3
bf16: true
"""


@pytest.fixture
def sixty(folder: Path) -> Path:
    row = json.dumps({"instruction": "a", "output": "b"})
    (folder / "rows" / "many.jsonl").write_text(f"{row}\n" * 60)
    (folder / "rows" / "dataset_info.json").write_text(json.dumps({"many": {"file_name": "many.jsonl"}}))
    return folder


@pytest.mark.parametrize(
    ("more", "steps", "said"),
    [
        ("", 24, "3 x 8 (60 rows / 8, rounded up)"),
        ("val_size: 0.1\n", 21, "3 x 7 (54 rows / 8, rounded up)"),
        ("val_size: 6\n", 21, "3 x 7 (54 rows / 8, rounded up)"),
        ("max_steps: 5\n", 5, "max_steps"),
    ],
)
def test_an_epoch_ends_with_an_update_of_its_own(
    more: str, steps: int, said: str, sixty: Path, command: Command
) -> None:
    Path("x.yaml").write_text(ROWS + more)
    code, out, err = command("--from", "llamafactory", "x.yaml", "--nproc", "1")
    assert code == 0 and err == "", err
    assert f"steps = {steps}  # " in out and said in out
    assert "gradient_accumulation_steps: 8 = 1 x 8 x 1 readers" in out
    assert "(the default there) (the default there)" not in out
    Path("x.toml").write_text(out)
    assert load_recipe("x.toml").config.checkpoint.export == "peft"


def test_steps_are_of_the_rows_that_the_split_leaves(sixty: Path, command: Command) -> None:
    """Copies of one content are on one side, here all 60 in training: with the tokenizer here that is counted."""
    for file in write_tokenizer(sixty / "tokenizer").iterdir():
        (sixty / "tiny" / file.name).write_bytes(file.read_bytes())
    (sixty / "tiny" / "config.json").write_text(json.dumps({**MODEL, "vocab_size": 512}))
    for rows, counted in (([0] * 60, 60), (range(60), 54), ([0] * 30 + list(range(1, 31)), 54)):
        lines = [json.dumps({"instruction": f"{i}", "output": "b"}) for i in rows]
        (sixty / "rows" / "many.jsonl").write_text("\n".join(lines))
        Path("x.yaml").write_text(ROWS + "val_size: 0.1\n")
        code, out, err = command("--from", "llamafactory", "x.yaml", "--nproc", "1")
        assert code == 0 and f"({counted} rows / 8, rounded up)" in out, err


def test_packed_rows_are_counted_or_the_steps_are_not_told_as_right(sixty: Path, command: Command) -> None:
    Path("x.yaml").write_text(ROWS + "neat_packing: true\n")
    code, out, err = command("--from", "llamafactory", "x.yaml", "--nproc", "1")
    assert code == 1 and "error: train.steps = 24 counts rows as they come" in err and "epochs = 3.0" in out
    tokenizer = write_tokenizer(sixty / "tokenizer")
    for file in tokenizer.iterdir():
        (sixty / "tiny" / file.name).write_bytes(file.read_bytes())
    (sixty / "tiny" / "config.json").write_text(json.dumps({**MODEL, "vocab_size": 512}))
    code, out, err = command("--from", "llamafactory", "x.yaml", "--nproc", "1")
    assert code == 0 and "packed sequences / 8, rounded up" in out and "epochs = 3" not in out, err
    Path("x.toml").write_text(out)
    steps = load_recipe("x.toml").config.train.steps
    code, _, err = command("x.toml", "--dry-run", "--nproc", "1")
    assert code == 0 and steps < 24, err
