"""Is this checkpoint folder whole?

``manifest.json`` is written last: it lists every other file with size and checksum. Without it a folder is
half-written; with it, a file that is missing, cut short or changed can be named.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.checkpoint.files import FileEntry, read_entry

NAME = "manifest.json"
_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Manifest:
    step: int
    world_size: int
    files: Mapping[str, FileEntry]

    def to_json(self) -> str:
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1, sort_keys=True) + "\n"


def read_manifest(folder: Path) -> Manifest | str:
    """The manifest of a checkpoint folder, or one sentence that says why there is none."""
    try:
        values = json.loads((folder / NAME).read_text())
        files = {name: FileEntry(**entry) for name, entry in values["files"].items()}
        return Manifest(step=int(values["step"]), world_size=int(values["world_size"]), files=files)
    except FileNotFoundError:
        return f"{NAME} is missing: the checkpoint was not written to its end"
    except OSError as error:
        return f"{NAME} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{NAME} is not a manifest ({type(error).__name__}: {error})"


def size_problems(folder: Path, manifest: Manifest) -> list[str]:
    """One sentence for each file that is missing or has another size. Reads no file, so it is fast."""
    problems = []
    for name, entry in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            problems.append(f"{name} is missing" if isinstance(error, FileNotFoundError) else f"{name}: {error}")
            continue
        if size != entry.size:
            problems.append(f"{name} has {size} bytes instead of {entry.size}")
    return problems


def content_problems(folder: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """One sentence for each of ``names`` whose content is not what was written."""
    problems = []
    for name in names:
        try:
            found = read_entry(folder / name)
        except OSError as error:
            problems.append(f"{name} cannot be read ({error.strerror})")
            continue
        expected = manifest.files[name]
        if found != expected:
            problems.append(f"{name} has checksum {found.crc32} instead of {expected.crc32}")
    return problems


def share_of(manifest: Manifest, rank: int, world_size: int) -> list[str]:
    """The files that ``rank`` checks when ranks share the work: largest first, dealt out in turn."""
    by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name].size, name))
    return by_size[rank::world_size]
