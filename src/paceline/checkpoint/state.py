"""What does a run need besides its tensors to go on as if nothing had happened?

A short, explicit list. The mesh is not part of it: a checkpoint is loaded by any number of ranks and either engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.runtime.seed import seed_all, set_rng_state

FORMAT = 1
"""Version of ``state.json``. A reader takes this one and older ones."""


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Where a run stands after ``step`` steps. Plain data: it is stored as JSON, to be read by eye and by others."""

    step: int
    """Steps done, counted from 1; skipped ones (non-finite gradient) are counted here too."""
    tokens: int = 0
    """Tokens with a loss, summed over all ranks."""
    consumed_samples: int = 0
    """Position in the order of samples: the next batch begins at this sample."""
    skipped_steps: int = 0
    consecutive_skips: int = 0
    """Steps skipped in a row up to now; a limit on it stops the run."""
    schedule: Mapping[str, Any] = field(default_factory=dict)
    """What the learning rate follows (kind, peak, warm-up, total steps), to notice a change at resume."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Which data this is: prefixes, weights, tokenizer hash, sizes."""
    sample_order: Mapping[str, Any] = field(default_factory=dict)
    """What the order of samples depends on: seed, sequence length, split, global batch size."""
    world_size: int = 1
    """Ranks that wrote it: says how many random states there are."""
    versions: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What a task or plugin wants back: JSON values under its own name."""

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str, *, source: str) -> TrainState:
        """Reads what ``to_json`` wrote; ``source`` names the file in errors.

        Raises:
            CheckpointError: not JSON, or of a newer format.
        """
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise CheckpointError(
                f"{source} is not valid JSON.", evidence=str(error), next_step="Use another checkpoint of the run."
            ) from error
        found = values.pop("format", None) if isinstance(values, dict) else None
        if not isinstance(found, int) or found > FORMAT or "step" not in values:
            raise CheckpointError(
                f"{source} has format {found!r}; this version of paceline reads up to {FORMAT}.",
                evidence="It was written by a newer paceline, or by another program.",
                next_step="Use the version of paceline that wrote it (`versions` in the file names it).",
            )
        known = {entry.name for entry in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})


def restore_rng(saved: Mapping[str, Tensor] | None, *, device: torch.device, seed: int, step: int, rank: int) -> bool:
    """Puts the process-wide generators back, or seeds them anew where this rank has no saved state.

    The rule: on as many ranks as wrote the checkpoint, each gets its own state back and goes on bit for bit. On another
    number of ranks ``saved`` is None everywhere, and every rank is seeded from (seed, step, rank): repeatable, and no
    two ranks or restarts draw the same numbers. Data order and weights do not depend on these generators.

    Returns:
        whether the saved state was used.
    """
    if saved is not None:
        set_rng_state(saved, device)
        return True
    seed_all(seed, resumed_at_step=step, rank=rank)
    return False
