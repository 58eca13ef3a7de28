"""What of other programs a training run can begin with and write: registered with it as plugins are."""

from __future__ import annotations

import logging
import shutil
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from paceline.checkpoint.weights import ExportJob, ForeignWeights
from paceline.config.hub import CONFIG, is_hub_folder
from paceline.config.load import validate
from paceline.config.model import ModelConfig
from paceline.config.plugins import Registry
from paceline.errors import ConfigError
from paceline.interop.hf import open_hub
from paceline.interop.hf_export import export_hub
from paceline.interop.peft_read import adapter_source
from paceline.interop.peft_write import export_peft
from paceline.interop.sidecars import SETTINGS, TOKENIZER, sidecars_in
from paceline.interop.sources import is_adapted, newest_told, open_paceline
from paceline.interop.text_files import made_files, unsaid

log = logging.getLogger(__name__)


def register(registry: Registry) -> None:
    """Adds all formats."""
    registry.weight_source(_hub_weights)
    registry.weight_source(_merged_weights)
    registry.adapter_source(adapter_source)
    registry.export("hf", _export)
    registry.export("peft", export_peft)


def _hub_weights(path: Path, model: ModelConfig) -> ForeignWeights | None:
    if not is_hub_folder(path):
        return None
    hub = open_hub(path, model=model, compare_copies=_is_first())
    for note in hub.notes if _is_first() else ():
        log.warning("%s: %s", path, note)
    return ForeignWeights(weights=hub.weights, files=sidecars_in(path))


def _is_first() -> bool:
    """What a person should know is found out once, and told once."""
    return not dist.is_initialized() or dist.get_rank() == 0


def _merged_weights(path: Path, model: ModelConfig) -> ForeignWeights | None:
    """Of a run of ours that trained adapters."""
    if not is_adapted(path):
        return None
    checkpoint, notes = newest_told(path)
    for note in notes if _is_first() else ():
        log.warning("%s", note)
    opened = open_paceline(checkpoint.folder)
    return ForeignWeights(weights=opened.weights, files=opened.sidecars)


def _export(job: ExportJob) -> None:
    """As `export_hub`; it also says which token ends a text, where the weights did not come with a hub's config."""
    made = job.ranks.from_first("looking for the end of a text", lambda: _make(job))
    try:
        export_hub(replace(job, files={**made, **job.files}))
    finally:
        for folder in {path.parent for path in made.values()}:
            shutil.rmtree(folder, ignore_errors=True)


def _make(job: ExportJob) -> Mapping[str, Path]:
    """Name -> path of new files in a temporary folder; an export's files are given by path."""
    made: dict[str, Path] = {}
    if CONFIG not in job.files:
        contents = _contents(job)
        folder = Path(tempfile.mkdtemp(prefix="paceline-export-")) if contents else Path()
        for name, content in contents.items():
            made[name] = folder / name
            made[name].write_bytes(content)
    names = {*made, *job.files}
    for warning in unsaid(names, ends=CONFIG in names or SETTINGS in names):
        log.warning("%s: %s", job.folder, warning)
    return made


def _contents(job: ExportJob) -> dict[str, bytes]:
    tokenizer = str(next((job.files[name] for name in TOKENIZER if name in job.files), ""))
    # exports/step_N of a run folder
    recipe = job.folder.parent.parent / "recipe.toml"
    try:
        config = validate(tomllib.loads(recipe.read_text(encoding="utf-8")))
    except (OSError, tomllib.TOMLDecodeError, ConfigError):
        return {}
    return made_files(config, tokenizer or config.data.tokenizer, job.files)
