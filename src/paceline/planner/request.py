"""What was asked for on the command line: a recipe, and the machines."""

from __future__ import annotations

import difflib
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.config.asked import Asked
from paceline.config.load import Recipe, load_recipe, read_tables, resolve
from paceline.config.nearest import nearest_sentence
from paceline.config.presets import preset_names
from paceline.config.refusals import others, refusals
from paceline.config.run import RunConfig
from paceline.costs.hardware import Hardware, hardware_names
from paceline.costs.profiles import PACELINE, Profile, find_profile
from paceline.costs.workload import Cluster
from paceline.errors import ConfigError
from paceline.planner.calibration import calibration_note, read_calibration
from paceline.planner.machines import find_gpu, make_cluster
from paceline.planner.space import DEGREES, VARIANTS, Only
from paceline.report.units import number

_AXES = {
    **{name: name for name in (*DEGREES, *VARIANTS)},
    "micro_batch": "micro_batch_size",
    "mbs": "micro_batch_size",
    "schedule": "pipeline_schedule",
    "copies": "dp_replicate",
}


@dataclass(frozen=True, kw_only=True)
class Request:
    """A recipe on a cluster."""

    recipe: Recipe
    name: str
    """The file or the preset, as it was given."""
    is_preset: bool
    cluster: Cluster
    machines: str
    """The options that say which machines, as a shell takes them."""
    network: str
    """What was taken for the network, as a sentence."""
    profile: Profile = PACELINE
    notes: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """`paceline plan` with the same recipe, changes and machines."""
        sets = "".join(f" --set {shlex.quote(text)}" for text in self.overrides)
        return f"paceline plan {shlex.quote(self.name)} {self.machines}{sets}"

    @property
    def config(self) -> RunConfig:
        return self.recipe.config

    def as_it_is(self) -> RunConfig:
        """The recipe without what was changed on the command line."""
        if self.is_preset:
            return resolve({"model": {"preset": self.name}}).config
        return load_recipe(self.name).config


def make_request(
    name: str,
    overrides: Sequence[str],
    gpus: int | None,
    gpu: str,
    nodes_of: int,
    interconnect: str,
    calibration: str = "",
) -> Request:
    """Reads the recipe and finds the machines.

    Args:
        calibration: a file of measured rates; empty = `cluster.calibration`.

    Raises:
        ConfigError: something is not known, or nothing could ever run as it is.
    """
    recipe, is_preset, notes = load(name, overrides, gpus)
    config = recipe.config
    cluster, network = find_cluster(config, gpus, gpu, nodes_of, interconnect)
    _refuse_without_fp8(config, cluster.gpu)
    measured = calibration or config.cluster.calibration
    config = config.model_copy(
        update={"cluster": config.cluster.model_copy(update={"nodes": 0, "gpus_per_node": cluster.gpus_per_node})}
    )
    for problem in others(Asked.of(config, cluster.gpus)):
        raise ConfigError(problem.subject, evidence=problem.evidence, next_step=problem.next_step)
    return Request(
        recipe=replace(recipe, config=config),
        name=name,
        is_preset=is_preset,
        cluster=cluster,
        machines=_machines(cluster.gpus, gpu, nodes_of, interconnect, calibration),
        network=network,
        profile=calibrated("paceline", measured),
        overrides=tuple(overrides),
        notes=(
            *notes,
            *([calibration_note(measured, "paceline")] if measured else []),
            *(
                [_EMULATED.format(cluster.gpu.name)]
                if cluster.gpu.bf16 is None and config.train.precision == "bf16"
                else []
            ),
        ),
    )


_EMULATED = "{} has no bf16: torch emulates it, and a step takes longer than is predicted here."


def _machines(gpus: int, gpu: str, nodes_of: int, interconnect: str, calibration: str) -> str:
    given = {"gpu": gpu, "nodes-of": nodes_of, "interconnect": interconnect, "calibration": calibration}
    words = [f"--{name} {shlex.quote(str(value))}" for name, value in given.items() if value]
    return " ".join((f"--gpus {gpus}", *words))


def _refuse_without_fp8(config: RunConfig, gpu: Hardware) -> None:
    """A run would refuse it on the card (`parallel/fp8_device.py`)."""
    if gpu.fp8 is not None or (config.train.precision != "fp8" and config.lora.base != "fp8"):
        return
    asked = "train.precision" if config.train.precision == "fp8" else "lora.base"
    raise ConfigError(
        f"{asked} = 'fp8' cannot run on a {gpu.name}",
        evidence="It has no tensor cores for fp8; they came with Ada (compute capability 8.9) and Hopper (9.0).",
        next_step=f"Set {asked} = 'bf16', or plan for another card (--gpu H100-80).",
    )


def calibrated(name: str, path: str) -> Profile:
    """The profile of a framework, with the numbers of a calibration file where one is given."""
    return read_calibration(path).get(name, find_profile(name)) if path else find_profile(name)


def find_cluster(
    config: RunConfig, gpus: int | None, gpu: str, nodes_of: int, interconnect: str
) -> tuple[Cluster, str]:
    """The machines: of the command line, else of `[cluster]`."""
    section = config.cluster
    count = gpus or section.nodes * section.gpus_per_node
    if not count:
        raise ConfigError("how many GPUs? Neither --gpus nor cluster.nodes is given", next_step="Add --gpus 8.")
    name = gpu or section.gpu
    if not name:
        raise ConfigError(
            "which GPU? Neither --gpu nor cluster.gpu is given",
            evidence=f"The table has {', '.join(hardware_names())}.",
            next_step="Add --gpu H100-80, or a file that describes yours: --gpu my_gpu.toml.",
        )
    return make_cluster(
        find_gpu(name), count, gpus_per_node=nodes_of or min(section.gpus_per_node, count), interconnect=interconnect
    )


