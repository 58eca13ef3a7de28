"""Weights that a run begins with, and weights that it writes for other programs; formats are registered from above."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from paceline.checkpoint.locate import folder_name
from paceline.checkpoint.ranks import Ranks
from paceline.checkpoint.weights import COMPANIONS, CheckpointSource, ExportJob, ForeignWeights, companions, fill
from paceline.config.plugins import Registry
from paceline.config.run import RunConfig
from paceline.models.precision import compute_dtype
from paceline.training.setup import Parts

log = logging.getLogger(__name__)

EXPORTS = "exports"
"""In the run folder."""


def load_initial(parts: Parts, registry: Registry, run_folder: Path, ranks: Ranks) -> None:
    """Fills the weights from `model.init_from`, each rank its part, and keeps what goes along with them. Collective.

    Raises:
        CheckpointError: nothing that can be read is there, or the weights are not those of this model.
    """
    path, into = Path(parts.config.model.init_from), parts.engine.weights()
    foreign = _foreign(path, registry, parts.config)
    if foreign is None:
        source = CheckpointSource(path, ranks=ranks)
        source.fill(into)
        folder = source.checkpoint.folder
        files = companions(folder, folder.parent.parent)
    else:
        # a rank that fails alone would leave the others waiting
        ranks.gather(f"reading {path}", lambda: fill(foreign.weights, into))
        files = dict(foreign.files)
    parts.engine.publish_weights()
    ranks.from_first("keeping the files of the first weights", lambda: _keep(files, run_folder / COMPANIONS))


def _foreign(path: Path, registry: Registry, config: RunConfig) -> ForeignWeights | None:
    for factory in registry.weight_sources:
        found: ForeignWeights | None = factory(path, config.model)
        if found is not None:
            return found
    return None


def _keep(files: dict[str, Path], folder: Path) -> None:
    for name, path in files.items():
        folder.mkdir(parents=True, exist_ok=True)
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
        """Collective. One that is there already, from before a restart, is kept.

        Raises:
            CheckpointError: it could not be written; nothing of it is left.
        """
        assert self._write is not None
        folder = self._run_folder / EXPORTS / folder_name(step)
        if self._ranks.from_first("looking for an export", folder.exists):
            return
        config = self._parts.config
        self._write(
            ExportJob(
                folder=folder,
                model=config.model,
                values=self._parts.engine.weights(),
                dtype=compute_dtype(config.train.precision),
                files=self._ranks.from_first("looking for files", lambda: self._files()),
                ranks=self._ranks,
            )
        )
        log.info("exported %s", folder)

    def _files(self) -> dict[str, Path]:
        found = companions(self._run_folder)
        kept = self._run_folder / "tokenizer"
        for path in sorted(kept.iterdir()) if kept.is_dir() else ():
            # what the data were made with; a hub's tokenizer goes by one of these two names
            found.setdefault("tokenizer.json" if path.suffix == ".json" else "tokenizer.model", path)
        return found
