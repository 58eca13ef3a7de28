from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.observe.events import RunFolder, StepRecord, read_events, read_metrics
from paceline.observe.hooks import CheckpointSaved, RunEnd, RunStart, StepEnd
from paceline.observe.sinks import EventHook, Guarded, SinkHook, build_sinks

RECORD = StepRecord(
    step=5, loss=2.5, grad_norm=0.5, lr=1e-3, tokens=64, tokens_per_second_per_gpu=1000.0, tflops_per_gpu=None,
    mfu=None, step_seconds=0.064, data_wait_seconds=0.0, memory_gib=0.25, skipped_steps=0, flops_convention="causal",
    peak_tflops=None, extra={"moe/dropped": 1.0},
)  # fmt: skip


def start(folder: RunFolder) -> RunStart:
    return RunStart(run_name="demo", run_dir=folder.path, start_step=0, total_steps=10, recipe={"train": {"steps": 10}})


def feed(folder: RunFolder, hook: SinkHook, error: BaseException | None = None) -> None:
    hook.on_start(start(folder))
    hook.on_step_end(StepEnd(step=4))
    hook.on_step_end(StepEnd(step=5, record=RECORD, evaluation={"loss": 2.25}))
    hook.on_end(RunEnd(step=5, error=error))


def test_run_folder_and_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = RunFolder(tmp_path)
    feed(folder, SinkHook(build_sinks(folder)))
    assert read_metrics(tmp_path) == [RECORD]
    (evaluation,) = read_events(tmp_path)
    assert (evaluation["event"], evaluation["step"], evaluation["loss"]) == ("evaluation", 5, 2.25)
    shown = EventAccumulator(str(folder.tensorboard))
    shown.Reload()
    tags = set(shown.Tags()["scalars"])
    assert {"train/loss", "train/grad_norm", "moe/dropped", "eval/loss"} <= tags and "train/mfu" not in tags
    (value,) = shown.Scalars("train/loss")
    assert (value.step, value.value) == (5, 2.5)


def test_tensorboard_can_be_switched_off(tmp_path: Path) -> None:
    feed(RunFolder(tmp_path), SinkHook(build_sinks(RunFolder(tmp_path), tensorboard=False)))
    assert not (tmp_path / "tensorboard").exists()


@pytest.mark.parametrize(
    ("package", "option"),
    [("wandb", "wandb_project"), ("mlflow", "mlflow_experiment"), ("trackio", "trackio_project")],
)
def test_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, option: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    arguments: dict[str, Any] = {option: "mine"}
    with pytest.raises(ConfigError) as caught:
        build_sinks(RunFolder(tmp_path), **arguments)
    assert f"observe.{option}" in caught.value.subject
    assert f"pip install -c constraints.txt -e '.[{package}]'" in caught.value.next_step


class Service:
    """Stands in for a tracking package: notes calls, fails from the given call on."""

    def __init__(self, fail_after: int = 99, error: Exception | None = None) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.fail_after = fail_after
        self.error = error or ConnectionError("no route")

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Service:
            if len(self.calls) >= self.fail_after:
                raise self.error
            self.calls.append((name, args, kwargs))
            return self

        return call


def pretend(monkeypatch: pytest.MonkeyPatch, service: Service) -> None:
    class ServiceError(Exception):
        pass

    def module(name: str, **names: Any) -> None:
        made = ModuleType(name)
        for key, value in names.items():
            setattr(made, key, value)
        monkeypatch.setitem(sys.modules, name, made)

    module("wandb", init=service.init, Error=ServiceError)
    functions = {
        name: getattr(service, name) for name in ("set_experiment", "start_run", "log_dict", "log_metrics", "end_run")
    }
    module("mlflow", exceptions=SimpleNamespace(MlflowException=ServiceError), **functions)
    module("trackio", init=service.init, log=service.log, finish=service.finish)
    module("httpx", HTTPError=ServiceError)


