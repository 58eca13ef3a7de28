"""What does a run leave behind? The run folder, its files and their schema. Torch-free.

recipe.toml      the resolved recipe; runs again as it is
metrics.jsonl    one ``StepRecord`` a logged step, also after a kill and a resume
events.jsonl     what happened: start, resume, first step, evaluation, checkpoint, stop, error
checkpoints/     written by ``checkpoint/``
logs/            one file a rank
tensorboard/     the same metrics for TensorBoard
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from paceline.errors import RunFolderError
from paceline.observe.folder_lock import FolderLock

EventKind = Literal["start", "resume", "first_step", "evaluation", "checkpoint", "stop", "end", "error", "finding"]

MAY_DIFFER = (
    "run.name", "run.dir", "run.plugins", "run.deterministic",
    "parallel", "checkpoint", "observe", "cluster",
    "train.steps", "train.micro_batch_size", "train.eval_interval", "train.eval_steps", "train.max_skipped_steps",
    "train.on_nonfinite", "train.gc_interval", "train.attention_kernel", "train.loss_kernel", "train.loss_chunk_tokens",
    "data.valid", "data.test", "data.cache_dir", "data.num_workers", "data.prefetch",
)  # fmt: skip
"""Keys, or whole sections, that decide how a run is computed but not what it computes: a resume may change them."""


Metric = float | list[float] | None


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One line of ``metrics.jsonl``. Others read these names: keep them.

    ``loss`` is the mean over all trained tokens of this step's global batch. ``grad_norm`` is before clipping.
    ``tokens`` is the number of tokens the run has processed so far (``seq_len`` x sequences, padding included).
    Rates and times are means over the steps since the line before. ``tflops_per_gpu`` and ``mfu`` count model FLOPs
    after ``flops_convention``, recomputation not counted; ``mfu`` = ``tflops_per_gpu / peak_tflops``, and both are None
    where the device's peak is not known. ``memory_gib`` is the highest peak of any rank, ``data_wait_seconds`` the
    longest wait. A number that is not finite is written as null.
    """

    step: int
    loss: float | None
    grad_norm: float | None
    lr: float
    tokens: int
    tokens_per_second_per_gpu: float
    tflops_per_gpu: float | None
    mfu: float | None
    step_seconds: float
    data_wait_seconds: float
    memory_gib: float
    skipped_steps: int
    flops_convention: str
    peak_tflops: float | None
    extra: Mapping[str, Metric] = field(default_factory=dict)
    """More numbers (other losses; lists by expert layer); written beside the others, so their names must not clash."""

    def as_dict(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in RECORD_KEYS}
        clash = values.keys() & self.extra.keys()
        assert not clash, f"extra metrics hide fields of the record: {sorted(clash)}"
        return {name: _finite(value) for name, value in {**values, **self.extra}.items()}

    @classmethod
    def from_dict(cls, line: Mapping[str, Any]) -> StepRecord:
        """Reads a line back; keys that are not fields go to ``extra``."""
        extra = {name: value for name, value in line.items() if name not in RECORD_KEYS}
        return cls(**{name: line[name] for name in RECORD_KEYS}, extra=extra)


RECORD_KEYS = tuple(item.name for item in fields(StepRecord) if item.name != "extra")


