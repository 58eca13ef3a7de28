"""LoRA adapters of PEFT: `adapter_config.json` and `adapter_model.safetensors`, merged into weights or taken out again.

A matrix W of the base becomes W + scale * B A, with scale = alpha / rank, or alpha / sqrt(rank) for rank-stabilised
LoRA (arXiv:2106.09685, arXiv:2312.03732); with DoRA (arXiv:2402.09353) its rows then have learned lengths. Adapters
name modules as Transformers does, so they fit a model of any format whose family is known; `own_pairs` has them under
our names. `peft_write.py` writes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from paceline.checkpoint.adapters import MergedWeights, Pair
from paceline.checkpoint.pieces import Box
from paceline.checkpoint.weights import WeightSource
from paceline.config.lora import SCORE
from paceline.errors import CheckpointError
from paceline.interop.hf_links import hf_links
from paceline.interop.links import LinkedSource, LinkTable, whole
from paceline.interop.peft_notes import notes_on
from paceline.interop.peft_score import with_score
from paceline.interop.peft_settings import CONFIG, Settings
from paceline.interop.sidecars import hub_config
from paceline.interop.sources import Opened

__all__ = ["CONFIG", "WEIGHTS", "Adapter", "merge", "misfits", "own_pairs", "read_adapter"]

WEIGHTS = "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"

_PREFIX, _BASE = "base_model.model.", ".base_layer.weight"
_SCORE_MODULES = ("score", "classifier")
"""PEFT learns and saves these whole for classifiers; families of ours have the first."""
_LENGTHS = r"magnitude_vector(?:\.default)?(?:\.weight)?"
_MUST: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_bdlora": (False, None),
    "use_qalora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
    "layer_replication": (None,),
    "alora_invocation_tokens": (None,),
    "kasa_config": (None,),
    "arrow_config": (None,),
    "monteclora_config": (None,),
}
"""What is understood; other values change the result in ways that are not."""
_SAME_BASE = (True, False, None, "gaussian", "orthogonal", "eva")
"""Of `init_lora_weights`: the pair began as a product of zero, beside the model as it is (EVA chooses the first matrix
by the inputs, and ranks and alphas of modules, which are in the patterns). The others (PiSSA, OLoRA, CorDA, LoftQ)
change the matrices first, and only PEFT has those that the pair then belongs to."""


@dataclass(frozen=True, kw_only=True)
class Adapter:
    path: Path
    pairs: Mapping[str, Pair]
    """By the name of the matrix in the base."""
    base: Mapping[str, Tensor]
    """Matrices of the base that were saved with it, as PEFT does for head and embedding."""
    score: Tensor | None = None
    """[1, hidden_size]: of a reward model, learned whole beside the pairs."""
    notes: tuple[str, ...] = ()
    """What a person should know of it."""

    @property
    def is_dora(self) -> bool:
        return any(pair.magnitude is not None for pair in self.pairs.values())


def read_adapter(path: Path) -> Adapter:
    """Reads an adapter; it is small, so all of it.

    Raises:
        CheckpointError: a file is missing or damaged, a setting is no number, a pair is not whole or of another rank
            than its settings say, or the adapter is not plain LoRA beside the model's own matrices.
    """
    config = _read_config(path)
    settings = Settings.of(path, config)
    wrong = [f"{key} = {config[key]!r}" for key, known in _MUST.items() if key in config and config[key] not in known]
    whole_modules = config.get("modules_to_save") or []
    wrong += [] if set(whole_modules) <= set(_SCORE_MODULES) else [f"modules_to_save = {whole_modules!r}"]
    if wrong:
        raise CheckpointError(
            f"the adapter {path} is not plain LoRA: {', '.join(wrong)}",
            evidence="Only pairs of matrices that are added to matrices of the base are understood.",
            next_step="Merge it with PEFT (merge_and_unload) and convert the merged model.",
        )
    _refuse_changed_base(path, config.get("init_lora_weights"))
    halves: dict[str, dict[str, Tensor]] = {}
    base, needed = {}, {"A", "B", "magnitude"} if config.get("use_dora") else {"A", "B"}
    score = None
    for name, value in _read_weights(path).items():
        if name.startswith(_PREFIX) and name.endswith(_BASE):
            base[name.removeprefix(_PREFIX).removesuffix(_BASE) + ".weight"] = value
            continue
        if name == _PREFIX + SCORE and value.dim() == 2 and len(value) == 1:
            score = value
            continue
        match = re.fullmatch(rf"{re.escape(_PREFIX)}(.+)\.lora_(?:([AB])(?:\.default)?\.weight|{_LENGTHS})", name)
        half = "magnitude" if match is not None and match[2] is None else match and match[2]
        if match is None or half is None or value.dim() != (1 if half == "magnitude" else 2):
            raise CheckpointError(
                f"the adapter {path} has a tensor that is no half of a pair: {name} {list(value.shape)}",
                next_step="Merge it with PEFT (merge_and_unload) and convert the merged model.",
            )
        halves.setdefault(match[1], {})[half] = value
    pairs = {}
    for module, both in halves.items():
        if both.keys() != needed or both["A"].shape[0] != both["B"].shape[1]:
            raise CheckpointError(
                f"the adapter {path} is not whole: {module} has {' and '.join(f'lora_{half}' for half in both)}",
                next_step="Copy it again.",
            )
        _check_rank(path, settings, module, both["A"])
        pairs[f"{module}.weight"] = Pair(
            down=both["A"], up=both["B"], scale=settings.scale(module), magnitude=both.get("magnitude")
        )
    if "score" in whole_modules and score is None:
        raise CheckpointError(
            f"the adapter {path} is not whole: score.weight is missing, or of several labels",
            evidence=f"modules_to_save = {whole_modules!r} in its {CONFIG}; a reward model has one label.",
            next_step="Copy it again.",
        )
    return Adapter(path=path, pairs=pairs, base=base, score=score, notes=notes_on(path, config, halves))


def _check_rank(path: Path, settings: Settings, module: str, down: Tensor) -> None:
    """The scale is alpha over the rank of the settings: with another one the sum would be wrong, and look well."""
    if len(down) != settings.rank_of(module):
        raise CheckpointError(
            f"the adapter {path} is of another rank than its {CONFIG} says: {module}.lora_A {list(down.shape)} has "
            f"rank {len(down)}, {settings.said_rank(module)}",
            evidence="Pairs are scaled by lora_alpha and the rank, so it would be merged at a wrong scale.",
            next_step=f"Take the {CONFIG} that was saved with these matrices.",
        )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        found = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is no PEFT adapter: {CONFIG} cannot be read",
            evidence=str(error),
            next_step=f"Give the folder that holds {CONFIG} and {WEIGHTS}.",
        ) from error
    if isinstance(found, dict) and "peft_type" in found:
        return found
    what = "has no peft_type" if isinstance(found, dict) else f"is no table of settings: {json.dumps(found)[:60]}"
    raise CheckpointError(
        f"{path} is no PEFT adapter: its {CONFIG} {what}",
        evidence="What kind of adapter it is, and rank and alpha of its pairs, are not said, and are not guessed.",
        next_step=f"Copy {CONFIG} again from where the adapter was saved.",
    )


def _refuse_changed_base(path: Path, begun: object) -> None:
    if any(begun is known or (isinstance(known, str) and begun == known) for known in _SAME_BASE):
        return
    raise CheckpointError(
        f"the adapter {path} may belong to a changed base: init_lora_weights = {begun!r} in its {CONFIG}",
        evidence="Such a pair begins with a part of each matrix W, and belongs to W less that part: beside W itself it "
        "would count twice.",
        next_step="Let PEFT write it as plain LoRA, model.save_pretrained(FOLDER, "
        "path_initial_model_for_weight_conversion=THE_ADAPTER_AS_IT_BEGAN), and take that folder; or merge it with "
        "PEFT (merge_and_unload) and convert the merged model.",
    )


def _read_weights(path: Path) -> dict[str, Tensor]:
    if not (path / WEIGHTS).exists() and (path / _PICKLED).exists():
        raise CheckpointError(
            f"{path} has {_PICKLED} alone, which is not read",
            evidence="It is a pickle, which can run code when it is opened.",
            next_step=f"Save it again as {WEIGHTS}: model.save_pretrained(FOLDER, safe_serialization=True).",
        )
    try:
        return load_file(path / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path / WEIGHTS} cannot be read", evidence=str(error), next_step="Copy the adapter again."
        ) from error


def merge(opened: Opened, adapter: Adapter, *, take_out: bool = False) -> Opened:
    """The model with the adapter merged, or taken out of weights that it was merged into.

    Raises:
        ConfigError: the model has no names in Transformers, so an adapter cannot mean it.
        CheckpointError: the adapter is for another model: a matrix is missing or of another shape; all are listed.
    """
    if adapter.score is not None:
        opened = with_score(opened, adapter.score, adapter.path, take_out=take_out)
    config = hub_config(opened.model, template=opened.template)
    table = hf_links(opened.model, str(config["model_type"]))
    shapes = _their_matrices(table)
    problems = misfits(adapter, table, config) + _other_base(opened, table, adapter)
    if problems:
        raise CheckpointError(
            f"the adapter {adapter.path} fits another model: {len(problems)} of its {len(adapter.pairs)} pairs misfit",
            evidence="\n  ".join(problems[:10]),
            next_step="Take the model that its adapter_config.json names as base_model_name_or_path.",
        )
    verb = "taken out of" if take_out else "merged into"
    note = f"{adapter.path.name}: {len(adapter.pairs)} pairs are {verb} the weights."
    notes = (*opened.notes, *adapter.notes, note)
    if adapter.is_dora:
        if take_out:
            raise CheckpointError(
                f"the adapter {adapter.path} cannot be taken out: it is DoRA's",
                evidence="It set the lengths of rows; what they were before is not in the merged weights.",
                next_step="Take the model that it was merged into.",
            )
        return replace(
            opened, weights=MergedWeights(opened.weights, own_pairs(adapter, table)), notes=notes, changed=True
        )
    deltas = _Deltas(adapter, shapes, transposed=config["model_type"] == "gpt2", sign=-1.0 if take_out else 1.0)
    return replace(opened, weights=_Merged(opened.weights, table, deltas), notes=notes, changed=True)


def own_pairs(adapter: Adapter, table: LinkTable) -> dict[str, Pair]:
    """The pairs under the names of our matrices. Where several of ours are one of theirs (GPT-2's queries, keys and
    values), each has the first matrix to itself.

    Raises:
        CheckpointError: a pair is for a matrix that is several of ours in another way: an expert's.
    """
    found, used = {}, set()
    for ours, links in table.links.items():
        link = links[0]
        pair = adapter.pairs.get(link.theirs) if len(links) == 1 else None
        if pair is None:
            continue
        used.add(link.theirs)
        rows = link.ours_at.sizes[0]
        first = link.theirs_at.offsets[-1 if link.transposed else 0]
        order = torch.arange(rows) if link.rows is None else link.rows
        up = pair.up.narrow(0, first, rows).index_select(0, order)
        lengths = pair.magnitude
        found[ours] = Pair(
            down=pair.down,
            up=up,
            scale=pair.scale,
            magnitude=None if lengths is None else lengths.narrow(0, first, rows).index_select(0, order),
        )
    left = sorted(adapter.pairs.keys() - used)
    if left:
        raise CheckpointError(
            f"the adapter {adapter.path} has {len(left)} pairs for matrices that have no adapters of ours: {left[0]}",
            evidence="Routed experts are frozen here.",
            next_step="Merge it first: paceline convert MODEL NEW --to hf --adapter ADAPTER.",
        )
    return found


def misfits(adapter: Adapter, table: LinkTable, config: Mapping[str, Any]) -> list[str]:
    """Pairs of matrices that the model with this hub ``config`` does not have, or has in another shape."""
    shapes = _their_matrices(table)
    found = (_misfit(name, pair, shapes, config) for name, pair in adapter.pairs.items())
    return [problem for problem in found if problem]


def _their_matrices(table: LinkTable) -> dict[str, torch.Size]:
    # a tied head has no matrix of its own to add to
    return {name: shape for name, shape in table.their_shapes().items() if name not in table.copies}


def _other_base(opened: Opened, table: LinkTable, adapter: Adapter) -> list[str]:
    """Matrices that were saved with the adapter and are not those of the model."""
    for ours, links in table.links.items():
        for link in links:
            saved = adapter.base.get(link.theirs)
            if saved is None:
                continue
            value = opened.weights.read(ours)
            if saved.shape != value.shape or not torch.equal(saved.to(value.dtype), value):
                return [f"{link.theirs} was saved with it, and is another one than the model's"]
    return []


def _misfit(name: str, pair: Pair, shapes: Mapping[str, torch.Size], config: Mapping[str, Any]) -> str:
    if name not in shapes:
        return f"{name} is not in the model"
    needed = (pair.up.shape[0], pair.down.shape[1])
    have = tuple(shapes[name])[:: -1 if config["model_type"] == "gpt2" else 1]
    return "" if needed == have else f"{name} would be {list(needed)}, the model's is {list(have)}"


class _Deltas:
    """What is added to the matrices of the base, under their names: a ``RawSource``."""

    def __init__(self, adapter: Adapter, shapes: Mapping[str, torch.Size], *, transposed: bool, sign: float) -> None:
        self.pairs = adapter.pairs
        self._shapes = shapes
        self._transposed = transposed
        self._sign = sign

    def shapes(self) -> Mapping[str, torch.Size]:
        return self._shapes

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32

    def read(self, name: str, box: Box) -> Tensor:
        pair = self.pairs.get(name)
        if pair is None:
            return torch.zeros(box.sizes)
        (row, column), (rows, columns) = box.offsets, box.sizes
        if self._transposed:
            (row, column), (rows, columns) = (column, row), (columns, rows)
        up, down = pair.up.narrow(0, row, rows).float(), pair.down.narrow(1, column, columns).float()
        delta = (up @ down) * (self._sign * pair.scale)
        return delta.T if self._transposed else delta


class _Merged:
    """A model with something added to some of its matrices: a ``WeightSource``."""

    def __init__(self, base: WeightSource, table: LinkTable, deltas: _Deltas) -> None:
        self._base = base
        self._deltas = LinkedSource(table, deltas)
        self._touched = {
            name for name, links in table.links.items() if any(link.theirs in deltas.pairs for link in links)
        }

    def shapes(self) -> Mapping[str, torch.Size]:
        return self._base.shapes()

    def dtype(self, name: str) -> torch.dtype:
        return self._base.dtype(name)

    def read(self, name: str, box: Box | None = None) -> Tensor:
        box = box or whole(self.shapes()[name])
        value = self._base.read(name, box)
        if name not in self._touched:
            return value
        return (value.float() + self._deltas.read(name, box)).to(value.dtype)