def load(name: str, overrides: Sequence[str], gpus: int | None) -> tuple[Recipe, bool, tuple[str, ...]]:
    """(the recipe, whether it is a preset alone, what was assumed)."""
    if name.endswith(".toml") or Path(name).is_file():
        tables = read_tables(Path(name))
        if "model" in tables and not {"train", "data"} & tables.keys():  # a model, not a recipe of a run
            recipe, note = _with_batch(tables, Path(name).name, "it", overrides, gpus)
            return recipe, False, note
        return resolve(tables, overrides), False, ()
    if name not in preset_names():
        near = difflib.get_close_matches(name, preset_names(), n=3, cutoff=0.4)
        raise ConfigError(
            f"there is no recipe or preset {name!r}",
            evidence=f"Near it: {', '.join(near)}." if near else "`paceline train --presets` lists all of them.",
            next_step="Give one of these, or describe the model in a file:\n"
            "    [model]\n    num_layers = 32\n    hidden_size = 4096\n    num_heads = 32\n    num_kv_heads = 8\n"
            "    ffn_size = 14336\n    vocab_size = 128256\n    max_seq_len = 8192\n"
            "    [train]\n    seq_len = 8192\n    global_batch_size = 128",
        )
    recipe, note = _with_batch({"model": {"preset": name}}, name, "a preset", overrides, gpus)
    return recipe, True, note


def _with_batch(
    tables: dict[str, Any], name: str, what: str, overrides: Sequence[str], gpus: int | None
) -> tuple[Recipe, tuple[str, ...]]:
    """(a model as a recipe with a length and a batch to plan for, what was assumed)."""
    seq_len = min(4096, resolve(tables).config.model.max_seq_len)
    odd = (gpus or 1) // ((gpus or 1) & -(gpus or 1))  # which must be in the batch, for data parallelism over all
    batch = odd * 2 ** math.ceil(math.log2(max(128, 2 * (gpus or 1)) / odd))
    given = {override.partition("=")[0].strip() for override in overrides}
    train: dict[str, Any] = {"seq_len": seq_len, "global_batch_size": batch, "steps": 1000}
    recipe = resolve(tables | {"train": train}, overrides)
    assumed = [f"{key} = {value}" for key, value in train.items() if f"train.{key}" not in given]
    note = f"{name} with train.{', train.'.join(assumed)} ({what} says the model only; --set changes them)."
    return recipe, (note,) if assumed else ()


def parse_only(texts: Sequence[str]) -> Only:
    """``tp=4,pp=2`` as axes held to a value.

    Raises:
        ConfigError: there is no such axis, or its value is of another kind.
    """
    found: dict[str, int | str] = {}
    for text in (part for given in texts for part in given.split(",")):
        name, _, value = text.partition("=")
        axis = _AXES.get(name.strip().removeprefix("parallel.").removeprefix("train."))
        words = axis in ("recompute", "pipeline_schedule")
        if axis is None or not value or words == value.strip().isdigit():
            raise ConfigError(
                f"--only {text} holds no axis of the search",
                evidence=f"Axes are {', '.join(DEGREES)}, {', '.join(VARIANTS)}.",
                next_step="For example: --only tp=4 --only recompute=none.",
            )
        found[axis] = value.strip() if words else int(value)
    return found


def refuse_held(config: RunConfig, only: Only, cluster: Cluster) -> None:
    """Says why nothing is legal with the axes that are held, and what is near.

    Raises:
        ConfigError: always.
    """
    parallel = {axis: value for axis, value in only.items() if axis != "micro_batch_size"}
    updated = config.model_copy(update={"parallel": config.parallel.model_copy(update={"dp_shard": 0} | parallel)})
    if "micro_batch_size" in only:
        train = updated.train.model_copy(update={"micro_batch_size": only["micro_batch_size"]})
        updated = updated.model_copy(update={"train": train})
    asked = Asked.of(updated, cluster.gpus)
    try:
        asked.parallel.shard_degree(cluster.gpus)
        problem = next(refusals(asked), None)
    except ConfigError as error:
        raise ConfigError(error.subject, evidence=error.evidence, next_step=nearest_sentence(asked)) from None
    if problem is not None:
        step = f"{problem.next_step} {nearest_sentence(asked)}"
        raise ConfigError(problem.subject, evidence=problem.evidence, next_step=step)
    raise ConfigError(
        f"no layout with {', '.join(f'{axis} = {value}' for axis, value in only.items())} is legal on "
        f"{number(cluster.gpus, 'GPU')}"
        if only
        else f"no layout divides the batch on {number(cluster.gpus, 'GPU')}",
        next_step=nearest_sentence(asked),
    )


_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12, "P": 1e15}


def count_of(text: str, what: str) -> float:
    """``1T``, ``300B``, ``1.5e12``.

    Raises:
        ConfigError: it is no positive number.
    """
    found = re.fullmatch(
        r"\s*([\d.]+(?:e\d+)?)\s*([KMBGTP]?)\s*", text.replace(",", "").replace("_", ""), re.IGNORECASE
    )
    try:
        value = float(found[1]) * _UNITS[found[2].upper()] if found else 0.0
    except ValueError:
        value = 0.0
    if value <= 0:
        raise ConfigError(f"{what} {text} is no number of tokens", next_step=f"For example: {what} 1T, or 300B.")
    return value
