"""A model as a Hugging Face folder: which files there will be, and filling them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.files import write_file
from paceline.config.hub import CONFIG
from paceline.config.model import ModelConfig
from paceline.interop.hf_links import hf_links
from paceline.interop.hf_names import PREDICTS_MORE
from paceline.interop.links import LinkedSink, LinkTable
from paceline.interop.safetensors_write import Layout, SafetensorsWriter, plan_files
from paceline.interop.sidecars import IDS, SETTINGS, hub_config, says_nothing, with_ids

SHARD_BYTES = 5 * 10**9
"""Largest weight file, as the hub's own tools cut."""

KEPT_WIDE = ("router.expert_bias",)
"""Never converted to another dtype: steps of the balancing bias are smaller than bf16 can tell apart."""


@dataclass(frozen=True, kw_only=True)
class HubPlan:
    """All that is known before the first weight is written. The same on every process that makes it."""

    config: Mapping[str, Any]
    table: LinkTable
    layout: Layout


def plan_hub(
    model: ModelConfig,
    dtypes: Mapping[str, torch.dtype],
    *,
    template: Mapping[str, Any] | None = None,
    model_type: str = "",
    ignore_keys: Iterable[str] = (),
    shard_bytes: int = SHARD_BYTES,
) -> HubPlan:
    """How ``model`` will lie in a folder. Where its family has no names for multi-token prediction, without that.

    Args:
        dtypes: our name -> dtype in the files.

    Raises:
        ConfigError: no family has words for the model.
    """
    config = hub_config(
        model,
        template=template,
        model_type=model_type,
        dtype=name_of(_most_common(dtypes)),
        ignore_keys=ignore_keys,
    )
    model_type = str(config["model_type"])
    if model_type not in PREDICTS_MORE:
        model = model.model_copy(update={"mtp_layers": 0})
    table = hf_links(model, model_type)
    their_dtypes = {link.theirs: dtypes[name] for name, links in table.links.items() for link in links}
    their_dtypes |= {theirs: dtypes[ours] for theirs, ours in table.copies.items()}
    # a tied head is not stored a second time
    copies = {theirs: ours for theirs, ours in table.copies.items() if theirs not in table.optional}
    table = LinkTable(links=table.links, shapes=table.shapes, copies=copies)
    tensors = {name: (shape, their_dtypes[name]) for name, shape in table.their_shapes().items()}
    return HubPlan(config=config, table=table, layout=plan_files(tensors, shard_bytes))


def cast_dtypes(dtypes: Mapping[str, torch.dtype], wanted: torch.dtype | None) -> dict[str, torch.dtype]:
    """The dtype of each tensor when ``wanted`` is asked for; None keeps all."""
    if wanted is None:
        return dict(dtypes)
    return {name: dtype if name.endswith(KEPT_WIDE) else wanted for name, dtype in dtypes.items()}


class HubWriter:
    """Fills the folder of a plan. ``sink`` takes boxes under our names, from any thread."""

    def __init__(self, folder: Path, plan: HubPlan) -> None:
        self.folder = folder
        self.plan = plan
        self.files = SafetensorsWriter(folder, plan.layout)
        self.sink = LinkedSink(plan.table, self.files)

    def create(self, sidecars: Mapping[str, bytes]) -> None:
        """Config, what goes along with it, and the weight files in their sizes; by one process, before all others."""
        config = with_ids(self.plan.config, sidecars.get(SETTINGS))
        files = {name: data for name, data in sidecars.items() if name != CONFIG} | {CONFIG: _json(config)}
        if says_nothing(config):
            files.setdefault(SETTINGS, _json(dict.fromkeys(IDS)))
        for name, data in files.items():
            (self.folder / name).parent.mkdir(exist_ok=True)
            write_file(self.folder / name, data)
        self.files.create()


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(dict(content), indent=2, ensure_ascii=False) + "\n").encode()


def name_of(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def _most_common(dtypes: Mapping[str, torch.dtype]) -> torch.dtype:
    values = list(dtypes.values())
    return max(set(values), key=values.count)
