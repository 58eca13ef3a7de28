"""Where do weights come from, and where can they go, other than a run's own resume?

The seam between a model and files of any format: a source gives named tensors by slice, so that each rank reads only
its part; an export is handed each rank's pieces. ``training`` sees these two and no format.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from paceline.checkpoint.chunks import ChunkReader
from paceline.checkpoint.locate import find_checkpoint
from paceline.checkpoint.pieces import Box, ShardedValue
from paceline.checkpoint.ranks import Ranks
from paceline.checkpoint.store import Checkpoint, load_into
from paceline.config.lora import LoraConfig
from paceline.config.model import ModelConfig
from paceline.errors import CheckpointError
from paceline.report.finding import Finding

log = logging.getLogger(__name__)

MODEL = "model/"
"""Prefix of weights and buffers in a checkpoint."""


class WeightSource(Protocol):
    """Named tensors, by the names of the plain model."""

    def shapes(self) -> Mapping[str, torch.Size]:
        """Name -> global shape of everything there is."""

    def dtype(self, name: str) -> torch.dtype:
        """In which it is stored."""

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A part of a tensor (None: all of it) in host memory, in the dtype of the source."""


COMPANIONS = "hub"
"""Folder, in a checkpoint or run folder, of the files that go along with weights of other programs: tokenizer, chat
template, generation settings, the config that a model came with."""


@dataclass(frozen=True, kw_only=True)
class ForeignWeights:
    """Weights of another program, under our names."""

    weights: WeightSource
    files: Mapping[str, Path] = field(default_factory=dict)
    """Name -> path of what goes along with them."""


@dataclass(frozen=True, kw_only=True)
class ExportJob:
    """What a run hands over to be written in another format. Collective: every rank gives its own pieces."""

    folder: Path
    """Where to; it is not there yet, and appears when it is complete."""
    model: ModelConfig
    values: Mapping[str, ShardedValue]
    """This rank's part of the main weights and buffers, as `Engine.weights` gives them."""
    dtype: torch.dtype
    files: Mapping[str, Path]
    """Name -> path of what goes along with the weights; rank 0 reads them."""
    ranks: Ranks
    lora: LoraConfig = field(default_factory=LoraConfig)
    base: str = ""
    """With adapters: `model.init_from`, the weights that they belong to."""


def companions(*folders: Path) -> dict[str, Path]:
    """The files in the folders `COMPANIONS` of runs and checkpoints; the first that has a name wins."""
    found: dict[str, Path] = {}
    for folder in folders:
        inside = folder / COMPANIONS
        for path in sorted(inside.rglob("*")):
            if path.is_file():
                found.setdefault(path.relative_to(inside).as_posix(), path)
    return found


class CheckpointSource:
    """Reads the weights of one checkpoint, or of a run's newest whole one.

    Needs no process group. Given ``ranks``, making it is collective: they share the checking of files. Checkpoints of a
    run that are damaged are passed over, which the log says.

    Raises:
        CheckpointError: nothing whole is at ``path``.
    """

    def __init__(self, path: Path | Checkpoint, *, ranks: Ranks | None = None) -> None:
        self.checkpoint = path if isinstance(path, Checkpoint) else _found(path, ranks)
        self._reader = ChunkReader(self.checkpoint.folder, self.checkpoint.metadata())

    def shapes(self) -> dict[str, torch.Size]:
        saved = self._reader.shapes()
        return {name.removeprefix(MODEL): shape for name, shape in saved.items() if name.startswith(MODEL)}

    def dtype(self, name: str) -> torch.dtype:
        return self._reader.dtype(MODEL + name)

    def read(self, name: str, box: Box | None = None) -> Tensor:
        shape = self._reader.tensors[MODEL + name].size
        return self._reader.read(MODEL + name, box or Box(offsets=(0,) * len(shape), sizes=tuple(shape)))

    def fill(self, into: Mapping[str, ShardedValue], *, ignore: Sequence[str] = ()) -> None:
        """As the function ``fill``, in one pass over the files; here every weight of the checkpoint must be wanted,
        except names that begin with one of ``ignore``."""
        others = [name for name in self._reader.tensors if not name.startswith(MODEL)]
        others += [MODEL + prefix for prefix in ignore]
        load_into(self.checkpoint, {MODEL + name: value for name, value in into.items()}, ignore=others)


def _found(path: Path, ranks: Ranks | None) -> Checkpoint:
    passed: list[Finding] = []
    checkpoint = find_checkpoint(path, ranks=ranks, report=passed.append)
    for finding in passed:
        log.warning("%s %s", finding.subject, finding.evidence)
    if passed:
        log.warning("Taken in its place: %s, step %d.", checkpoint.folder, checkpoint.step)
    return checkpoint


def fill(source: WeightSource, into: Mapping[str, ShardedValue]) -> None:
    """Writes the weights of ``source`` into the pieces of ``into``, each rank its own part, converted to its dtype.

    Raises:
        CheckpointError: a name is missing there, or shapes differ; all are listed and nothing has been written. Names
            that ``source`` has and no rank wants are the caller's to judge: one pipeline stage wants only some.
    """
    shapes = source.shapes()
    problems = []
    for name, value in into.items():
        if name not in shapes:
            problems.append(f"missing: {name} {list(value.global_shape)}")
        elif shapes[name] != value.global_shape:
            problems.append(f"shape: {name} is {list(shapes[name])} there and {list(value.global_shape)} here")
    if problems:
        raise CheckpointError(
            f"The weights do not fit this model: {len(problems)} differences.",
            evidence="\n  ".join(problems),
            next_step="Make the [model] section describe the weights, or choose other weights.",
        )
    for name, value in into.items():
        for piece in value.pieces:
            box = Box(offsets=piece.offsets, sizes=tuple(piece.tensor.shape))
            piece.tensor.copy_(source.read(name, box))
