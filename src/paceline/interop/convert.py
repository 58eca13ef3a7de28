"""From one format to another, block by block.

No tensor is ever whole in memory, so a model of any size is converted on any machine. What is written appears under its
name when it is complete.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from paceline.checkpoint.files import sync_folder
from paceline.checkpoint.pieces import Box
from paceline.checkpoint.state import TrainState
from paceline.checkpoint.streamed import write_streamed
from paceline.checkpoint.weights import COMPANIONS, MODEL
from paceline.config.load import dump_recipe
from paceline.config.lora import LoraConfig
from paceline.config.run import RunConfig
from paceline.errors import CheckpointError, ConfigError
from paceline.interop.finite import FiniteWatch
from paceline.interop.hf_links import model_shapes
from paceline.interop.hf_names import PREDICTS_MORE
from paceline.interop.hf_write import SHARD_BYTES, HubWriter, cast_dtypes, plan_hub
from paceline.interop.links import blocks
from paceline.interop.megatron_write import write_megatron
from paceline.interop.sidecars import SETTINGS, hub_config
from paceline.interop.sources import Format, Opened, Selected
from paceline.interop.text_files import unsaid
from paceline.report import units
from paceline.runtime.device import versions

BLOCK_BYTES = 32 * 2**20

DtypeName = Literal["keep", "fp32", "bf16", "fp16"]
DTYPES: Mapping[DtypeName, torch.dtype | None] = {
    "keep": None,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


class Meter(Protocol):
    """Hears how far a conversion is."""

    def start(self, total_bytes: int) -> None: ...

    def advance(self, num_bytes: int) -> None:
        """From any thread."""


class Silent:
    def start(self, total_bytes: int) -> None:
        pass

    def advance(self, num_bytes: int) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a model is written."""

    to: Format
    model_type: str = ""
    """The family of a Hugging Face folder; empty keeps it, or takes one that fits."""
    dtype: DtypeName = "keep"
    shard_bytes: int = SHARD_BYTES
    threads: int = 0
    """0 = one a core, at most 8."""
    ignore_keys: tuple[str, ...] = ()

    @property
    def num_threads(self) -> int:
        return self.threads or min(8, os.cpu_count() or 1)


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What was written."""

    path: Path
    num_tensors: int
    num_bytes: int
    """Of the weights."""
    left_out: tuple[str, ...] = ()
    """Tensors of the source that the format has no names for."""
    warnings: tuple[str, ...] = ()
    """What the reader of the folder will miss."""


def convert(opened: Opened, dst: Path, options: Options, meter: Meter | None = None) -> Converted:
    """Writes the model as ``dst``, a new folder. Nothing of it is there if this fails.

    Multi-token prediction is left out where the format has no names for it.

    Raises:
        ConfigError: ``dst`` exists or is in the source's folder, or the format cannot hold this model.
        CheckpointError: the source is damaged, or the disk is too small.
    """
    meter = meter or Silent()
    refuse_existing(dst)
    refuse_inside(dst, opened.path)
    opened, left_out = _without_mtp(opened, options)
    shapes = opened.weights.shapes()
    dtypes = cast_dtypes({name: opened.weights.dtype(name) for name in shapes}, DTYPES[options.dtype])
    assert shapes == model_shapes(opened.model), "a source gives exactly the tensors of its model"
    total = sum(shape.numel() * dtypes[name].itemsize for name, shape in shapes.items())
    write = {"hf": _write_hf, "paceline": _write_paceline, "megatron": _write_megatron}[options.to]
    watched = FiniteWatch(opened.weights, dtypes)
    opened = replace(opened, weights=watched)
    with new_folder(dst, total) as temporary:
        meter.start(total)
        write(opened, temporary, dtypes, options, meter)
    return Converted(
        path=dst,
        num_tensors=len(shapes),
        num_bytes=total,
        left_out=left_out,
        warnings=(*watched.warnings(), *_warnings(opened, options.to)),
    )


def _warnings(opened: Opened, to: Format) -> tuple[str, ...]:
    names = {*opened.made, *opened.sidecars}
    ends = opened.template is not None or SETTINGS in names
    warnings = [] if to == "megatron" else unsaid(names, ends=ends or to != "hf")
    if warnings and opened.format == "megatron":
        warnings.append("--like, a Hugging Face folder or a run of the same model, gives what is missing.")
    return tuple(warnings)


def _without_mtp(opened: Opened, options: Options) -> tuple[Opened, tuple[str, ...]]:
    if not opened.model.mtp_layers or options.to == "paceline":
        return opened, ()
    if options.to == "hf":
        config = hub_config(opened.model, template=opened.template, model_type=options.model_type)
        if config["model_type"] in PREDICTS_MORE:
            return opened, ()
    names = [name for name in opened.weights.shapes() if not name.startswith("mtp.")]
    left_out = tuple(name for name in opened.weights.shapes() if name.startswith("mtp."))
    model = opened.model.model_copy(update={"mtp_layers": 0})
    return replace(opened, model=model, weights=Selected(opened.weights, names)), left_out


def refuse_existing(dst: Path) -> None:
    """Raises ConfigError where something is at ``dst``."""
    if dst.exists() or dst.is_symlink():
        raise ConfigError(
            f"{dst} exists already",
            evidence="A conversion makes a new folder and never writes over anything.",
            next_step="Give another name, or move that away.",
        )


def refuse_inside(dst: Path, source: Path) -> None:
    """Raises ConfigError where ``dst`` would lie in the folder ``source``, which is only read."""
    if dst.resolve().is_relative_to(source.resolve()):
        raise ConfigError(
            f"{dst} lies in {source}, which is converted",
            evidence="A source is only read; a second model in its folder would be taken for a part of it.",
            next_step=f"Give a folder beside it, such as {source.resolve().parent / dst.name}.",
        )


@contextmanager
def new_folder(dst: Path, num_bytes: int) -> Iterator[Path]:
    """A temporary folder beside ``dst`` that gets its name at the end, or is removed if anything fails."""
    temporary = dst.with_name(f"{dst.name}.tmp-{uuid.uuid4().hex[:8]}")
    try:
        temporary.mkdir(parents=True)
        free = shutil.disk_usage(temporary).free
        if free < num_bytes:
            raise CheckpointError(
                f"{dst} needs {units.size(num_bytes)}, the disk has {units.size(free)} left",
                next_step="Free some space, or give a folder on another disk.",
            )
        yield temporary
        refuse_existing(dst)
        sync_folder(temporary)
        temporary.rename(dst)
        sync_folder(dst.parent)
    except OSError as error:
        raise CheckpointError(
            f"{dst} could not be written", evidence=str(error), next_step="Nothing was left behind; mend it, run again."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _block(opened: Opened, name: str, box: Box, dtype: torch.dtype, meter: Meter) -> Tensor:
    value = opened.weights.read(name, box).to(dtype)
    meter.advance(value.nbytes)
    return value


def _write_hf(opened: Opened, folder: Path, dtypes: Mapping[str, torch.dtype], options: Options, meter: Meter) -> None:
    plan = plan_hub(
        opened.model,
        dtypes,
        template=opened.template,
        model_type=options.model_type,
        ignore_keys=options.ignore_keys,
        shard_bytes=options.shard_bytes,
    )
    writer = HubWriter(folder, plan)
    writer.create(opened.beside())

    def write(name: str, box: Box) -> None:
        writer.sink.write(name, box, _block(opened, name, box, dtypes[name], meter))

    try:
        with ThreadPoolExecutor(max_workers=options.num_threads) as pool:
            jobs = [
                pool.submit(write, name, box)
                for name, shape in opened.weights.shapes().items()
                for box in blocks(shape, dtypes[name].itemsize, BLOCK_BYTES)
            ]
            try:
                for job in as_completed(jobs):
                    job.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    finally:
        writer.files.close()
    writer.files.finish()


def _write_paceline(
    opened: Opened, folder: Path, dtypes: Mapping[str, torch.dtype], options: Options, meter: Meter
) -> None:
    tensors = {MODEL + name: (shape, dtypes[name]) for name, shape in opened.weights.shapes().items()}

    def read(name: str, box: Box) -> Tensor:
        ours = name.removeprefix(MODEL)
        return _block(opened, ours, box, dtypes[ours], meter)

    # adapters were merged while they were read: what is written is a whole model
    recipe = (opened.recipe or RunConfig()).model_copy(update={"model": opened.model, "lora": LoraConfig()})
    write_streamed(
        folder,
        tensors,
        read,
        state=TrainState(step=opened.step, versions=versions()),
        recipe=dump_recipe(recipe),
        files={f"{COMPANIONS}/{name}": data for name, data in opened.beside().items()},
        threads=options.num_threads,
    )


def _write_megatron(
    opened: Opened, folder: Path, dtypes: Mapping[str, torch.dtype], options: Options, meter: Meter
) -> None:
    write_megatron(
        folder,
        opened.model,
        dtypes,
        lambda name, box: _block(opened, name, box, dtypes[name], meter),
        step=opened.step,
        threads=options.num_threads,
    )
