"""Adapters that we trained, as PEFT's folder: `adapter_config.json` and `adapter_model.safetensors`.

Adapters are small, so all of one is gathered in the memory of the first rank, in fp32 as PEFT keeps it.
"""

from __future__ import annotations

import json
import logging
import shutil
import tomllib
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.checkpoint.adapters import BaseReference, Pair, pairs_of
from paceline.checkpoint.files import sync_folder
from paceline.checkpoint.weights import CheckpointSource, ExportJob
from paceline.config.hub import CONFIG as HUB_CONFIG
from paceline.config.hub import is_hub_folder, read_config
from paceline.config.load import validate
from paceline.config.lora import SCORE, LoraConfig
from paceline.config.model import ModelConfig
from paceline.errors import CheckpointError, ConfigError
from paceline.interop.convert import refuse_existing
from paceline.interop.hf_links import hf_links
from paceline.interop.links import Link
from paceline.interop.peft import CONFIG, WEIGHTS
from paceline.interop.sidecars import hub_config, read_sidecars, read_template
from paceline.interop.sources import newest_told
from paceline.interop.text_files import files_of_run, text_files_of

log = logging.getLogger(__name__)

_PREFIX = "base_model.model."


@dataclass(frozen=True, kw_only=True)
class AdapterNames:
    """What PEFT calls the linears of a model that have adapters."""

    modules: Mapping[str, Link]
    """Our matrix -> its link; `link.theirs` is the module's weight."""
    model_type: str
    others: tuple[str, ...]
    """Matrices of theirs without an adapter."""
    has_score: bool
    """Whether it is of a reward model: a classifier with one label there."""


@dataclass(frozen=True, kw_only=True)
class Written:
    checkpoint: Path
    """The one that was taken."""
    num_tensors: int
    num_bytes: int
    notes: tuple[str, ...]
    """Lines on what should be known: checkpoints that were passed over, a base that PEFT cannot open."""


def adapter_names(model: ModelConfig, lora: LoraConfig, template: dict[str, Any] | None = None) -> AdapterNames:
    """Raises ConfigError where PEFT has no module for a linear by itself, or no family has words for the model."""
    model_type = str(hub_config(model, template=template)["model_type"])
    table = hf_links(model, model_type)
    found = {name: links[0] for name, links in table.links.items() if lora.adapts(name)}
    joined = [name for name, link in found.items() if table.their_shapes()[link.theirs].numel() > link.ours_at.numel]
    if joined:
        raise ConfigError(
            f"an adapter of {joined[0]} cannot be written for PEFT: the family {model_type} has queries, keys and "
            "values in one matrix",
            evidence="PEFT has one pair for that matrix, ours has one for each of the three.",
            next_step="Leave q_proj, k_proj and v_proj out of lora.targets, or merge: paceline convert RUN NEW.",
        )
    theirs = {link.theirs for link in found.values()}
    others = tuple(name for name in table.their_shapes() if name.endswith(".weight") and name not in theirs)
    return AdapterNames(modules=found, model_type=model_type, others=others, has_score=model.has_score)


def peft_tensors(pairs: Mapping[str, Pair], names: AdapterNames, score: Tensor | None = None) -> dict[str, Tensor]:
    """An adapter's tensors under PEFT's names, fp32; the score of a reward model is one of its `modules_to_save`."""
    found = {} if score is None else {_PREFIX + SCORE: score.float().contiguous()}
    for ours, link in names.modules.items():
        pair, module = pairs[ours], _PREFIX + link.theirs.removesuffix(".weight")
        found[f"{module}.lora_A.weight"] = pair.down.float().contiguous()
        found[f"{module}.lora_B.weight"] = _their_rows(pair.up, link)
        if pair.magnitude is not None:
            found[f"{module}.lora_magnitude_vector"] = _their_rows(pair.magnitude, link)
    return found


def _their_rows(value: Tensor, link: Link) -> Tensor:
    value = value.float()
    if link.rows is not None:
        value = torch.empty_like(value).index_copy_(0, link.rows, value)
    return value.contiguous()


def peft_config(lora: LoraConfig, names: AdapterNames, base: str) -> dict[str, Any]:
    """`adapter_config.json`; ``base`` is the hub folder that it belongs to, empty where PEFT has none to open."""
    modules = [link.theirs.removesuffix(".weight") for link in names.modules.values()]
    leaves = sorted({module.rpartition(".")[2] for module in modules})
    # PEFT takes an entry for the end of a module's name: short ones only where nothing else ends so
    short = not any(name.removesuffix(".weight").rpartition(".")[2] in leaves for name in names.others)
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if names.has_score else "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": leaves if short else modules,
        "use_rslora": lora.use_rslora,
        "use_dora": lora.dora,
        "bias": "none",
        "fan_in_fan_out": names.model_type == "gpt2",
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": ["score"] if names.has_score else None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "layers_to_transform": None,
        "layers_pattern": None,
        "revision": None,
    }


