"""A run that was ended at any step goes on as if nothing had happened, on any number of ranks and either engine."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from distributed import run as on_ranks
from paceline.config.load import resolve
from paceline.errors import ConfigError, PacelineError, RunFolderError, TrainingError
from paceline.training.resume import refuse_start
from paceline.training.summary import Summary
from tests.training import runs
from tests.training.runs import alone, losses


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return runs.write_dataset(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture(scope="module")
def straight(data: str, tmp_path_factory: pytest.TempPathFactory) -> list[runs.StepRecord]:
    """Eight uninterrupted steps on two ranks."""
    return on_ranks(runs.run, 2, runs.tiny(tmp_path_factory.mktemp("straight") / "run", data))[0]


@pytest.mark.parametrize("stop_after", [3, 5])
def test_stopped_and_resumed_is_bit_equal(
    stop_after: int, data: str, straight: list[runs.StepRecord], tmp_path: Path
) -> None:
    recipe = runs.tiny(tmp_path / "run", data)
    first = on_ranks(runs.run, 2, recipe, stop_after)[0]
    assert [record.step for record in first] == list(range(1, stop_after + 1))
    again = on_ranks(runs.run, 2, recipe)[0]
    assert losses(again) == losses(straight)
    assert [r.lr for r in again] == [r.lr for r in straight]
    assert [r.tokens for r in again] == [r.tokens for r in straight]


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (4, []),
        (1, []),
        (2, ["parallel.zero=3"]),
        (4, ["parallel.zero=3", "parallel.dp_replicate=2"]),
        (2, ["parallel.zero=0", "train.micro_batch_size=2"]),
    ],
)
def test_resumed_on_other_ranks_and_engines_is_equal_to_rounding(
    ranks: int, changes: list[str], data: str, straight: list[runs.StepRecord], tmp_path: Path
) -> None:
    recipe = runs.tiny(tmp_path / "run", data)
    on_ranks(runs.run, 2, recipe, 4)
    again = on_ranks(runs.run, ranks, [*recipe, *changes])[0]
    for step, loss in losses(straight).items():
        assert losses(again)[step] == pytest.approx(loss, abs=1e-5), step


def test_from_fsdp_to_flat(data: str, straight: list[runs.StepRecord], tmp_path: Path) -> None:
    recipe = runs.tiny(tmp_path / "run", data)
    on_ranks(runs.run, 4, [*recipe, "parallel.zero=2"], 4)
    again = on_ranks(runs.run, 2, recipe)[0]
    for step, loss in losses(straight).items():
        assert losses(again)[step] == pytest.approx(loss, abs=1e-5), step


def test_killed_at_any_moment_the_same_command_goes_on(data: str, tmp_path: Path) -> None:
    """SIGKILL of all processes of `paceline train --nproc 2`; every later loss is bit-equal."""
    straight = on_ranks(runs.run, 2, runs.tiny(tmp_path / "straight", data, steps=30))[0]
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("")
    sets = [f"--set={override}" for override in runs.tiny(tmp_path / "run", data, steps=30)]
    command = [sys.executable, "-m", "paceline", "train", str(recipe), "--nproc", "2", *sets]
    metrics = tmp_path / "run" / "metrics.jsonl"
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 90
    while not metrics.exists() or metrics.read_text().count("\n") < 8:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    _kill_family(process)
    killed_at = metrics.read_text().count("\n")
    assert killed_at < 30
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    again = runs.read_metrics(tmp_path / "run")
    assert losses(again) == losses(straight)
    assert [record.step for record in again] == list(range(1, 31))


def _kill_family(process: subprocess.Popen[bytes]) -> None:
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in family:
        member.send_signal(signal.SIGKILL)
    process.wait()
    psutil.wait_procs(family, timeout=10)


@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGHUP, 0), (signal.SIGKILL, -9)]
)
def test_a_signal_to_the_launcher_saves_and_ends_all_processes(
    number: signal.Signals, exit_code: int, data: str, tmp_path: Path
) -> None:
    """Also SIGKILL, which the launcher cannot pass on: its processes notice that it is gone."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("")
    overrides = runs.tiny(tmp_path / "run", data, "checkpoint.interval=0", steps=100000)
    command = [sys.executable, "-m", "paceline", "train", str(recipe), "--nproc", "2"]
    process = subprocess.Popen(
        [*command, *(f"--set={override}" for override in overrides)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # under nohup, which tests may be started with, a hang-up is ignored by all that is started
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == exit_code, output.decode()
    assert not psutil.wait_procs(family, timeout=30)[1], "processes outlived their launcher"
    assert (b"Ctrl-C again" in output) == (number == signal.SIGINT)
    last = runs.read_metrics(tmp_path / "run")[-1].step
    assert (tmp_path / "run" / "checkpoints" / f"step_{last:08d}" / "manifest.json").exists()
    events = [json.loads(line)["event"] for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert events[-1] == "stop"


def refused(overrides: list[str]) -> PacelineError:
    with pytest.raises(PacelineError) as error:
        alone(overrides)
    return error.value


def test_another_recipe_in_the_same_folder_is_refused(data: str, tmp_path: Path) -> None:
    recipe = runs.tiny(tmp_path / "run", data)
    alone(recipe, 2)
    before = (tmp_path / "run" / "recipe.toml").read_text()
    error = refused([*recipe, "optim.lr=0.5", "model.num_layers=3"])
    assert isinstance(error, RunFolderError)
    assert "optim.lr: 0.01 there, 0.5 now" in error.evidence and "--set run.dir=PATH" in error.next_step
    error = refused([*recipe, "optim.lr=0.5"])
    assert 'allow_change=["lr"]' in error.next_step
    assert (tmp_path / "run" / "recipe.toml").read_text() == before
    assert "train.steps" in refused([*recipe, "train.steps=20"]).evidence
    # the launcher sees it too, before it starts processes, and changes nothing
    refuse_start(resolve({}, recipe).config)
    with pytest.raises(RunFolderError, match="another recipe"):
        refuse_start(resolve({}, [*recipe, "optim.lr=0.5"]).config)
    assert (tmp_path / "run" / "recipe.toml").read_text() == before


def test_a_run_goes_on_in_fp8_and_with_other_scales(data: str, tmp_path: Path) -> None:
    """Masters are in fp32 whatever products are: neither precision nor scaling makes another run of it."""
    recipe = runs.tiny(tmp_path / "run", data, "train.precision=bf16")
    alone(recipe, 2)
    delayed = [*recipe, "train.precision=fp8", "train.fp8_scaling=delayed", "train.fp8_amax_history=2"]
    refuse_start(resolve({}, delayed).config)
    with told() as texts:
        alone(delayed, 4)
    assert "train.fp8_scaling = 'delayed' (was 'tensorwise')" in texts[0]
    assert any("has no largest numbers of earlier steps for 8 fp8 products" in text for text in texts)
    # histories of another length begin anew too
    with told() as texts:
        alone([*delayed, "train.fp8_amax_history=3", "train.fp8_skip_layers=[0]"], 6)
    assert any("has no largest numbers of earlier steps for 4 fp8 products" in text for text in texts)
    with told() as texts:  # those that nobody reads any more are left
        records = alone([*recipe, "train.precision=fp8", "train.fp8_scaling=rowwise", "train.fp8_weight_cache=false"])
    assert "train.fp8_scaling = 'rowwise' (was 'delayed')" in texts[0] and len(texts) == 1
    assert [record.step for record in records] == list(range(1, 9))
    assert all(record.loss is not None and record.loss < 6 for record in records)


@contextmanager
def told() -> Iterator[list[str]]:
    """What is said of the run that is taken up, as it is said: a run sets handlers of its own."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger(f"paceline.training.{name}") for name in ("resume", "persist")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield texts
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)


def test_changes_on_purpose_are_made(data: str, tmp_path: Path) -> None:
    recipe = runs.tiny(tmp_path / "run", data)
    alone(recipe, 4)
    changed = alone([*recipe, "optim.lr=0.002", "optim.min_lr=0.001", 'checkpoint.allow_change=["lr"]'])
    assert changed[3].lr > 0.002 > changed[4].lr
    assert changed[-1].lr == pytest.approx(0.001)
    other = runs.write_dataset(tmp_path / "other", seed=5)
    error = refused([*recipe, "train.steps=12", f"data.train={other}", 'checkpoint.allow_change=["lr"]'])
    assert "data.train" in error.evidence
    grown = alone(
        [
            *recipe,
            "train.steps=12",
            "optim.lr=0.002",
            "optim.min_lr=0.001",
            f"data.train={other}",
            "train.global_batch_size=8",
            'checkpoint.allow_change=["lr", "data", "batch"]',
        ]
    )
    assert [record.step for record in grown] == list(range(1, 13))
    assert grown[-1].tokens - grown[-2].tokens == 8 * 16


def test_another_kernel_of_the_same_update_needs_no_leave(data: str, tmp_path: Path) -> None:
    recipe = runs.tiny(tmp_path / "run", data)
    alone(recipe, 2)
    assert alone([*recipe, "optim.fused_update=true"], 4)[-1].step == 4


def test_resuming_past_the_end_says_so(data: str, tmp_path: Path) -> None:
    recipe = runs.tiny(tmp_path / "run", data, steps=3)
    alone(recipe)
    error = refused(recipe)
    assert isinstance(error, TrainingError)
    assert "step 3 of 3" in error.subject and "train.steps" in error.next_step
    with pytest.raises(TrainingError, match="step 3 of 3"):
        refuse_start(resolve({}, recipe).config)


def test_a_run_that_was_killed_before_its_summary_gets_one(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    recipe = runs.tiny(folder, data, f"data.valid={data}", steps=3)

    def killed(summary: Summary, folder: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Summary, "write", killed)
        alone(recipe)
    metrics = (folder / "metrics.jsonl").read_text()
    assert not (folder / "summary.json").exists()
    refuse_start(resolve({}, recipe).config)
    alone(recipe)
    found = json.loads((folder / "summary.json").read_text())
    assert found["steps"] == 3 and found["evaluation"]["loss"] > 0 and not found["stopped_by"]
    assert (folder / "metrics.jsonl").read_text() == metrics, "no step was trained again"
    # one of an earlier start that was stopped is none of the whole run
    (folder / "summary.json").write_text(json.dumps(found | {"steps": 2, "stopped_by": "SIGTERM"}))
    alone(recipe)
    assert json.loads((folder / "summary.json").read_text())["steps"] == 3
    assert isinstance(refused(recipe), TrainingError)
    # a folder without metrics, of a converted checkpoint, has nothing to sum up
    (folder / "summary.json").unlink()
    (folder / "metrics.jsonl").unlink()
    assert isinstance(refused(recipe), TrainingError)


def test_a_changed_sample_order_is_noticed(data: str, tmp_path: Path) -> None:
    recipe = runs.tiny(tmp_path / "run", data, "optim.schedule=constant")
    alone(recipe, 4)
    # so many steps need more epochs, and in Megatron's order epochs are shuffled together
    error = refused([*recipe, "train.steps=400"])
    assert isinstance(error, ConfigError) and "order of samples" in error.subject
    steady = runs.tiny(tmp_path / "steady", data, "optim.schedule=constant", "data.order=epoch")
    alone(steady, 4)
    assert alone([*steady, "train.steps=40"])[-1].step == 40


def test_a_warm_start_takes_weights_only(data: str, tmp_path: Path) -> None:
    first = alone(runs.tiny(tmp_path / "first", data))
    warm = alone(runs.tiny(tmp_path / "warm", data, f"model.init_from={tmp_path / 'first'}"))
    assert warm[0].step == 1 and warm[0].lr == first[0].lr
    assert (warm[0].loss or 9) < (first[0].loss or 0) - 0.1


def test_never_resume_does_not_overwrite(data: str, tmp_path: Path) -> None:
    recipe = runs.tiny(tmp_path / "run", data)
    alone(recipe, 4)
    error = refused([*recipe, "checkpoint.resume=never"])
    assert "up to step 4" in error.subject
    assert (tmp_path / "run" / "checkpoints" / "step_00000004" / "manifest.json").exists()


def test_a_damaged_checkpoint_is_passed_over(data: str, straight: list[runs.StepRecord], tmp_path: Path) -> None:
    recipe = runs.tiny(tmp_path / "run", data)
    on_ranks(runs.run, 2, recipe, 7)
    newest = tmp_path / "run" / "checkpoints" / "step_00000007"
    victim = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-100])
    again = on_ranks(runs.run, 2, recipe)[0]
    assert losses(again) == losses(straight)
    assert any("step_00000007 is damaged" in path.read_text() for path in (tmp_path / "run" / "logs").iterdir())
