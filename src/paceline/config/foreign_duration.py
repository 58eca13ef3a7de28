"""How long is a run of Transformers' Trainer, and how does its learning rate go?"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from paceline.config.foreign import Draft, tables_of
from paceline.config.foreign_values import Kind, converted, is_nothing
from paceline.errors import ConfigError

_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "warmup_stable_decay": "wsd",
}


def positive(draft: Draft, name: str, default: int = 1) -> int:
    """A number of 1 or more.

    Raises:
        ConfigError: it is none.
    """
    value = int(draft.value(name, "whole", default))
    if value < 1:
        raise ConfigError(f"{name}: {value} is below 1", next_step=f"Give {name} a number of 1 or more.")
    return value


def accumulation(draft: Draft) -> int:
    """Batches of a device in a step."""
    name = "gradient_accumulation_steps"
    if name in draft.system.defaults or draft.has(name):
        return positive(draft, name)
    # ms-swift: so many that a step has 16 sequences or more
    return max(1, math.ceil(16 / (positive(draft, "per_device_train_batch_size") * draft.processes)))


def length(draft: Draft, rows: int | None = None) -> None:
    """Steps: given, or epochs times the updates of one, the last of which may be of fewer rows there.

    Source: Transformers' Trainer, ``num_update_steps_per_epoch``: with a = batch of one pass of all processes and
    b = accumulation, ceil(ceil(rows / a) / b) = ceil(rows / (a b)); with ``dataloader_drop_last`` a pass that is not
    full is left out: ceil(floor(rows / a) / b).
    """
    steps = draft.value("max_steps", "whole", -1)
    if steps > 0:
        draft.put("train.steps", steps, "max_steps")
        return
    epochs = draft.value("num_train_epochs", "number", 3.0)
    whole = draft.fields["train.global_batch_size"]
    packed = draft.fields.get("data.packing") == "pack"
    # contents are held out whole: how many rows that leaves is known when they are read
    counts = packed or "data.split" in draft.fields
    sequences = draft.count_packed(tables_of(draft.fields)) if counts else rows
    sequences = rows if sequences is None and not packed else sequences
    if sequences is None:
        # a run that would read the rows more often is refused with the number of steps that fits
        draft.put("data.epochs", epochs, "num_train_epochs")
    if rows is None:
        draft.find(
            "epochs",
            "warning",
            f"num_train_epochs: {epochs:g} is not a number of steps yet",
            "The rows of the data cannot be counted from here, and a recipe counts steps.",
            f"Set train.steps to rows x {epochs:g} / {whole} (fewer where rows are packed).",
        )
        return
    counted = rows if sequences is None else sequences
    what = "rows" if sequences is None or not packed else "packed sequences"
    names = ["num_train_epochs"]
    if draft.value("dataloader_drop_last", "truth", False):
        one_pass = max(1, whole // accumulation(draft))
        kept = counted // one_pass * one_pass
        what, counted = f"of {counted:,} {what}, in whole batches of {one_pass}", kept
        names.append("dataloader_drop_last")
    of_epoch = max(1, math.ceil(counted / whole))
    steps = max(1, math.ceil(epochs * of_epoch))
    said = f"= {epochs:g} x {of_epoch:,} ({counted:,} {what} / {whole}, rounded up)"
    draft.put("train.steps", steps, *names, said=said)
    if sequences is None:
        draft.find(
            "packed-epochs",
            "error",
            f"train.steps = {steps} counts rows as they come, but they are packed",
            "Packed, several rows make one sequence, so that fewer steps read them all; how many cannot be counted "
            "without the rows and the model's tokenizer here.",
            f"With both here, `paceline train RECIPE --dry-run` tells the steps of {epochs:g} epochs: set these.",
        )


def schedule(draft: Draft) -> None:
    """The course of the learning rate. Needs `length`."""
    name = draft.value("lr_scheduler_type", "text", "linear")
    if name not in _SCHEDULES:
        draft.find(
            "value",
            "error",
            f"lr_scheduler_type: {name} has no counterpart",
            f"There are {', '.join(_SCHEDULES)}.",
            "Choose one of these.",
        )
        return
    draft.put("optim.schedule", _SCHEDULES[name], "lr_scheduler_type")
    if name != "constant":
        _warm_up(draft)
    elif draft.value("warmup_steps", "number", 0.0) or draft.value("warmup_ratio", "number", 0.0):
        draft.put("optim.warmup_steps", 0, said="lr_scheduler_type: constant has no warm-up there")
        draft.find(
            "warmup",
            "warning",
            "lr_scheduler_type: constant passes over the warm-up that is asked for",
            "Transformers' constant rate begins at its full height, and so does this recipe: optim.warmup_steps = 0.",
            "Set lr_scheduler_type: constant_with_warmup if it should rise.",
        )
    options = _schedule_options(draft)
    lr = draft.fields.get("optim.lr")
    if "min_lr" in options:
        draft.put("optim.min_lr", options["min_lr"], "lr_scheduler_kwargs")
    elif "min_lr_rate" in options and lr is not None:
        draft.put("optim.min_lr", options["min_lr_rate"] * lr, "lr_scheduler_kwargs")
    if "num_decay_steps" in options:
        draft.put("optim.decay_steps", options["num_decay_steps"], "lr_scheduler_kwargs")


def _schedule_options(draft: Draft) -> dict[str, Any]:
    """`lr_scheduler_kwargs`: a table, or JSON text of one, as a command line has it.

    Raises:
        ConfigError: it is neither, or a value is no number.
    """
    name = "lr_scheduler_kwargs"
    found = draft.given.get(name)
    if is_nothing(found):
        return {}
    try:
        options = found if isinstance(found, Mapping) else json.loads(str(found))
    except ValueError as error:
        raise ConfigError(
            f"{name}: {found} is no JSON", evidence=str(error), next_step=f"""Write {name}: '{{"min_lr": 1e-6}}'."""
        ) from error
    if not isinstance(options, Mapping):
        raise ConfigError(f"{name}: {found} is no table", next_step=f"""Write {name}: '{{"min_lr": 1e-6}}'.""")
    kinds: dict[str, Kind] = {"min_lr": "number", "min_lr_rate": "number", "num_decay_steps": "whole"}
    return {key: converted(f"{name}: {key}", options[key], kind) for key, kind in kinds.items() if key in options}


def duration(draft: Draft) -> None:
    """That a run has a length, where it is given in epochs, and a warm-up no more than it.

    Raises:
        ConfigError: it has none.
    """
    if draft.value("max_steps", "whole", -1) <= 0 and (epochs := draft.value("num_train_epochs", "number", 3.0)) <= 0:
        raise ConfigError(
            f"num_train_epochs: {epochs:g} is not above 0", next_step="Give it a number above 0, or give max_steps."
        )
    ratio = draft.value("warmup_ratio", "number", 0.0)
    if not 0 <= ratio <= 1:
        raise ConfigError(
            f"warmup_ratio: {ratio:g} is no share of the steps",
            next_step="Give a number from 0 to 1, or a number of steps as warmup_steps.",
        )


def _warm_up(draft: Draft) -> None:
    steps = draft.value("warmup_steps", "number", 0.0)
    ratio = draft.value("warmup_ratio", "number", 0.0)
    if 0 < steps < 1:  # Transformers 5: a number below 1 is a share
        steps, ratio = 0.0, steps
    if steps and ratio:
        draft.find(
            "both",
            "error",
            f"warmup_steps: {steps:g} and warmup_ratio: {ratio:g} are both given",
            "Transformers takes warmup_steps and passes over the ratio.",
            "Leave one out.",
        )
    if steps:
        draft.put("optim.warmup_steps", int(steps), "warmup_steps")
    elif ratio:
        total = draft.fields.get("train.steps")
        if total is None:
            draft.find(
                "warmup",
                "warning",
                f"warmup_ratio: {ratio:g} is not a number of steps yet",
                "The number of steps is not known.",
                f"Set optim.warmup_steps to {ratio:g} x train.steps.",
            )
        else:
            name = "warmup_ratio" if draft.has("warmup_ratio") else "warmup_steps"
            draft.put("optim.warmup_steps", math.ceil(ratio * total), name, said=f"of {total} steps")
