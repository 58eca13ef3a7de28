"""What a checkpoint of a run with adapters leaves out, and how both become one model again.

Such a checkpoint holds what learns, and says which weights it belongs to: where they were read from, and a fingerprint
of them. Whoever opens it reads those weights, makes sure, and has

    W' = W + scale * B A                                 or, with DoRA,
    W' = m / |W + scale * B A| * (W + scale * B A)       the lengths of rows

block by block: no matrix is whole in memory, but for the rows that DoRA needs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.pieces import Box
from paceline.checkpoint.weights import WeightSource
from paceline.config.lora import SCORE, LoraConfig, is_adapter
from paceline.errors import CheckpointError

BASE = "base"
"""Key in `TrainState.extra`."""
_SAMPLE = 64


@dataclass(frozen=True, kw_only=True)
class BaseReference:
    """Which weights adapters belong to."""

    source: str
    """`model.init_from` of the run that began; empty where they were drawn from its seed."""
    fingerprint: str

    def as_json(self) -> dict[str, str]:
        return asdict(self)

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any]) -> BaseReference | None:
        """What a checkpoint says; None where it holds whole weights."""
        found = extra.get(BASE)
        return cls(source=str(found["source"]), fingerprint=str(found["fingerprint"])) if found else None


def drawn_from(seed: int) -> BaseReference:
    """Of weights that nobody trained."""
    return BaseReference(source="", fingerprint=f"run.seed {seed}")


def fingerprint(source: WeightSource) -> str:
    """Of every tensor but those of multi-token prediction: its shape, and up to 64 numbers from its middle, rounded to
    bf16.

    The same for the same weights in any format and precision; another training of the same model moves every matrix,
    so the sample is enough to tell it apart. Reads a few bytes a tensor.
    """
    digest, shapes = hashlib.sha256(), source.shapes()
    for name in sorted(name for name in shapes if not name.startswith("mtp.")):
        shape = tuple(shapes[name])
        sizes = (*(1 for _ in shape[:-1]), min(shape[-1], _SAMPLE)) if shape else ()
        offsets = tuple((length - size) // 2 for length, size in zip(shape, sizes, strict=True))
        numbers = source.read(name, Box(offsets=offsets, sizes=sizes)).float().bfloat16().float().flatten().tolist()
        digest.update(f"{name} {shape} {numbers}\n".encode())
    return digest.hexdigest()[:32]


def refuse_other_base(saved: BaseReference | None, found: BaseReference, checkpoint: str) -> None:
    """Raises CheckpointError where the adapters of ``checkpoint`` were trained beside other weights than ``found``."""
    if saved is None:
        raise CheckpointError(
            f"{checkpoint} holds whole weights, and the recipe has adapters",
            evidence=f"lora.rank is above 0; the base would be {found.source or 'drawn from the seed'}.",
            next_step="To begin adapters of its weights: model.init_from = that run, with another run.dir.",
        )
    if saved.fingerprint != found.fingerprint:
        raise CheckpointError(
            f"the adapters in {checkpoint} were trained beside other weights",
            evidence=f"Then: {saved.source or saved.fingerprint}, fingerprint {saved.fingerprint}. Now: "
            f"{found.source or found.fingerprint}, fingerprint {found.fingerprint}.",
            next_step=f"Set model.init_from = {saved.source!r}, as it was then."
            if saved.source
            else "Leave model.init_from and run.seed as they were.",
        )


# ---- as one model


@dataclass(frozen=True, kw_only=True)
class Pair:
    """What changes one matrix."""

    down: Tensor
    """[rank, inputs]."""
    up: Tensor
    """[outputs, rank]."""
    scale: float
    magnitude: Tensor | None = None
    """[outputs], with DoRA."""


def pairs_of(source: WeightSource, lora: LoraConfig) -> dict[str, Pair]:
    """By name of the matrix; ``source`` is a checkpoint of a run with adapters."""
    names, found = source.shapes().keys(), {}
    for name in names:
        owner, _, leaf = name.rpartition(".")
        if leaf == "lora_a":
            magnitude = f"{owner}.lora_magnitude"
            found[f"{owner}.weight"] = Pair(
                down=source.read(name),
                up=source.read(f"{owner}.lora_b"),
                scale=lora.scale,
                magnitude=source.read(magnitude) if magnitude in names else None,
            )
    return found


class MergedWeights:
    """A model with adapters in its matrices: a ``WeightSource``.

    Args:
        take_out: the pairs are subtracted, from weights that they were merged into. Not with DoRA, whose lengths of
            rows before the merge are not known after it.
        others: further tensors that were trained beside the adapters, in place of the base's.
    """

    def __init__(
        self,
        base: WeightSource,
        pairs: Mapping[str, Pair],
        *,
        take_out: bool = False,
        others: WeightSource | None = None,
    ) -> None:
        assert not take_out or all(pair.magnitude is None for pair in pairs.values())
        self._base, self._pairs, self._sign = base, pairs, -1.0 if take_out else 1.0
        self._others = others
        self._other_names = (
            frozenset() if others is None else frozenset(name for name in others.shapes() if not is_adapter(name))
        )

    def shapes(self) -> Mapping[str, torch.Size]:
        if self._others is None:
            return self._base.shapes()
        theirs, base = self._others.shapes(), dict(self._base.shapes())
        if SCORE in self._other_names:
            base.pop("head.weight", None)  # of the language model that a reward model began with
        return base | {name: theirs[name] for name in self._other_names}

    def dtype(self, name: str) -> torch.dtype:
        return self._of(name).dtype(name)

    def _of(self, name: str) -> WeightSource:
        return self._others if self._others is not None and name in self._other_names else self._base

    def read(self, name: str, box: Box | None = None) -> Tensor:
        pair = self._pairs.get(name)
        if pair is None:
            return self._of(name).read(name, box)
        shape = self._base.shapes()[name]
        box = box or Box(offsets=(0, 0), sizes=tuple(shape))
        (row, column), (rows, columns) = box.offsets, box.sizes
        # DoRA's lengths are of whole rows
        begin, width = (column, columns) if pair.magnitude is None else (0, shape[1])
        value = self._base.read(name, Box(offsets=(row, begin), sizes=(rows, width)))
        wide = torch.promote_types(value.dtype, torch.float32)
        up, down = pair.up.narrow(0, row, rows).to(wide), pair.down.narrow(1, begin, width).to(wide)
        changed = value.to(wide) + (self._sign * pair.scale) * (up @ down)
        if pair.magnitude is not None:
            lengths = torch.linalg.vector_norm(changed, dim=1, keepdim=True)
            changed = changed * (pair.magnitude.narrow(0, row, rows).to(wide)[:, None] / lengths)
        return changed.narrow(1, column - begin, columns).to(value.dtype)


OpenBase = Callable[[str], WeightSource]
"""Opens what `model.init_from` names."""


def whole_model(
    adapters: WeightSource,
    lora: LoraConfig,
    saved: BaseReference | None,
    open_base: OpenBase,
    checkpoint: str,
) -> MergedWeights:
    """The model of a checkpoint with adapters, merged with the weights that they belong to.

    Raises:
        CheckpointError: these are not there, or are others by now.
    """
    if saved is None or not saved.source:
        raise CheckpointError(
            f"{checkpoint} holds adapters, and not of which weights",
            evidence="They were trained beside weights that were drawn from a seed, which no file holds.",
            next_step="Train adapters of a model: model.init_from.",
        )
    base = open_base(saved.source)
    found = BaseReference(source=saved.source, fingerprint=fingerprint(base))
    refuse_other_base(saved, found, checkpoint)
    return MergedWeights(base, pairs_of(adapters, lora), others=adapters)
