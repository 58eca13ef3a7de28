"""Which exports does a run folder hold, which of them count, and how does one take the place of another?

A run that went back to an older checkpoint trains past its later exports once more. Until they are written anew, a file
`step_N.outdated` beside each says so.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from paceline.checkpoint.files import sync_folder
from paceline.checkpoint.locate import folder_name, step_folders
from paceline.config.run import RunConfig

EXPORTS = "exports"
"""In the run folder."""

_UNFINISHED = re.compile(r"(step_\d{8,})\.tmp-.+")
_NEW = ".tmp-new"
"""Of a whole export that is about to take the place of one of the same step."""
_OLD = ".tmp-old"


def export_folder(run_folder: Path, step: int) -> Path:
    return run_folder / EXPORTS / folder_name(step)


def is_current(folder: Path) -> bool:
    """Whether an export is there, and not one from before the run went back."""
    return folder.exists() and not _outdated(folder).exists()


def lacks_last_export(config: RunConfig) -> bool:
    """Whether the recipe asks for an export at its end that the run folder does not hold."""
    return bool(config.checkpoint.export) and not is_current(export_folder(Path(config.run.folder), config.train.steps))


def mark_outdated(run_folder: Path, step: int) -> list[Path]:
    """Marks the exports of steps after ``step``, where the run begins now, and returns them.

    First removes what earlier starts left; of those, too, some may be of later steps.
    """
    clean_exports(run_folder / EXPORTS)
    folders = [path for found, path in step_folders(run_folder / EXPORTS) if found > step]
    for folder in folders:
        _outdated(folder).write_text(f"The run went on from step {step}; {folder.name} is from before that.\n")
    return folders


def make_room(folder: Path) -> Path:
    """Where to write the export that will be ``folder``; removes what earlier attempts left."""
    clean_exports(folder.parent)
    return _beside(folder, _NEW) if folder.exists() else folder


def put_in_place(written: Path, folder: Path) -> None:
    """Gives a whole export its name. One that had the name is there until then, and is removed last."""
    if written != folder:
        old = _beside(folder, _OLD)
        if folder.exists():
            folder.rename(old)
        written.rename(folder)
        sync_folder(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    _outdated(folder).unlink(missing_ok=True)


def clean_exports(exports: Path) -> None:
    """Removes what exports left that were cut short. Only for the process that owns the run folder.

    One that was whole and only lacked its name gets it; one that was moved aside for another that is not there gets its
    name back.
    """
    found = sorted(exports.iterdir()) if exports.is_dir() else []
    unfinished = [(path, match.group(1)) for path in found if (match := _UNFINISHED.fullmatch(path.name))]
    for path, name in unfinished:
        if path.name == name + _NEW:
            put_in_place(path, exports / name)
    for path, name in unfinished:
        if path.name == name + _OLD and path.exists() and not (exports / name).exists():
            path.rename(exports / name)
        elif path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


def _beside(folder: Path, ending: str) -> Path:
    return folder.with_name(folder.name + ending)


def _outdated(folder: Path) -> Path:
    return _beside(folder, ".outdated")
