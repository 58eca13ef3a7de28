"""Where else do metrics go? ``metrics.jsonl`` is the record of a run; the others show it.

A service that cannot be reached must not end a run of weeks, so sinks that speak to one are wrapped in ``Guarded``.
A missing package, on the other hand, is found before the first step.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from textwrap import indent
from types import ModuleType
from typing import Any, Protocol

from paceline.errors import ConfigError, to_install
from paceline.observe.events import RunFolder, StepRecord
from paceline.observe.hooks import CheckpointSaved, Hook, RunEnd, RunStart, StepEnd

_LOGGER = logging.getLogger("paceline.observe")


Samples = Sequence[tuple[str, str]]
"""(prompt, what the model says)"""


class Sink(Protocol):
    """Takes what a run has to show. Only rank 0 has sinks. ``close`` comes also where ``start`` has not, or failed."""

    def start(self, start: RunStart) -> None: ...

    def record(self, record: StepRecord) -> None: ...

    def evaluation(self, step: int, values: Mapping[str, float]) -> None: ...

    def samples(self, step: int, samples: Samples) -> None: ...

    def close(self, failed: bool) -> None: ...


class SinkHook(Hook):
    """Feeds sinks from the moments of a run."""

    def __init__(self, sinks: list[Sink]) -> None:
        self.sinks = sinks

    def on_start(self, start: RunStart) -> None:
        for sink in self.sinks:
            sink.start(start)

    def on_step_end(self, end: StepEnd) -> None:
        for sink in self.sinks:
            if end.record is not None:
                sink.record(end.record)
            if end.evaluation is not None:
                sink.evaluation(end.step, end.evaluation)
            if end.samples:
                sink.samples(end.step, end.samples)

    def on_end(self, end: RunEnd) -> None:
        # every sink is closed even if one before it fails; the stack calls last-in first-out
        with ExitStack() as stack:
            for sink in reversed(self.sinks):
                stack.callback(sink.close, failed=end.error is not None)


def build_sinks(
    folder: RunFolder,
    *,
    tensorboard: bool = True,
    wandb_project: str = "",
    mlflow_experiment: str = "",
    trackio_project: str = "",
) -> list[Sink]:
    """The sinks that were asked for; the run folder's own comes first, so that it is complete whatever the others do.

    Raises:
        ConfigError: the package of a sink is not installed.
    """
    sinks: list[Sink] = [FolderSink(folder)]
    if tensorboard:
        sinks.append(TensorBoardSink(folder))
    if wandb_project:
        wandb = _package("wandb", option="observe.wandb_project", extra="wandb")
        sinks.append(Guarded(WandbSink(wandb, folder, wandb_project), "Weights & Biases", (OSError, wandb.Error)))
    if mlflow_experiment:
        mlflow = _package("mlflow", option="observe.mlflow_experiment", extra="mlflow")
        failures = (OSError, mlflow.exceptions.MlflowException)
        sinks.append(Guarded(MlflowSink(mlflow, mlflow_experiment), "MLflow", failures))
    if trackio_project:
        trackio = _package("trackio", option="observe.trackio_project", extra="trackio")
        # trackio reaches its server through httpx, whose errors are no OSError; it is there whenever trackio is
        httpx = _package("httpx", option="observe.trackio_project", extra="trackio")
        sinks.append(Guarded(TrackioSink(trackio, trackio_project), "trackio", (OSError, httpx.HTTPError)))
    return sinks


def _package(name: str, *, option: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{option} is set, but the package {name} cannot be imported.",
            evidence=f"{error}.",
            next_step=f"Switch it off, --set {option}='', or {to_install(extra)}.",
        ) from error


class Guarded:
    """A sink that is given up, with one warning, at its first failure to reach its service.

    Only ``failures`` are caught: ``OSError``, which all network errors of Python and of requests are, and the base
    error of the sink's own package. Everything else is a fault in our code and is raised.
    """

    def __init__(self, sink: Sink, name: str, failures: tuple[type[Exception], ...]) -> None:
        self.sink: Sink | None = sink
        self.name = name
        self.failures = failures

    def start(self, start: RunStart) -> None:
        self._call("start", start)

    def record(self, record: StepRecord) -> None:
        self._call("record", record)

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        self._call("evaluation", step, values)

    def samples(self, step: int, samples: Samples) -> None:
        self._call("samples", step, samples)

    def close(self, failed: bool) -> None:
        self._call("close", failed)

    def _call(self, method: str, *args: Any) -> None:
        if self.sink is None:
            return
        try:
            getattr(self.sink, method)(*args)
        except self.failures as error:
            self.sink = None
            _LOGGER.warning(
                "%s failed and gets no more metrics of this run (%s: %s). metrics.jsonl has all of them.",
                self.name,
                type(error).__name__,
                error,
            )


class FolderSink:
    """``metrics.jsonl``, the evaluations in ``events.jsonl``, and ``samples.jsonl``. A full disk ends the run:
    RunFolderError."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def start(self, start: RunStart) -> None: ...

    def record(self, record: StepRecord) -> None:
        self.folder.write_record(record)

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        self.folder.write_event("evaluation", step=step, **values)

    def samples(self, step: int, samples: Samples) -> None:
        self.folder.write_samples(step, samples)

    def close(self, failed: bool) -> None: ...


