"""Files that `paceline plan` is asked to write: looked at before any work is done, and written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.data.atomic import unwritable, write_text
from paceline.errors import ConfigError


def refuse_unwritable(option: str, path: str, *, new: bool) -> None:
    """Nothing where ``path`` is empty.

    Args:
        option: "--write", for the message.
        new: a file that is there is not replaced.

    Raises:
        ConfigError: there is no such folder, nothing can be written there, or the file is there and must not be.
    """
    if not path:
        return
    target = Path(path)
    folder = target.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {folder}", next_step="Make it, or give another path.")
    if target.is_dir():
        raise ConfigError(f"{option} {path} is a folder", next_step="Name a file in it.")
    if new and target.exists():
        raise ConfigError(
            f"{path} exists", evidence=f"{option} makes a new file.", next_step="Give another name, or move it."
        )
    if not os.access(target if target.exists() else folder, os.W_OK):
        raise ConfigError(f"{option} {path}: it may not be written there", next_step="Give another path.")


def write_output(path: str, text: str) -> None:
    """The whole file or nothing; what is no file (/dev/stdout) is written to as it is.

    Raises:
        DataError: the disk or the folder does not allow it.
    """
    target = Path(path)
    if not target.exists() or target.is_file():
        write_text(target, text)
        return
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise unwritable(target, error) from error
