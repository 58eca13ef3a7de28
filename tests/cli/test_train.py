"""`paceline train` from the command line: what it prints without training, and how it refuses what cannot be."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest

from paceline.checkpoint.locate import step_folders
from paceline.cli import main as command_line
from paceline.config.load import load_recipe
from paceline.data.indexed_writer import IndexedWriter
from paceline.observe.events import read_metrics
from tests.cli.commands import LAUNCHER, paceline
from tests.training import runs

RECIPES = Path(__file__).parent.parent.parent / "recipes"


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


Command = Callable[..., Done]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command line in this process: a process of its own for each message would cost seconds."""
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")

    def call(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
        code = 0
        try:
            command_line.main()
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return call


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "tiny.toml"
    path.write_text("")
    return str(path)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return runs.write_dataset(tmp_path_factory.mktemp("data") / "corpus")


def sets(*overrides: str) -> list[str]:
    return [f"--set={override}" for override in overrides]


# ---- what it prints


def test_print_schema_is_json_with_a_meaning_for_every_section(command: Command) -> None:
    done = command("train", "--print-schema")
    schema = json.loads(done.out)
    assert done.code == 0 and {"model", "data", "train", "parallel", "optim"} <= set(schema["properties"])
    assert "steps" in schema["$defs"]["TrainConfig"]["properties"]


@pytest.mark.parametrize("name", sorted(path.name for path in RECIPES.glob("*.toml")))
def test_print_recipe_gives_back_the_same_configuration(name: str, command: Command, tmp_path: Path) -> None:
    done = command("train", str(RECIPES / name), "--print-recipe", "--set", "run.name=other")
    assert done.code == 0
    (tmp_path / "again.toml").write_text(done.out)
    again = load_recipe(tmp_path / "again.toml").config
    assert again == load_recipe(RECIPES / name, ["run.name=other"]).config and again.run.name == "other"
    assert set(tomllib.loads(done.out)) >= {"run", "model", "train"}


def test_presets_are_listed_with_their_sizes(command: Command) -> None:
    done = command("train", "--presets")
    rows = {line.split()[0]: line.split() for line in done.out.splitlines() if line.strip()}
    assert rows["llama3_8b"][1] == "8.03B" and rows["llama3_8b"][2:5] == ["32", "4096", "32/8"]
    assert rows["mixtral_8x7b"][1:3] == ["46.7B", "12.9B"]


def test_dry_run_shows_layout_memory_and_work_and_starts_nothing(command: Command, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    recipe = str(RECIPES / "llama3_8b.toml")
    changes = sets(
        f"run.dir={folder}",
        "train.steps=10",
        "parallel.zero=3",
        "parallel.dp_replicate=2",
        "parallel.accumulate_dtype=fp32",
    )
    done = command("train", recipe, "--dry-run", "--nproc", "8", *changes)
    assert done.code == 0 and not folder.exists()
    words = " ".join(done.out.split())
    for expected in (
        "8.03B 8,030,261,248 (llama3_8b)",
        "Mesh: 8 ranks",
        "dp_replicate 2",
        "dp_shard 4",
        "micro-batches a step",
        "weights 7.48 GiB",  # 4 bytes of 8.03e9 parameters over 4 shards
        "moments 14.96 GiB",
        "FLOPs a token",
        "nothing was started or written",
    ):
        assert expected in words, expected
    tight = command("train", recipe, "--dry-run", *sets("cluster.gpu=H100 SXM"))
    assert "of the 78.80 GiB of H100 SXM" in tight.out and "parallel.zero" in tight.out
    assert command("train", recipe, "--dry-run", *sets("cluster.gpu=H1000")).code == 2


def test_dry_run_takes_the_world_size_of_the_launcher(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "node0"}.items():
        monkeypatch.setenv(name, value)
    assert "Mesh: 4 ranks" in command("train", str(RECIPES / "llama3_8b.toml"), "--dry-run").out


# ---- what it refuses


@pytest.mark.parametrize(
    ("changes", "nproc", "subject", "next_step"),
    [
        (["train.step=3"], 1, "unknown key train.step = 3", "Did you mean train.steps?"),
        (["train.steps=many"], 1, "train.steps = 'many'", "--print-schema"),
        (["model.num_heads=5"], 1, "model.num_heads = 5 does not divide model.hidden_size", "num_heads from"),
        (["train.global_batch_size=6"], 4, "train.global_batch_size = 6 is not a multiple", "4 and 8"),
        (["parallel.dp_shard=3"], 2, "does not make the 2 ranks", "--set parallel.dp_shard=2"),
        (["parallel.tp=8"], 8, "parallel.tp = 8 does not divide model.num_heads", "--set parallel.tp="),
        (["train.seq_len=64"], 1, "train.seq_len = 64 is longer than model.max_seq_len = 32", "= 32"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused_before_anything_starts(
    changes: list[str], nproc: int, subject: str, next_step: str, command: Command, recipe: str, tmp_path: Path
) -> None:
    tiny = runs.tiny(tmp_path / "run", "synthetic")
    done = command("train", recipe, "--nproc", str(nproc), *sets(*tiny, *changes))
    assert_refused(done, 2, "ConfigError: ", subject, next_step)
    assert not (tmp_path / "run").exists()


def assert_refused(done: Done, code: int, *words: str) -> None:
    assert done.code == code, done.err
    for word in words:
        assert word in done.err
    assert "→ " in done.err and "Traceback" not in done.err and not done.out


def test_a_recipe_is_needed_and_must_be_there(command: Command, tmp_path: Path) -> None:
    assert_refused(command("train"), 2, "needs a recipe", "recipes/demo.toml")
    assert_refused(command("train", str(RECIPES / "dmeo.toml")), 2, "there is no recipe", "demo.toml")


def test_nproc_under_a_launcher_is_refused(command: Command, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert_refused(command("train", recipe, "--nproc", "2"), 2, "--nproc 2 under torchrun", "Leave --nproc out")


def test_data_that_does_not_fit_is_refused_and_the_mended_command_runs(
    command: Command, recipe: str, data: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"

    def train(*changes: str) -> Done:
        return command("train", recipe, *sets(*runs.tiny(folder, data, steps=2), *changes))

    missing = train(f"data.train={tmp_path / 'nowhere'}")
    assert_refused(missing, 1, "DataError: ", "nowhere", "paceline data build")
    assert_refused(train("model.max_seq_len=5000", "train.seq_len=4000"), 1, "DataError: ", "4,00", "train.seq_len")
    assert not folder.exists(), "what the refused starts made is removed"
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")
    assert_refused(train(f"data.train={tmp_path / 'nowhere'}"), 1, "DataError: ", "nowhere")
    assert (folder / "mine.txt").read_text() == "mine"
    assert_refused(train("model.vocab_size=90"), 1, "DataError: ", "model.vocab_size")
    assert not (folder / "metrics.jsonl").exists() or not (folder / "metrics.jsonl").read_text()
    # a failed start leaves nothing that stands in the way
    done = train()
    assert done.code == 0, done.err
    assert [record.step for record in read_metrics(folder)] == [1, 2]
    assert "training loss" in done.out and str(folder) in done.out and "paceline generate" in done.out


def test_a_dataset_that_is_no_dataset(command: Command, recipe: str, data: str, tmp_path: Path) -> None:
    tiny = runs.tiny(tmp_path / "run", str(tmp_path / "bad"), steps=2)
    index, tokens = Path(f"{data}.idx").read_bytes(), Path(f"{data}.bin").read_bytes()
    for name, (idx, bin_) in {
        "foreign": (b"GIF89a" + index[6:], tokens),
        "short index": (index[:-9], tokens),
        "short tokens": (index, tokens[:-100]),
        "empty": (b"", b""),
    }.items():
        (tmp_path / "bad.idx").write_bytes(idx)
        (tmp_path / "bad.bin").write_bytes(bin_)
        done = command("train", recipe, *sets(*tiny))
        assert done.code == 1, name
        assert_refused(done, 1, "DataError: ", "bad")


@pytest.mark.parametrize("kind", ["below a file", "is a file"])
def test_a_run_folder_that_cannot_be_written(
    kind: str, command: Command, recipe: str, data: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    folder = tmp_path / "file" / ("run" if kind == "below a file" else "")
    done = command("train", recipe, *sets(*runs.tiny(folder, data)))
    assert_refused(done, 2, "RunFolderError: ", "file", "run.dir")
    assert (tmp_path / "file").read_text() == "mine"


def test_ids_that_only_some_sample_holds_end_the_run_with_their_place(
    command: Command, recipe: str, tmp_path: Path
) -> None:
    with IndexedWriter(tmp_path / "mixed", vocab_size=1000) as writer:
        for number in range(30):
            writer.add_document(np.full(40, 990 if number == 17 else 5))
    tiny = sets(*runs.tiny(tmp_path / "run", str(tmp_path / "mixed"), steps=60))
    done = command("train", recipe, *tiny)
    assert done.code == 1
    assert "holds the token id 990" in done.err and "model.vocab_size = 96" in done.err
    # only one of two ranks meets it: the other one, which loses contact, leaves it the word
    pair = paceline("train", recipe, "--nproc", "2", *tiny)
    assert pair.returncode == 1
    assert "holds the token id 990" in pair.stderr, pair.stderr
    assert "Traceback" not in pair.stderr and "LostContactError" not in pair.stderr


# ---- several processes: these cost seconds


def test_a_fault_on_one_of_two_ranks_ends_both_with_its_name(data: str, recipe: str, tmp_path: Path) -> None:
    from tests.training import faults

    folder = tmp_path / "run"
    tiny = runs.tiny(
        folder,
        data,
        "run.name=module:3:99:1",
        f'run.plugins=["{faults.__file__}"]',
        "task.kind=faulty",
        "train.max_skipped_steps=2",
        steps=20,
    )
    done = paceline("train", recipe, "--nproc", "2", *sets(*tiny))
    assert done.returncode == 1, done.stderr
    assert "TrainingError: step 4: the loss or a gradient was not finite (2 steps in a row)" in done.stderr
    assert "rank 1 of 2" in done.stderr and faults.MODULE in done.stderr
    assert "Traceback" not in done.stderr
    # rank 0 speaks for all, unless it needs more than two seconds to end
    assert done.stderr.count("TrainingError") <= 2 and "LostContactError" not in done.stderr


def test_a_process_that_the_system_ends_is_named(data: str, recipe: str, tmp_path: Path) -> None:
    tiny = sets(*runs.tiny(tmp_path / "run", data, steps=100000))
    command = [sys.executable, "-m", "paceline", "train", recipe, "--nproc", "2", *tiny]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    psutil.Process(process.pid).children()[-1].kill()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 137
    assert "LaunchError: a process of the run was ended by SIGKILL" in errors and "dmesg" in errors
    # the first one may have been written by then, or not
    saved = step_folders(tmp_path / "run" / "checkpoints")
    then = "The same command goes on from step" if saved else "There is no checkpoint yet: the same command starts from"
    assert then in errors
    assert "Traceback" not in errors
