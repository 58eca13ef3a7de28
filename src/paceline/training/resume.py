"""Does this start begin a run or go on with one, and may the recipe have changed in between?

Anything that only decides how a run is computed (ranks, layout, logging, checkpoints) may change freely. What changes
the mathematics is an explicit choice in `checkpoint.allow_change`; the shape of the model cannot change at all.
"""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.locate import problems_of, step_folders
from paceline.checkpoint.state import TrainState
from paceline.checkpoint.store import Checkpoint, open_checkpoint
from paceline.config.load import differences, validate
from paceline.config.run import RunConfig
from paceline.config.train import TrainConfig
from paceline.data.build import Datasets
from paceline.errors import ConfigError, PacelineError, RunFolderError, TrainingError
from paceline.observe.events import MAY_DIFFER, RunFolder
from paceline.training.exports import lacks_last_export
from paceline.training.summary import lacks_summary
from paceline.training.trainer import Progress

log = logging.getLogger(__name__)

CHOICES: Mapping[str, tuple[str, ...]] = {
    "lr": ("optim", "train.steps"),
    "batch": ("train.global_batch_size",),
    "data": ("data", "train.seq_len"),
}
"""Keys or sections that each entry of `checkpoint.allow_change` covers."""

RETUNABLE = ("optim.name",)
"""Of the section optim, what cannot change: the optimizer's state would have no meaning."""

_PRECISION = (
    "train.precision",
    *(f"train.{name}" for name in TrainConfig.model_fields if name.startswith("fp8_")),
)
"""Checkpoints hold fp32 masters whatever products are computed in. Histories of fp8 scales begin empty where a
checkpoint has none, or of another length: the log says so."""

FREE = (*MAY_DIFFER, "model.preset", "model.init_from", *_PRECISION, "optim.fused_update")
"""What a resumed run may change without a word."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where this start begins."""

    checkpoint: Checkpoint | None
    progress: Progress

    @property
    def is_resume(self) -> bool:
        return self.checkpoint is not None


def claim_folder(folder: RunFolder, config: RunConfig, recipe: str) -> dict[str, tuple[Any, Any]]:
    """Takes the run folder for this recipe; for rank 0. Returns the keys that changed since the last start.

    Raises:
        RunFolderError: it cannot be written, is in use, or holds another recipe and the change was not asked for.
    """
    changed = _allowed_changes(folder, config)
    folder.claim(recipe, may_differ=tuple(changed))
    told = [f"{key} = {now!r} (was {before!r})" for key, (before, now) in changed.items() if key in _PRECISION]
    if told:
        log.info("products are computed otherwise from here on: %s", ", ".join(told))
    return changed


def refuse_start(config: RunConfig) -> None:
    """What would be refused of the run folder, before any process starts; only looks.

    Raises:
        RunFolderError: it holds another recipe and the change was not asked for.
        TrainingError: all steps of the recipe are done.
    """
    folder = RunFolder(config.run.folder)
    _allowed_changes(folder, config)
    for step, newest in step_folders(folder.checkpoints)[-1:]:
        # one that is damaged, or a run that has steps left, is the run's own business
        if step >= config.train.steps and not problems_of(newest):
            find_start(open_checkpoint(newest), config)


def _allowed_changes(folder: RunFolder, config: RunConfig) -> dict[str, tuple[Any, Any]]:
    changed = _changes(folder.recipe_path, config)
    refused = sorted(key for key in changed if not _is_allowed(key, config))
    checkpoints = step_folders(folder.checkpoints)
    # a start that failed before its first step (a mistyped path) leaves only its recipe: that may be mended
    if refused and (checkpoints or _has_records(folder)):
        raise _other_recipe(folder.path, config, changed, refused)
    if checkpoints and config.checkpoint.resume == "never":
        raise RunFolderError(
            f"{folder.path} holds checkpoints up to step {checkpoints[-1][0]}, and checkpoint.resume = 'never'",
            evidence="A new run here would write over them.",
            next_step="Set another folder (--set run.dir=PATH), or checkpoint.resume = 'auto' to go on with this one.",
        )
    return changed


def _has_records(folder: RunFolder) -> bool:
    return folder.metrics_path.is_file() and folder.metrics_path.stat().st_size > 0


