"""Keeps built arrays as ``.npy`` files, safely while many ranks start at once.

The key is a hash of everything that decides the content, so a changed dataset, seed or length never meets an old file.
Ranks take a lock and the first one builds; each file appears by rename, so even where locks do not work (some network
file systems) two builders only write the same content twice. A file that does not read as promised is built again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger(__name__)

Arrays = dict[str, NDArray]


def cached_arrays(
    folder: Path, key: dict[str, object], names: tuple[str, ...], build: Callable[[], Arrays], label: str
) -> Arrays:
    """The arrays of ``build()``, from the cache where possible, memory-mapped.

    Args:
        key: JSON-able; all that ``build`` depends on.
        names: the arrays that ``build`` returns.
        label: in the file names, for people.
    """
    text = json.dumps(key, sort_keys=True)
    stem = f"{hashlib.sha256(text.encode()).hexdigest()[:24]}-{label}"
    paths = {name: folder / f"{stem}-{name}.npy" for name in names}
    found = _load(paths)
    if found is not None:
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with file_lock(folder / f".{stem}.lock"):
            found = _load(paths)  # another rank may have built it while this one waited
            if found is not None:
                return found
            arrays = build()
            (folder / f"{stem}.json").write_text(json.dumps({"key": key, "shapes": _shapes(arrays)}, indent=1) + "\n")
            for name, path in paths.items():
                store_array(path, arrays[name])
    except OSError as error:
        # a read-only data folder is common and harmless: this rank keeps its own copy in memory
        log.warning(
            "the sample index cannot be cached in %s (%s); set data.cache_dir to a writable folder", folder, error
        )
        return build()
    return _load(paths) or arrays


def _shapes(arrays: Arrays) -> dict[str, list[int]]:
    return {name: list(array.shape) for name, array in arrays.items()}


def _load(paths: dict[str, Path]) -> Arrays | None:
    arrays: Arrays = {}
    for name, path in paths.items():
        try:
            arrays[name] = np.load(path, mmap_mode="r")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, EOFError) as error:
            log.warning("%s is damaged (%s): building it again", path, error)
            return None
    return arrays


def store_array(path: Path, array: NDArray) -> None:
    """Writes an ``.npy`` file under another name and renames it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            np.save(file, array)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Holds an exclusive lock; goes on without one where the file system has none."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            log.warning("no file lock in %s (%s): ranks may build the same index side by side", path.parent, error)
        yield