EVERY_SERVICE = {"wandb_project": "p", "mlflow_experiment": "e", "trackio_project": "t"}


def test_services_get_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service()
    pretend(monkeypatch, service)
    folder = RunFolder(tmp_path)
    feed(folder, SinkHook(build_sinks(folder, tensorboard=False, **EVERY_SERVICE)), error=ValueError())
    numbers: list[Mapping[str, float]] = [args[0] for name, args, _ in service.calls if name in ("log", "log_metrics")]
    kinds = [name for values in numbers for name in ("train/loss", "eval/loss") if name in values]
    assert sorted(kinds) == ["eval/loss"] * 3 + ["train/loss"] * 3
    steps = {kwargs["step"] for name, _, kwargs in service.calls if name in ("log", "log_metrics")}
    assert steps == {5}
    names = [name for name, _, _ in service.calls]
    assert names.count("init") == 2 and names.count("start_run") == 1
    assert [kwargs for name, _, kwargs in service.calls if name == "end_run"] == [{"status": "FAILED"}]
    assert ("finish", (), {"exit_code": 1}) in service.calls


def test_unreachable_service_is_given_up_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service = Service(fail_after=1)
    pretend(monkeypatch, service)
    folder = RunFolder(tmp_path)
    with caplog.at_level(logging.WARNING):
        feed(folder, SinkHook(build_sinks(folder, tensorboard=False, wandb_project="p")))
    (warning,) = [entry.getMessage() for entry in caplog.records]
    assert "Weights & Biases" in warning and "ConnectionError: no route" in warning
    assert [name for name, _, _ in service.calls] == ["init"]
    assert read_metrics(tmp_path) == [RECORD]


def test_our_own_faults_are_not_hidden(tmp_path: Path) -> None:
    class Faulty:
        def __getattr__(self, name: str) -> Any:
            raise TypeError(name)

    with pytest.raises(TypeError):
        Guarded(Faulty(), "faulty", (OSError,)).record(RECORD)


def test_events_of_a_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    hook = EventHook(folder)
    hook.on_start(start(folder))
    hook.on_checkpoint(CheckpointSaved(step=5, path=tmp_path / "checkpoints" / "5"))
    hook.on_end(RunEnd(step=5, reason="SIGTERM"))
    hook.on_start(RunStart(run_name="demo", run_dir=tmp_path, start_step=5, total_steps=10, facts={"gpus": 2}))
    hook.on_end(RunEnd(step=7, error=ValueError("bad")))
    seen = [(event["event"], event["step"]) for event in read_events(tmp_path)]
    assert seen == [("start", 0), ("checkpoint", 5), ("stop", 5), ("resume", 5), ("error", 7)]
    assert read_events(tmp_path)[-1]["message"] == "bad"


def test_every_sink_is_closed_whatever_one_of_them_does(tmp_path: Path) -> None:
    closed: list[str] = []

    class Recording:
        def __init__(self, name: str, error: Exception | None = None) -> None:
            self.name, self.error = name, error

        def start(self, start: RunStart) -> None: ...

        def record(self, record: StepRecord) -> None: ...

        def evaluation(self, step: int, values: Mapping[str, float]) -> None: ...

        def close(self, failed: bool) -> None:
            closed.append(f"{self.name} {failed}")
            if self.error is not None:
                raise self.error

    hook = SinkHook([Recording("a"), Recording("b", OSError("disk full")), Recording("c")])
    with pytest.raises(OSError, match="disk full"):
        hook.on_end(RunEnd(step=1))
    assert closed == ["a False", "b False", "c False"]


def test_services_that_never_started_are_closed_in_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook before them failed at the start of the run."""
    service = Service()
    pretend(monkeypatch, service)
    hook = SinkHook(build_sinks(RunFolder(tmp_path), **EVERY_SERVICE))
    hook.on_end(RunEnd(step=0, error=ValueError("elsewhere")))
    assert service.calls == []
