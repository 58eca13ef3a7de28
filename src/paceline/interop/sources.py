"""What is in this folder, and how are its weights read under our names?"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from paceline.checkpoint import manifest as manifests
from paceline.checkpoint.adapters import BaseReference, whole_model
from paceline.checkpoint.locate import find_checkpoint, step_folders
from paceline.checkpoint.pieces import Box
from paceline.checkpoint.store import Checkpoint
from paceline.checkpoint.weights import CheckpointSource, WeightSource
from paceline.config.hub import is_hub_folder, model_of, read_config
from paceline.config.load import validate
from paceline.config.model import ModelConfig
from paceline.config.run import RunConfig
from paceline.errors import CheckpointError, ConfigError
from paceline.interop.hf import open_hub
from paceline.interop.hf_links import model_shapes
from paceline.interop.links import whole
from paceline.interop.megatron import MegatronFolder
from paceline.interop.megatron_files import is_megatron
from paceline.interop.sidecars import read_sidecars, read_template, sidecars_in
from paceline.interop.text_files import files_of_run, text_files_of
from paceline.interop.turn_end import with_turn_end
from paceline.report.finding import Finding

Format = Literal["hf", "paceline", "megatron"]
FORMATS: tuple[Format, ...] = ("hf", "paceline", "megatron")


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A model in some format, ready to be read under our names."""

    format: Format
    path: Path
    model: ModelConfig
    weights: WeightSource
    sidecars: Mapping[str, Path] = field(default_factory=dict)
    made: Mapping[str, bytes] = field(default_factory=dict)
    """Name -> content of sidecars that lie nowhere yet."""
    template: dict[str, Any] | None = None
    """The `config.json` that the model came with, if it came with one."""
    recipe: RunConfig | None = None
    """Of a run."""
    step: int = 0
    notes: tuple[str, ...] = ()
    """What a person should know of it."""
    changed: bool = False
    """Whether ``weights`` are others than those that lie in ``path``."""

    def beside(self) -> dict[str, bytes]:
        """Name -> content of all that goes along with the weights."""
        return with_turn_end({**self.made, **read_sidecars(self.sidecars)}, self.sidecars)


def detect(path: Path) -> Format:
    """Which format a folder has.

    Raises:
        CheckpointError: it is none that can be read; the reason is told where the kind is known.
    """
    if not path.is_dir():
        raise CheckpointError(f"there is no folder {path}", next_step="Look at the path.")
    if (path / manifests.NAME).is_file() or step_folders(path / "checkpoints") or step_folders(path):
        return "paceline"
    if is_megatron(path):
        return "megatron"
    if is_hub_folder(path):
        return "hf"
    raise CheckpointError(f"{path} holds no model that can be read", evidence=_seen(path), next_step=_KINDS)


_KINDS = (
    "A Hugging Face folder has config.json and .safetensors, a Megatron-LM torch_dist checkpoint metadata.json and "
    "common.pt, a Paceline run checkpoints/."
)


def _seen(path: Path) -> str:
    if (path / "adapter_config.json").is_file():
        return "It is a PEFT adapter: only what was trained beside a model. Whole models are converted."
    if list(path.glob("**/mp_rank_*"))[:1]:
        return "It is a checkpoint in Megatron-LM's old format (one file a rank); only torch_dist is read."
    if (path / "config.json").is_file():
        return "Its config.json names no model_type."
    if list(path.glob("*.safetensors"))[:1]:
        return "It has safetensors files, but no config.json that says what they are."
    names = sorted(entry.name for entry in path.iterdir())
    return f"It has {', '.join(names[:6])}{' ...' if len(names) > 6 else '.'}" if names else "It is empty."


def open_source(path: Path, *, ignore_keys: Iterable[str] = (), like: Path | None = None) -> Opened:
    """Opens a folder of any format that is known.

    Args:
        like: of a Megatron-LM checkpoint: a Hugging Face folder or a run that says what the model is, and gives what
            goes along with it. Otherwise its own arguments do.

    Raises:
        CheckpointError, ConfigError: it cannot be read, is damaged, or is a model that ours cannot be.
    """
    kind = detect(path)
    if like is not None and kind != "megatron":
        raise ConfigError(
            f"--like {like} with a source that says itself what model it is",
            next_step="Leave it out: it is for Megatron-LM checkpoints.",
        )
    if kind == "hf":
        return _open_hf(path, ignore_keys)
    if kind == "megatron":
        return _open_megatron(path, like, ignore_keys)
    return open_paceline(path)


def _open_hf(path: Path, ignore_keys: Iterable[str]) -> Opened:
    hub = open_hub(path, ignore_keys=ignore_keys)
    return Opened(
        format="hf",
        path=path,
        model=hub.model,
        weights=hub.weights,
        sidecars=sidecars_in(path),
        template=hub.config,
        notes=hub.notes,
    )


def _open_megatron(path: Path, like: Path | None, ignore_keys: Iterable[str]) -> Opened:
    made: dict[str, bytes] = {}
    if like is None:
        model, sidecars = None, {}
    elif is_hub_folder(like):
        model, sidecars = model_of(read_config(like), ignore_keys), sidecars_in(like)
    else:
        other = open_paceline(like)
        model, sidecars, made = other.model, dict(other.sidecars), dict(other.made)
    folder = MegatronFolder(path, model)
    return Opened(
        format="megatron",
        path=folder.path,
        model=folder.model,
        weights=folder.weights,
        sidecars=sidecars,
        made=made,
        template=read_template(sidecars),
        step=folder.step,
        notes=folder.notes,
    )


