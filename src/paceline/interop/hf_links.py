"""From a family's name table and a model to links, and whether a folder's tensors are the ones that they need."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

import torch
from torch import Tensor

from paceline.checkpoint.pieces import Box
from paceline.config.model import ModelConfig
from paceline.interop.hf_names import TABLES, WITHOUT_MEANING, Name, Table
from paceline.interop.links import Link, LinkTable, whole
from paceline.models.transformer import Transformer


def model_shapes(model: ModelConfig) -> dict[str, torch.Size]:
    """Name -> shape of every parameter and stored buffer of the plain model, in its order."""
    plain = Transformer(model, device="meta")
    kept = plain.state_dict().keys()
    shapes = {name: parameter.shape for name, parameter in plain.named_parameters()}
    return shapes | {name: buffer.shape for name, buffer in plain.named_buffers() if name in kept}


def hf_links(model: ModelConfig, model_type: str) -> LinkTable:
    """The links of ``model`` in a folder of the family ``model_type``.

    Raises:
        KeyError: a tensor of the model has no name there; ``config.hub`` refuses such models before.
    """
    table = _compile(TABLES[model_type])
    shapes = model_shapes(model)
    links = {name: _links(name, shape, model, table) for name, shape in shapes.items()}
    copies = {}
    if model.ties_head:
        copies["lm_head.weight"] = "embed.weight"
    for depth in range(model.mtp_layers):
        layer = f"model.layers.{model.num_layers + depth}."
        copies[layer + "embed_tokens.weight"] = "embed.weight"
        copies[layer + "shared_head.head.weight"] = "embed.weight" if model.tie_embeddings else "head.weight"
    return LinkTable(links=links, shapes=shapes, copies=copies, optional=frozenset({"lm_head.weight"} & copies.keys()))


def unmeant(names: Iterable[str], model_type: str) -> set[str]:
    """Those of ``names`` that hold nothing that was learned."""
    patterns = [re.compile(pattern) for family in ("", model_type) for pattern in WITHOUT_MEANING.get(family, ())]
    return {name for name in names if any(pattern.fullmatch(name) for pattern in patterns)}


_Compiled = list[tuple[re.Pattern[str], Name]]


def _compile(table: Table) -> _Compiled:
    compiled = []
    for ours, theirs in table.items():
        pattern = re.escape(ours).replace(r"\{i\}", r"(?P<i>\d+)").replace(r"\{w\}", r"(?P<w>weight|bias)")
        compiled.append((re.compile(pattern), theirs if isinstance(theirs, Name) else Name(theirs=theirs)))
    return compiled


def _links(name: str, shape: torch.Size, model: ModelConfig, table: _Compiled) -> tuple[Link, ...]:
    asked = name
    if mtp := re.fullmatch(r"mtp\.(\d+)\.(block\.)?(.+)", name):
        layer = model.num_layers + int(mtp.group(1)) - 1
        asked = f"{'blocks' if mtp.group(2) else 'mtp'}.{layer}.{mtp.group(3)}"
    found = next(((entry, match) for pattern, entry in table if (match := pattern.fullmatch(asked))), None)
    if found is None:
        raise KeyError(name)
    entry, marks = found[0], found[1].groupdict()
    if isinstance(entry.theirs, tuple):
        return _stacked(entry.theirs, shape, marks)
    theirs = entry.theirs.format(**marks)
    transposed = entry.transposed and len(shape) == 2
    sizes = tuple(reversed(shape)) if transposed else tuple(shape)
    offsets = [0] * len(sizes)
    if entry.part is not None:
        offsets[-1 if transposed else 0] = entry.part[0] * shape[0]
    return (
        Link(
            ours_at=whole(shape),
            theirs=theirs,
            theirs_at=Box(offsets=tuple(offsets), sizes=sizes),
            transposed=transposed,
            rows=_rotary_rows(entry, shape[0], model),
        ),
    )


def _stacked(names: tuple[str, ...], shape: torch.Size, marks: Mapping[str, str]) -> tuple[Link, ...]:
    """Our [E, (M,) rows, columns] as one matrix of theirs for each expert and input."""
    links, matrix = [], tuple(shape[-2:])
    inputs = range(len(names)) if len(shape) == 4 else (None,)
    for expert in range(shape[0]):
        for number in inputs:
            lead = (expert,) if number is None else (expert, number)
            link = Link(
                ours_at=Box(offsets=(*lead, 0, 0), sizes=(*(1 for _ in lead), *matrix)),
                theirs=names[number or 0].format(**marks, e=expert),
                theirs_at=Box(offsets=(0, 0), sizes=matrix),
                ours_lead=len(lead),
            )
            links.append(link)
    return tuple(links)


def _rotary_rows(entry: Name, rows: int, model: ModelConfig) -> Tensor | None:
    if not entry.rotary:
        return None
    head = rows if entry.rotary == "tail" else model.qk_head_dim
    return halves_from_pairs(rows, head, model.qk_rope_head_dim)


@lru_cache(maxsize=16)
def halves_from_pairs(rows: int, head: int, rope: int) -> Tensor:
    """For each of our rows, the row of theirs: in the last ``rope`` rows of every ``head``, x0 x1 ... y0 y1 ... here
    are x0 y0 x1 y1 ... there."""
    tail = torch.arange(rope).view(-1, 2).T.flatten()
    one_head = torch.cat((torch.arange(head - rope), head - rope + tail))
    return (torch.arange(0, rows, head)[:, None] + one_head).flatten()