class TensorBoardSink:
    """Event files in the run folder's ``tensorboard/``, shown by ``tensorboard --logdir``."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._writer: Any = None

    def start(self, start: RunStart) -> None:
        # takes a second to import, which only the rank that has sinks should wait for
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides what was written after the checkpoint that this run resumes from
        self._writer = SummaryWriter(str(self._folder.tensorboard), purge_step=start.start_step + 1)

    def record(self, record: StepRecord) -> None:
        self._scalars(record.step, _numbers(record))

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        self._scalars(step, _evaluation_names(values))

    def samples(self, step: int, samples: Samples) -> None:
        assert self._writer is not None, "start comes first"
        for number, (prompt, text) in enumerate(samples, start=1):
            # its page is Markdown: indented lines are shown as they are
            self._writer.add_text(f"samples/{number}", indent(prompt + text, " " * 4, lambda line: True), step)
        self._writer.flush()

    def close(self, failed: bool) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _scalars(self, step: int, values: Mapping[str, float]) -> None:
        assert self._writer is not None, "start comes first"
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()


class WandbSink:
    """A Weights & Biases run; its files lie in the run folder."""

    def __init__(self, wandb: ModuleType, folder: RunFolder, project: str) -> None:
        self._wandb = wandb
        self._folder = folder
        self._project = project
        self._run: Any = None

    def start(self, start: RunStart) -> None:
        self._run = self._wandb.init(
            project=self._project, name=start.run_name, dir=str(self._folder.path), config=dict(start.recipe)
        )

    def record(self, record: StepRecord) -> None:
        self._run.log(_numbers(record), step=record.step)

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(_evaluation_names(values), step=step)

    def samples(self, step: int, samples: Samples) -> None: ...

    def close(self, failed: bool) -> None:
        if self._run is not None:
            self._run.finish(exit_code=int(failed))


class MlflowSink:
    """An MLflow run; the tracking server is MLflow's own setting (``MLFLOW_TRACKING_URI``)."""

    def __init__(self, mlflow: ModuleType, experiment: str) -> None:
        self._mlflow = mlflow
        self._experiment = experiment
        self._started = False

    def start(self, start: RunStart) -> None:
        self._mlflow.set_experiment(self._experiment)
        self._mlflow.start_run(run_name=start.run_name)
        self._started = True
        # as a file: MLflow's parameters are cut at a length that lists of blocks exceed
        self._mlflow.log_dict(dict(start.recipe), "recipe.json")

    def record(self, record: StepRecord) -> None:
        self._mlflow.log_metrics(_numbers(record), step=record.step)

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(_evaluation_names(values), step=step)

    def samples(self, step: int, samples: Samples) -> None: ...

    def close(self, failed: bool) -> None:
        if self._started:
            self._mlflow.end_run(status="FAILED" if failed else "FINISHED")


class TrackioSink:
    """A trackio run, local unless trackio itself is told otherwise."""

    def __init__(self, trackio: ModuleType, project: str) -> None:
        self._trackio = trackio
        self._project = project
        self._started = False

    def start(self, start: RunStart) -> None:
        self._trackio.init(project=self._project, name=start.run_name, config=dict(start.recipe))
        self._started = True

    def record(self, record: StepRecord) -> None:
        self._trackio.log(_numbers(record), step=record.step)

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        self._trackio.log(_evaluation_names(values), step=step)

    def samples(self, step: int, samples: Samples) -> None: ...

    def close(self, failed: bool) -> None:
        if self._started:
            self._trackio.finish()


class EventHook(Hook):
    """Writes start or resume, checkpoints and the end of the run to ``events.jsonl``."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def on_start(self, start: RunStart) -> None:
        self.folder.write_event(
            "resume" if start.start_step else "start",
            step=start.start_step,
            total_steps=start.total_steps,
            world_size=start.world_size,
            device=start.device,
            facts=dict(start.facts),
        )

    def on_checkpoint(self, saved: CheckpointSaved) -> None:
        self.folder.write_event("checkpoint", step=saved.step, path=str(saved.path))

    def on_end(self, end: RunEnd) -> None:
        if end.error is not None:
            self.folder.write_event("error", step=end.step, error=type(end.error).__name__, message=str(end.error))
        elif end.reason:
            self.folder.write_event("stop", step=end.step, reason=end.reason)
        else:
            self.folder.write_event("end", step=end.step)


def _numbers(record: StepRecord) -> dict[str, float]:
    """What can be drawn over the steps, under names that group in the viewers; None is left out."""
    line = record.as_dict()
    return {
        name if "/" in name else f"train/{name}": float(value)
        for name, value in line.items()
        if name != "step" and isinstance(value, int | float)
    }


def _evaluation_names(values: Mapping[str, float]) -> dict[str, float]:
    return {name if "/" in name else f"eval/{name}": value for name, value in values.items()}