def newest_told(path: Path) -> tuple[Checkpoint, tuple[str, ...]]:
    """As `find_checkpoint`, with a line on each damaged one that was passed over, and then on the one that is taken."""
    passed: list[Finding] = []
    checkpoint = find_checkpoint(path, report=passed.append)
    notes = tuple(f"{finding.subject} {finding.evidence}" for finding in passed)
    return checkpoint, (*notes, f"Taken in its place: {checkpoint.folder}, step {checkpoint.step}.") if notes else ()


def open_paceline(path: Path) -> Opened:
    """The newest whole checkpoint of a run, or one checkpoint."""
    checkpoint, notes = newest_told(path)
    folder = checkpoint.folder
    try:
        recipe = validate(tomllib.loads(checkpoint.recipe()))
    except (OSError, tomllib.TOMLDecodeError, ConfigError) as error:
        raise CheckpointError(
            f"The recipe in {folder} cannot be read.",
            evidence=str(error),
            next_step="Use the version of paceline that wrote it (`versions` in its state.json).",
        ) from error
    weights: WeightSource = CheckpointSource(checkpoint)
    if recipe.lora.on:
        reference = BaseReference.from_extra(checkpoint.state().extra)
        weights = whole_model(weights, recipe.lora, reference, _open_base, str(folder))
        assert reference is not None
        notes = (*notes, f"The adapters of {folder} are merged into {reference.source}.")
    _account(folder, recipe.model, weights)
    sidecars = files_of_run(checkpoint, recipe)
    own = text_files_of(checkpoint, recipe, sidecars)
    sidecars |= own.files
    return Opened(
        format="paceline",
        path=folder,
        model=recipe.model,
        weights=weights,
        sidecars=sidecars,
        made=own.made,
        template=read_template(sidecars),
        recipe=recipe,
        step=checkpoint.step,
        notes=notes,
        changed=recipe.lora.on,
    )


def _open_base(source: str) -> WeightSource:
    return open_source(Path(source)).weights


def is_adapted(path: Path) -> bool:
    """Whether it is a run or checkpoint of ours that holds adapters."""
    if not path.is_dir() or detect_or_none(path) != "paceline":
        return False
    return BaseReference.from_extra(find_checkpoint(path).state().extra) is not None


def detect_or_none(path: Path) -> Format | None:
    """As `detect`; None where it raises."""
    try:
        return detect(path)
    except CheckpointError:
        return None


def _account(folder: Path, model: ModelConfig, weights: WeightSource) -> None:
    wanted, found = model_shapes(model), weights.shapes()
    problems = [f"missing: {name}" for name in wanted.keys() - found.keys()]
    problems += [f"unexpected: {name}" for name in found.keys() - wanted.keys()]
    problems += [
        f"shape: {name} is {list(found[name])} there, {list(shape)} by its recipe"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    if problems:
        raise CheckpointError(
            f"The weights in {folder} are not those of its recipe: {len(problems)} differences.",
            evidence="\n  ".join(sorted(problems)[:20]),
            next_step="Use another checkpoint of the run.",
        )


class Selected:
    """Some of the tensors of a source."""

    def __init__(self, inner: WeightSource, names: Iterable[str]) -> None:
        self._inner = inner
        self._names = tuple(names)

    def shapes(self) -> dict[str, torch.Size]:
        shapes = self._inner.shapes()
        return {name: shapes[name] for name in self._names}

    def dtype(self, name: str) -> torch.dtype:
        return self._inner.dtype(name)

    def read(self, name: str, box: Box | None = None) -> Tensor:
        return self._inner.read(name, box)


# ---- a model with fewer words


class _Cut:
    """A source without the last rows of its vocabulary."""

    def __init__(self, inner: WeightSource, names: Iterable[str], rows: int) -> None:
        self._inner = inner
        self._names = frozenset(names)
        self._rows = rows

    def shapes(self) -> dict[str, torch.Size]:
        return {
            name: torch.Size((self._rows, *shape[1:])) if name in self._names else shape
            for name, shape in self._inner.shapes().items()
        }

    def dtype(self, name: str) -> torch.dtype:
        return self._inner.dtype(name)

    def read(self, name: str, box: Box | None = None) -> Tensor:
        return self._inner.read(name, box or whole(self.shapes()[name]))


def cut_vocabulary(opened: Opened, rows: int) -> Opened:
    """The same model with the first ``rows`` of its vocabulary: without what pads it.

    Raises:
        ConfigError: it has fewer.
    """
    have = opened.model.vocab_size
    if not 2 <= rows <= have:
        raise ConfigError(
            f"--vocab-size {rows} is not between 2 and the model's vocabulary of {have}",
            next_step="Rows can be left out, not added.",
        )
    if rows == have:
        return opened
    model = opened.model.model_copy(update={"vocab_size": rows})
    weights = _Cut(opened.weights, ("embed.weight", "head.weight"), rows)
    note = f"{have - rows} rows of the vocabulary are left out: {have} become {rows}."
    return replace(opened, model=model, weights=weights, notes=(*opened.notes, note))
