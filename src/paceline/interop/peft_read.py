"""An adapter to go on from, as the parameters of our model: a PEFT folder, or a run of ours."""

from __future__ import annotations

import logging
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from paceline.checkpoint.adapters import Pair, pairs_of
from paceline.checkpoint.pieces import Box
from paceline.checkpoint.weights import CheckpointSource, WeightSource
from paceline.config.load import validate
from paceline.config.lora import SCORE, LoraConfig
from paceline.config.model import ModelConfig
from paceline.errors import CheckpointError
from paceline.interop.hf_links import hf_links, model_shapes
from paceline.interop.peft import CONFIG, misfits, own_pairs, read_adapter
from paceline.interop.sidecars import hub_config
from paceline.interop.sources import is_adapted, newest_told

log = logging.getLogger(__name__)


def adapter_source(path: Path, model: ModelConfig, lora: LoraConfig) -> WeightSource | None:
    """The adapter at ``path`` under the names of the model's adapter parameters; None where there is none.

    Raises:
        CheckpointError: it is damaged, of another model, or not what `[lora]` describes; all differences are listed.
    """
    if (path / CONFIG).is_file():
        config = hub_config(model, template=None)
        table = hf_links(model, str(config["model_type"]))
        adapter = read_adapter(path)
        for note in adapter.notes:
            log.warning("%s", note)
        score = adapter.score
        problems = misfits(adapter, table, config)
        if problems:
            raise _misfit(path, problems)
        pairs: Mapping[str, Pair] = own_pairs(adapter, table)
    elif is_adapted(path):
        checkpoint, notes = newest_told(path)
        for note in notes:
            log.warning("%s", note)
        source = CheckpointSource(checkpoint)
        pairs = pairs_of(source, validate(tomllib.loads(checkpoint.recipe())).lora)
        score = source.read(SCORE) if SCORE in source.shapes() else None
    else:
        return None
    problems = list(_problems(pairs, model, lora))
    if score is not None and not model.has_score:
        problems.append("it has a score: it is of a reward model; model.head = 'vocabulary'")
    if problems:
        raise _misfit(path, problems)
    return _Pairs(pairs, score)


def _misfit(path: Path, problems: list[str]) -> CheckpointError:
    return CheckpointError(
        f"the adapter {path} is not one of this recipe: {len(problems)} differences",
        evidence="\n  ".join(problems[:10]),
        next_step="Take the model that it was trained beside, and set [lora] as it was then.",
    )


def _problems(pairs: Mapping[str, Pair], model: ModelConfig, lora: LoraConfig) -> list[str]:
    shapes = model_shapes(model)
    wanted = {name for name in shapes if lora.adapts(name)}
    problems = [f"{name} has no pair there; lora.targets asks for one" for name in sorted(wanted - pairs.keys())]
    problems += [f"{name} has a pair there; lora.targets leaves it out" for name in sorted(pairs.keys() - wanted)]
    for name in sorted(wanted & pairs.keys()):
        pair, shape = pairs[name], tuple(shapes[name])
        found = (pair.up.shape[0], pair.down.shape[1])
        if found != shape:
            problems.append(f"{name} would be {list(found)}, the model's is {list(shape)}")
        elif pair.down.shape[0] != lora.rank:
            problems.append(f"{name} has rank {pair.down.shape[0]} there, lora.rank = {lora.rank}")
        elif not math.isclose(pair.scale, lora.scale, rel_tol=1e-6):
            text = f"{name} is scaled by {pair.scale:g} there, by lora.alpha and lora.rank it would be {lora.scale:g}"
            problems.append(text)
        elif (pair.magnitude is not None) != lora.dora:
            problems.append(
                f"{name} is {'' if pair.magnitude is not None else 'not '}DoRA's there, lora.dora = {lora.dora}"
            )
    return problems


class _Pairs:
    """Pairs as parameters of the model: a ``WeightSource``."""

    def __init__(self, pairs: Mapping[str, Pair], score: Tensor | None) -> None:
        self._tensors: dict[str, Tensor] = {} if score is None else {SCORE: score}
        for name, pair in pairs.items():
            owner = name.removesuffix(".weight")
            self._tensors |= {f"{owner}.lora_a": pair.down, f"{owner}.lora_b": pair.up}
            if pair.magnitude is not None:
                self._tensors[f"{owner}.lora_magnitude"] = pair.magnitude

    def shapes(self) -> dict[str, torch.Size]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def read(self, name: str, box: Box | None = None) -> Tensor:
        value = self._tensors[name]
        for dim, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True) if box else ()):
            value = value.narrow(dim, start, size)
        return value