def _changes(recipe_path: Path, config: RunConfig) -> dict[str, tuple[Any, Any]]:
    if not recipe_path.is_file():
        return {}
    try:
        before = validate(tomllib.loads(recipe_path.read_text(encoding="utf-8")))
    except (OSError, tomllib.TOMLDecodeError, PacelineError) as error:
        raise RunFolderError(
            f"{recipe_path} cannot be read as a recipe, so it is not known what the run in this folder is",
            evidence=str(error),
            next_step="Set another folder: --set run.dir=PATH, or mend that file.",
        ) from error
    changed = differences(before, config)
    # with a constant rate the length of the run changes nothing that was computed before
    if config.optim.schedule == "constant" and before.optim.schedule == "constant":
        changed.pop("train.steps", None)
    return changed


def _covers(entries: Iterable[str], key: str) -> bool:
    return any(key == entry or key.startswith(f"{entry}.") for entry in entries)


def _is_allowed(key: str, config: RunConfig) -> bool:
    if key in RETUNABLE:
        return False
    asked = [entry for choice in config.checkpoint.allow_change for entry in CHOICES.get(choice, ())]
    if _covers(asked, key):
        return True
    # the length of the run is in MAY_DIFFER for the folder's own sake, but it bends the learning-rate schedule
    return key != "train.steps" and _covers(FREE, key)


def _new_run(config: RunConfig) -> str:
    """The option that begins a run of its own: the name makes the folder, unless one is given."""
    return "--set run.dir=PATH" if config.run.dir else "--set run.name=NAME"


def _other_recipe(
    path: Path, config: RunConfig, changed: Mapping[str, tuple[Any, Any]], refused: list[str]
) -> RunFolderError:
    lines = [f"{key}: {changed[key][0]!r} there, {changed[key][1]!r} now" for key in refused[:8]]
    needed = sorted({choice for choice, entries in CHOICES.items() for key in refused if _covers(entries, key)})
    fixed = [key for key in refused if key in RETUNABLE or not any(_covers(e, key) for e in CHOICES.values())]
    if fixed:
        step = f"Start a new run: {_new_run(config)} ({', '.join(fixed[:3])} cannot change within a run)."
    else:
        choices = ", ".join(f'"{choice}"' for choice in needed)
        step = (
            f"To change it on purpose: --set 'checkpoint.allow_change=[{choices}]'. Else a new run: {_new_run(config)}."
        )
    return RunFolderError(
        f"{path} holds a run of another recipe: {len(refused)} key{'s differ' if len(refused) > 1 else ' differs'}",
        evidence="\n  ".join(lines),
        next_step=step,
    )


def find_start(checkpoint: Checkpoint | None, config: RunConfig) -> Start:
    """Where to begin, given the newest whole checkpoint; at the last step where only the run's end is left to do: its
    export, or its last evaluation and summary.

    Raises:
        TrainingError: all steps of the recipe are done, and so is its end.
    """
    if checkpoint is None:
        return Start(checkpoint=None, progress=Progress())
    state = checkpoint.state()
    cut_off = lacks_last_export(config) or lacks_summary(Path(config.run.folder), state.step)
    only_end = state.step == config.train.steps and cut_off
    if state.step >= config.train.steps and not only_end:
        raise TrainingError(
            f"nothing left to train: the run stands at step {state.step} of {config.train.steps}",
            evidence=f"{checkpoint.folder} is its newest checkpoint.",
            next_step=f"Train on with more steps: --set train.steps={state.step + config.train.steps} "
            "--set 'checkpoint.allow_change=[\"lr\"]' (the schedule then ends later). A new run, with another "
            f"layout or not: {_new_run(config)}. Its weights for other programs: "
            f"`paceline convert {config.run.folder} NEW-FOLDER`.",
        )
    progress = Progress(
        step=state.step,
        consumed_samples=state.consumed_samples,
        tokens=state.tokens,
        skipped_steps=state.skipped_steps,
    )
    return Start(checkpoint=checkpoint, progress=progress)


def check_sample_order(state: TrainState, datasets: Datasets, config: RunConfig) -> bool:
    """Whether the data is the same as before; a change on purpose makes the run read the new data from its start.

    Raises:
        ConfigError: the samples, or their order, differ from those that the run has read so far.
    """
    before = state.sample_order.get("train")
    if before == datasets.train.identity:
        return True
    if "data" in config.checkpoint.allow_change:
        return False
    raise ConfigError(
        "the order of samples would not be the one that this run has read so far",
        evidence="The dataset's files, data.order, the seed, or (with data.order = 'megatron') the number of epochs "
        "that train.steps needs have changed.",
        next_step="Put it back, or read the new data from its start: --set 'checkpoint.allow_change=[\"data\"]'. "
        "With data.order = 'epoch' from the beginning the order never depends on train.steps.",
    )
