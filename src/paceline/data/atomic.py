"""Writes small files whole or not at all, and says why something cannot be written."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from paceline.errors import DataError


def write_text(path: str | Path, text: str) -> None:
    """Writes under another name and renames; the folder is made.

    Raises:
        DataError: the folder or the disk does not allow it.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise unwritable(path, error) from error


def unwritable(target: str | Path, error: OSError) -> DataError:
    """The error for a failed write, with the space left on that disk."""
    blocking = next((p for p in Path(target).parents if p.exists() and not p.is_dir()), None)
    if blocking is not None:
        return DataError(
            f"{target}: cannot be written",
            evidence=f"{blocking} is a file, a folder is needed.",
            next_step="Choose another output path.",
        )
    if isinstance(error, PermissionError):
        return DataError(
            f"{target}: cannot be written",
            evidence=f"{error}. Nothing was left behind.",
            next_step="Check the permissions, or choose another output path.",
        )
    try:
        free = f" {shutil.disk_usage(Path(target).parent).free / 2**30:.2f} GiB are free there."
    except OSError:
        free = ""
    return DataError(
        f"{target}: cannot be written",
        evidence=f"{error}.{free} Nothing was left behind.",
        next_step="Free some space, check the permissions, or choose another output path.",
    )


def refuse_folder(prefix: str | Path) -> None:
    """A dataset named like a folder would lie beside it, where nobody looks.

    Raises:
        DataError: the prefix is a folder.
    """
    if Path(prefix).is_dir() or str(prefix).endswith("/"):
        folder = str(prefix).rstrip("/") or "/"
        raise DataError(
            f"{folder} is a folder",
            evidence="The output is the common beginning of a few files: NAME.bin, NAME.idx, NAME.json.",
            next_step=f"Choose a name in it: --out {folder.rstrip('/')}/NAME.",
        )