def write_peft(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], files: Mapping[str, bytes]
) -> int:
    """Writes ``folder``, which appears when it is complete, and returns the bytes of its tensors.

    Args:
        files: name -> content of what goes along: the tokenizer.

    Raises:
        CheckpointError: it could not be written; nothing of it is left.
    """
    temporary = folder.with_name(f"{folder.name}.tmp-{uuid.uuid4().hex[:8]}")
    try:
        temporary.mkdir(parents=True)
        for name, content in files.items():
            (temporary / name).parent.mkdir(exist_ok=True)
            (temporary / name).write_bytes(content)
        save_file(dict(tensors), temporary / WEIGHTS, metadata={"format": "pt"})
        (temporary / CONFIG).write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
        sync_folder(temporary)
        temporary.rename(folder)
        sync_folder(folder.parent)
    except OSError as error:
        raise CheckpointError(
            f"the adapter {folder} could not be written",
            evidence=str(error),
            next_step="Look at the disk and its rights.",
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return sum(tensor.nbytes for tensor in tensors.values())


# ---- out of a checkpoint


def convert_adapter(source: Path, target: Path) -> Written:
    """Writes the adapters of a run, or checkpoint, of ours as the new folder ``target``.

    Raises:
        ConfigError: ``target`` exists, or PEFT has no words for the adapters.
        CheckpointError: ``source`` holds none, or cannot be read.
    """
    refuse_existing(target)
    checkpoint, notes = newest_told(source)
    lora_recipe = validate(tomllib.loads(checkpoint.recipe()))
    base = BaseReference.from_extra(checkpoint.state().extra)
    if base is None:
        raise CheckpointError(
            f"{checkpoint.folder} holds whole weights, no adapters",
            evidence="PEFT's format is for adapters (lora.rank above 0).",
            next_step="Convert the model: paceline convert SRC DST --to hf.",
        )
    names = adapter_names(lora_recipe.model, lora_recipe.lora, _template(base.source))
    beside = files_of_run(checkpoint, lora_recipe)
    beside |= text_files_of(checkpoint, lora_recipe, beside).files
    files = read_sidecars({name: path for name, path in beside.items() if name != HUB_CONFIG})
    adapters = CheckpointSource(checkpoint)
    score = adapters.read(SCORE) if names.has_score else None
    tensors = peft_tensors(pairs_of(adapters, lora_recipe.lora), names, score)
    opened_by_peft, told = _base_for_peft(base.source)
    num_bytes = write_peft(target, peft_config(lora_recipe.lora, names, opened_by_peft), tensors, files)
    return Written(checkpoint=checkpoint.folder, num_tensors=len(tensors), num_bytes=num_bytes, notes=(*notes, *told))


def _base_for_peft(source: str) -> tuple[str, tuple[str, ...]]:
    """What `base_model_name_or_path` can be, and what is to be told of it: only a hub's folder is one to PEFT."""
    if not source or not Path(source).is_dir() or is_hub_folder(source):
        return source, ()
    note = (
        f"base_model_name_or_path is left empty: the base is {source}, which PEFT cannot open. "
        f"Write it for PEFT: paceline convert {source} BASE --to hf."
    )
    return "", (note,)


def _template(source: str) -> dict[str, Any] | None:
    return read_config(Path(source)) if source and is_hub_folder(source) else None


# ---- out of a running training


def export_peft(job: ExportJob) -> None:
    """Writes ``job.folder``: PEFT's adapter, from any layout. Collective.

    Raises:
        ConfigError: PEFT has no words for it.
        CheckpointError: it could not be written, on all ranks; nothing of it is left.
    """
    template = job.ranks.from_first("reading the first config", lambda: read_template(job.files))
    names = adapter_names(job.model, job.lora, template)
    found = job.ranks.exchange(
        "gathering adapters", lambda: _own(job), lambda parts: [_whole(job, parts), *_nothing(job)]
    )

    def write() -> None:
        pairs = _pairs(found, job.lora)
        files = {name: path.read_bytes() for name, path in job.files.items() if name != HUB_CONFIG}
        base, notes = _base_for_peft(job.base)
        for note in notes:
            log.warning("%s: %s", job.folder, note)
        write_peft(job.folder, peft_config(job.lora, names, base), peft_tensors(pairs, names, found.get(SCORE)), files)

    job.ranks.from_first(f"writing {job.folder}", write)


_Part = tuple[str, tuple[int, ...], Tensor]


def _own(job: ExportJob) -> list[_Part]:
    return [
        (name, piece.offsets, piece.tensor.detach().to("cpu", torch.float32))
        for name, value in job.values.items()
        for piece in value.pieces
        if job.lora.learns(name) and piece.saved and piece.tensor.numel()
    ]


def _nothing(job: ExportJob) -> Iterable[dict[str, Tensor]]:
    return ({} for _ in range(job.ranks.world_size - 1))


def _whole(job: ExportJob, by_rank: list[list[_Part]]) -> dict[str, Tensor]:
    """Global tensors, of the parts of all ranks."""
    found = {
        name: torch.full(value.global_shape, torch.nan) for name, value in job.values.items() if job.lora.learns(name)
    }
    for name, offsets, part in (part for parts in by_rank for part in parts):
        box = tuple(slice(start, start + size) for start, size in zip(offsets, part.shape, strict=True))
        found[name][box] = part
    return found


def _pairs(tensors: Mapping[str, Tensor], lora: LoraConfig) -> dict[str, Pair]:
    return {
        name.removesuffix("lora_a") + "weight": Pair(
            down=down,
            up=tensors[name.removesuffix("lora_a") + "lora_b"],
            scale=lora.scale,
            magnitude=tensors.get(name.removesuffix("lora_a") + "lora_magnitude"),
        )
        for name, down in tensors.items()
        if name.endswith(".lora_a")
    }
