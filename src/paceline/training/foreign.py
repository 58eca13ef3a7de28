"""Weights that a run begins with, and weights that it writes for other programs; formats are registered from above."""

from __future__ import annotations

import logging
import shutil
from contextlib import suppress
from pathlib import Path

from paceline.checkpoint.ranks import Ranks
from paceline.checkpoint.weights import (
    COMPANIONS,
    CheckpointSource,
    ExportJob,
    ForeignWeights,
    WeightSource,
    companions,
)
from paceline.config.lora import is_adapter
from paceline.config.plugins import Registry
from paceline.config.run import RunConfig
from paceline.data.kept_tokenizer import with_used
from paceline.errors import CheckpointError
from paceline.models.precision import compute_dtype
from paceline.training.exports import clean_exports, export_folder, is_current, make_room, put_in_place
from paceline.training.setup import Parts
from paceline.training.start_weights import fill_from

log = logging.getLogger(__name__)


def load_initial(parts: Parts, registry: Registry, run_folder: Path, ranks: Ranks) -> WeightSource:
    """Fills the weights from `model.init_from`, each rank its part, and keeps what goes along with them. Collective.

    Adapters stay as they are.

    Returns:
        what it has read from.

    Raises:
        CheckpointError: nothing that can be read is there, or the weights are not those of this model.
    """
    path = Path(parts.config.model.init_from)
    into = {name: value for name, value in parts.engine.weights().items() if not is_adapter(name)}
    foreign = _foreign(path, registry, parts.config)
    source: WeightSource
    if foreign is None:
        checkpoint = CheckpointSource(path, ranks=ranks)
        fill_from(checkpoint, into)
        folder = checkpoint.checkpoint.folder
        source, files = checkpoint, companions(folder, folder.parent.parent)
    else:
        source = foreign.weights
        # a rank that fails alone would leave the others waiting
        ranks.gather(f"reading {path}", lambda: fill_from(foreign.weights, into))
        files = dict(foreign.files)
    parts.engine.publish_weights()
    ranks.from_first("keeping the files of the first weights", lambda: _keep(files, run_folder / COMPANIONS))
    return source


def open_weights(path: Path, registry: Registry, config: RunConfig) -> WeightSource:
    """What `model.init_from` names, to be read by one process.

    Raises:
        CheckpointError: nothing that can be read is there.
    """
    foreign = _foreign(path, registry, config)
    return CheckpointSource(path) if foreign is None else foreign.weights


def _foreign(path: Path, registry: Registry, config: RunConfig) -> ForeignWeights | None:
    for factory in registry.weight_sources:
        found: ForeignWeights | None = factory(path, config.model)
        if found is not None:
            return found
    return None


def _keep(files: dict[str, Path], folder: Path) -> None:
    for name, path in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if not (folder / name).exists():
            shutil.copyfile(path, folder / f"{name}.part")
            (folder / f"{name}.part").rename(folder / name)


class Exporter:
    """Writes the weights in another format, as `exports/step_N` of the run folder, when `checkpoint.export` says so."""

    def __init__(self, parts: Parts, registry: Registry, run_folder: Path, ranks: Ranks) -> None:
        self._parts = parts
        self._write = registry.exports.get(parts.config.checkpoint.export)
        self._run_folder = run_folder
        self._ranks = ranks

    def due(self, step: int, *, last: bool = False) -> bool:
        """Whether to export after ``step``; ``last`` is the end of the run."""
        interval = self._parts.config.checkpoint.export_interval
        return self._write is not None and (last or (interval > 0 and step % interval == 0))

    def export(self, step: int) -> None:
        """Collective. One that is there already is kept, unless the run has gone back since and come here again.

        Raises:
            CheckpointError: it could not be written; nothing of it is left, and what was there before still is.
        """
        assert self._write is not None
        folder, first = export_folder(self._run_folder, step), self._ranks.from_first
        if first("looking for an export", lambda: is_current(folder)):
            return
        try:
            target = first("making room for an export", lambda: make_room(folder))
            self._write(self._job(target))
            first(f"completing {folder}", lambda: put_in_place(target, folder))
        except BaseException as error:
            if self._ranks.is_first:
                with suppress(OSError):
                    clean_exports(folder.parent)
            if isinstance(error, CheckpointError):
                raise self._failure(folder, error) from error
            raise
        log.info("exported %s", folder)

    def _job(self, folder: Path) -> ExportJob:
        config = self._parts.config
        return ExportJob(
            folder=folder,
            model=config.model,
            values=self._parts.engine.weights(),
            dtype=compute_dtype(config.train.precision),
            files=self._ranks.from_first("looking for files", lambda: self._files()),
            ranks=self._ranks,
            lora=config.lora,
            base=config.model.init_from,
        )

    def _failure(self, folder: Path, error: CheckpointError) -> CheckpointError:
        by_hand = f" Or make it of a checkpoint: `paceline convert {self._run_folder} NEW-FOLDER`."
        return CheckpointError(
            f"the export {folder} could not be written",
            evidence="\n  ".join(filter(None, (error.subject, error.evidence))),
            next_step=f"{error.next_step} Where no step is left, the same command writes the export alone."
            + by_hand * (self._parts.config.checkpoint.export == "hf"),
        )

    def _files(self) -> dict[str, Path]:
        return with_used(companions(self._run_folder), self._run_folder)