def _finite(value: Any) -> Any:
    # JSON has no nan and no inf; Python would write them all the same, and other readers stop there
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: Path) -> list[StepRecord]:
    """The records of a ``metrics.jsonl``, or of the run folder that holds one. A half-written last line is left out.

    Raises:
        RunFolderError: there is no such file, or a line before the last is damaged.
    """
    file = path / "metrics.jsonl" if path.is_dir() else path
    return [StepRecord.from_dict(line) for line in _read_lines(file)]


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of an ``events.jsonl``, or of its run folder, in order; tolerant like ``read_metrics``."""
    return list(_read_lines(path / "events.jsonl" if path.is_dir() else path))


def _read_lines(file: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise RunFolderError(
            f"{file} cannot be read.", evidence=str(error), next_step="Give the folder of a run that has started."
        ) from error
    # the part after the last newline is empty, or a line that was being written when the process died
    for number, line in enumerate(lines[:-1], start=1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise RunFolderError(
                f"{file}, line {number} is not JSON.",
                evidence=f"{error}; it begins with {line[:60]!r}.",
                next_step="Another program wrote to it, or the disk is damaged; remove the line to read the rest.",
            ) from error


class JsonLines:
    """Appends lines to a file; each is handed to the system in one piece, so a killed process leaves whole lines."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, line: Mapping[str, Any]) -> None:
        """Raises RunFolderError where the disk is full or gone."""
        data = (json.dumps(line, allow_nan=False) + "\n").encode()
        try:
            self._end_half_line()
            with self.path.open("ab", buffering=0) as file:
                if file.write(data) != len(data):  # a full disk takes a part of a line without an error
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise unwritable(self.path, error) from error

    def keep(self, wanted: Iterable[Mapping[str, Any]]) -> None:
        """Replaces the content, atomically."""
        write_atomically(self.path, "".join(json.dumps(line, allow_nan=False) + "\n" for line in wanted))

    def _end_half_line(self) -> None:
        """Cuts a line that a crash left unfinished: appending to it would damage the next one."""
        if not self.path.exists() or self.path.stat().st_size == 0:
            return
        with self.path.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) == b"\n":
                return
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)


def write_atomically(path: Path, text: str) -> None:
    """Writes beside and renames: readers and crashes see the old content or the new, never a part.

    Raises:
        RunFolderError: the disk is full, or the place cannot be written.
    """
    beside = path.with_name(path.name + ".part")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> RunFolderError:
    return RunFolderError(
        f"{path} cannot be written.",
        evidence=f"{error.strerror or error}.",
        next_step="Free some space or check the permissions, or set another folder: --set run.dir=PATH.",
    )


