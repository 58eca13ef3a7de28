"""The files of a Megatron-LM `torch_dist` checkpoint: which folder, what is in it, and pickles that can do nothing.

    latest_checkpointed_iteration.txt     beside the iterations: the last one's number, or "release"
    iter_0001000/
        metadata.json                     {"sharded_backend": "torch_dist", ...}
        common.pt                         a pickled dict: args (an argparse.Namespace), iteration, schedule
        .metadata, __R_W.distcp           tensors, in the format of torch.distributed.checkpoint

Source: Megatron Core 0.16, `dist_checkpointing/core.py`, `strategies/common.py`, `strategies/torch.py`.
"""

from __future__ import annotations

import argparse
import collections
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from paceline.errors import CheckpointError

LATEST = "latest_checkpointed_iteration.txt"
COMMON = "common.pt"
KIND = "metadata.json"


def is_megatron(path: Path) -> bool:
    """Whether it is a checkpoint of Megatron's, or a folder of them."""
    return (path / LATEST).is_file() or ((path / KIND).is_file() and (path / COMMON).is_file())


def iteration_folder(path: Path) -> Path:
    """The folder of one iteration: ``path`` itself, or the latest in it.

    Raises:
        CheckpointError: it is not there, or of another format than torch_dist.
    """
    folder = path if (path / KIND).is_file() else _latest(path)
    try:
        backend = json.loads((folder / KIND).read_text(encoding="utf-8"))["sharded_backend"]
    except FileNotFoundError as error:
        old = list(folder.glob("mp_rank_*"))[:1]
        raise CheckpointError(
            f"{folder} is no torch_dist checkpoint: it has no {KIND}",
            evidence="It is in Megatron-LM's old format, one file a rank." if old else "",
            next_step="Save it with --ckpt-format torch_dist (Megatron-LM converts with --ckpt-convert-format).",
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder / KIND} cannot be read", evidence=repr(error), next_step="Copy the checkpoint again."
        ) from error
    if backend != "torch_dist":
        raise CheckpointError(
            f"{folder} is a {backend} checkpoint",
            evidence="Only torch_dist is read.",
            next_step="Save it with --ckpt-format torch_dist.",
        )
    return folder


def _latest(path: Path) -> Path:
    text = (path / LATEST).read_text().strip()
    folder = path / ("release" if text == "release" else f"iter_{int(text):07d}" if text.isdigit() else text)
    if not folder.is_dir():
        raise CheckpointError(
            f"{path / LATEST} names {folder.name}, which is not there",
            next_step="Give the folder of another iteration: " + (", ".join(_iterations(path)) or "there is none."),
        )
    return folder


def _iterations(path: Path) -> list[str]:
    return sorted(folder.name for folder in path.glob("iter_*") if folder.is_dir())[-5:]


def read_metadata(folder: Path) -> Metadata:
    """The index of the tensors."""
    file = folder / ".metadata"
    try:
        with file.open("rb") as stream:
            found = Unpickler(stream).load()
        if not isinstance(found, Metadata) or found.storage_data is None:
            raise ValueError("it is no index of tensors")
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder} has no .metadata", evidence="It was not written to its end.", next_step="Use another iteration."
        ) from error
    except Exception as error:
        raise CheckpointError(
            f"{file} cannot be read", evidence=f"{type(error).__name__}: {error}", next_step="Use another iteration."
        ) from error
    missing = sorted(
        {info.relative_path for info in found.storage_data.values()} - {path.name for path in folder.iterdir()}
    )
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of its files: {', '.join(missing[:5])}",
            next_step="Copy all of the folder.",
        )
    return found


def read_common(folder: Path) -> dict[str, Any]:
    """Arguments, iteration and so on, as plain values. Code that the pickle names is not run."""
    file = folder / COMMON
    try:
        found = torch.load(file, map_location="cpu", weights_only=False, pickle_module=_PICKLE)
        if not isinstance(found, Mapping):
            raise ValueError("it is no dict")
    except Exception as error:
        raise CheckpointError(
            f"{file} cannot be read", evidence=f"{type(error).__name__}: {error}", next_step="Use another iteration."
        ) from error
    return dict(found)


class Inert:
    """Stands for an object of a class that is not ours to run: it takes anything and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.said = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


_PLAIN: dict[tuple[str, str], Any] = {
    ("argparse", "Namespace"): argparse.Namespace,
    ("types", "SimpleNamespace"): SimpleNamespace,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): collections.defaultdict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "list"): list,
    ("builtins", "dict"): dict,
    ("builtins", "int"): int,
    ("builtins", "float"): float,
    ("builtins", "bytearray"): bytearray,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
}
_TRUSTED = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
)
_TENSORS = {
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch.serialization", "_get_layout"),
    ("torch.storage", "UntypedStorage"),
    ("torch.storage", "TypedStorage"),
}


class Unpickler(pickle.Unpickler):
    """Makes tensors, containers and DCP's records; of anything else, `Inert` objects."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if module in _TRUSTED and "." not in name:
            found = super().find_class(module, name)
            return found if isinstance(found, type) and found.__module__ == module else Inert
        if (module, name) in _TENSORS or (module == "torch" and name.endswith("Storage")):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        return Inert


_PICKLE = SimpleNamespace(Unpickler=Unpickler, load=lambda stream, **_: Unpickler(stream).load(), __name__="inert")