class RunFolder:
    """The folder of one run. Making the object touches nothing; rank 0 calls ``claim`` before it writes.

    Used as a context manager, it gives the folder back at the end.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.recipe_path = self.path / "recipe.toml"
        self.metrics_path = self.path / "metrics.jsonl"
        self.events_path = self.path / "events.jsonl"
        self.samples_path = self.path / "samples.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.logs = self.path / "logs"
        self.tensorboard = self.path / "tensorboard"
        self._metrics = JsonLines(self.metrics_path)
        self._events = JsonLines(self.events_path)
        self._samples = JsonLines(self.samples_path)
        self._lock = FolderLock(self.path / "lock.json")
        self._is_new = False

    def claim(self, recipe: str, *, may_differ: Iterable[str] = ()) -> dict[str, tuple[Any, Any]]:
        """Makes the folder, or takes it up again, for the resolved ``recipe`` (TOML text), and writes ``recipe.toml``.

        A folder that holds the same recipe may be resumed. Differences in ``MAY_DIFFER`` and in ``may_differ`` (keys or
        sections, ``"optim.lr"`` or ``"data"``) are accepted and returned as key -> (before, now).

        Raises:
            RunFolderError: the folder cannot be written, another run is at work in it, or it holds another recipe.
        """
        self._is_new = not self.path.exists()
        self._make()
        try:
            self._lock.acquire()
        except OSError as error:
            raise unwritable(self._lock.path, error) from error
        try:
            changes = self._changes(recipe, (*MAY_DIFFER, *may_differ))
            write_atomically(self.recipe_path, recipe)
        except RunFolderError:
            self.release()
            raise
        return changes

    def release(self) -> None:
        self._lock.release()

    def remove_untouched(self) -> None:
        """Removes the folder where ``claim`` made it and no run has written into it: of a start that was refused. After
        ``release``; for a run of one process, since other ranks may still open their logs."""
        if not self._is_new:
            return
        logs = [*self.logs.glob("*")]
        own = {self.recipe_path, self.checkpoints, self.logs, self._lock.path}
        if {*self.path.glob("*")} - own or any(log.stat().st_size for log in logs) or [*self.checkpoints.glob("*")]:
            return
        with suppress(OSError):  # not empty after all, or gone: what is left harms nobody
            for file in (*logs, self.recipe_path):
                file.unlink(missing_ok=True)
            for folder in (self.logs, self.checkpoints, self.path):
                folder.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def write_record(self, record: StepRecord) -> None:
        self._metrics.append(record.as_dict())

    def write_samples(self, step: int, samples: Iterable[tuple[str, str]]) -> None:
        """Appends what the weights of ``step`` say: (prompt, text)."""
        for prompt, text in samples:
            self._samples.append({"step": step, "prompt": prompt, "text": text})

    def write_event(self, kind: EventKind, *, step: int, **facts: Any) -> None:
        """Appends what happened; ``facts`` are plain data. ``time`` is Unix seconds."""
        self._events.append({"event": kind, "step": step, "time": round(time.time(), 3), **_finite(facts)})

    def truncate_metrics(self, step: int) -> int:
        """Removes the records after ``step``, the last one that the resumed checkpoint holds, and returns how many; and
        the samples after it.

        The steps after it will be computed, and written, again. Events stay: they tell what happened.
        """
        _keep_until(self._samples, step)
        return _keep_until(self._metrics, step)

    def _make(self) -> None:
        try:
            for folder in (self.path, self.checkpoints, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunFolderError(
                f"The run folder {self.path} cannot be made.",
                evidence=f"{error.strerror or error}: {error.filename}.",
                next_step="Set a folder that can be written: --set run.dir=PATH.",
            ) from error

    def _changes(self, recipe: str, may_differ: tuple[str, ...]) -> dict[str, tuple[Any, Any]]:
        if not self.recipe_path.exists():
            if self.metrics_path.exists():
                raise RunFolderError(
                    f"{self.path} holds metrics but no recipe.toml: what they were made with is unknown.",
                    next_step="Set another folder: --set run.dir=PATH, or empty this one.",
                )
            return {}
        try:
            before = _flatten(tomllib.loads(self.recipe_path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise RunFolderError(
                f"{self.recipe_path} cannot be read.",
                evidence=f"{error}.",
                next_step="Set another folder: --set run.dir=PATH, or repair the file.",
            ) from error
        now = _flatten(tomllib.loads(recipe))
        keys = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
        changes = {key: (before.get(key), now.get(key)) for key in keys}
        refused = {key: change for key, change in changes.items() if not _covered(key, may_differ)}
        if refused:
            raise _other_recipe(self.path, refused)
        return changes


def _keep_until(lines: JsonLines, step: int) -> int:
    """Removes lines of later steps, and returns how many."""
    if not lines.path.exists():
        return 0
    found = list(_read_lines(lines.path))
    kept = [line for line in found if line["step"] <= step]
    lines.keep(kept)
    return len(found) - len(kept)


def _covered(key: str, may_differ: tuple[str, ...]) -> bool:
    return any(key == allowed or key.startswith(allowed + ".") for allowed in may_differ)


def _flatten(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _other_recipe(path: Path, refused: Mapping[str, tuple[Any, Any]]) -> RunFolderError:
    shown = [f"{key}: {_show(before)} there, {_show(now)} now" for key, (before, now) in list(refused.items())[:8]]
    more = f"; and {len(refused) - 8} more" if len(refused) > 8 else ""
    return RunFolderError(
        f"The run folder {path} holds a run of another recipe.",
        evidence="; ".join(shown) + more + ".",
        next_step="Start a new run with --set run.dir=PATH, or put these values back. A resumed run may change its "
        "learning rate, batch or data on purpose: --set checkpoint.allow_change='[\"lr\"]' (or batch, data).",
    )


def _show(value: Any) -> str:
    if value is None:
        return "not set"
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
