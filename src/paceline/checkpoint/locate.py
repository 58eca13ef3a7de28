"""Which checkpoints are in this folder, and which of them are whole?"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from paceline.checkpoint import manifest as manifests
from paceline.checkpoint.files import temporary_name
from paceline.checkpoint.ranks import Ranks
from paceline.checkpoint.store import LATEST, Checkpoint, open_checkpoint
from paceline.errors import CheckpointError
from paceline.report.finding import Finding

_NAME = re.compile(r"step_(\d{8,})")
_UNFINISHED = re.compile(r"(step_\d{8,})\.tmp-[0-9a-f]+(-old)?")

Report = Callable[[Finding], None]


def folder_name(step: int) -> str:
    return f"step_{step:08d}"


def step_folders(folder: Path) -> list[tuple[int, Path]]:
    """``(step, path)`` of every finished checkpoint, whole or damaged, oldest first."""
    if not folder.is_dir():
        return []
    found = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)) and path.is_dir()]
    return sorted((int(match.group(1)), path) for match, path in found)


def problems_of(folder: Path) -> list[str]:
    """Why a checkpoint is not whole, judged by its manifest and by sizes; empty if it looks whole."""
    manifest = manifests.read_manifest(folder)
    return [manifest] if isinstance(manifest, str) else manifests.size_problems(folder, manifest)


def newest_whole(folder: Path, *, ranks: Ranks | None = None, report: Report | None = None) -> Checkpoint | None:
    """The newest checkpoint under ``folder`` that is whole, to the last bit. Collective over ``ranks``.

    Rank 0 chooses by manifest and sizes; then every rank reads its share of the files and compares checksums. What is
    damaged is reported on rank 0 and the one before it is tried.

    Returns:
        None if there is no checkpoint at all.

    Raises:
        CheckpointError: there are some, and none is whole.
    """
    ranks = ranks or Ranks()
    candidates = ranks.from_first(f"looking into {folder}", lambda: [str(path) for _, path in step_folders(folder)])
    damaged: list[str] = []
    for candidate in map(Path, reversed(candidates)):
        problems = _all_problems(candidate, ranks)
        if not problems:
            return ranks.gather(f"opening {candidate}", partial(open_checkpoint, candidate))[ranks.rank]
        damaged.append(f"{candidate.name}: {problems[0]}")
        if report is not None and ranks.is_first:
            report(_damaged(candidate, problems))
    if damaged:
        raise CheckpointError(
            f"None of the {len(damaged)} checkpoints in {folder} is whole.",
            evidence="; ".join(damaged) + ".",
            next_step="Copy one back from elsewhere; or move the folder away and start anew.",
        )
    return None


def _all_problems(candidate: Path, ranks: Ranks) -> list[str]:
    doing = f"checking {candidate}"
    if problems := ranks.from_first(doing, lambda: problems_of(candidate)):
        return problems

    def share() -> list[str]:
        manifest = manifests.read_manifest(candidate)
        if isinstance(manifest, str):
            return [manifest]
        names = manifests.share_of(manifest, ranks.rank, ranks.world_size)
        return manifests.content_problems(candidate, manifest, names)

    return [problem for found in ranks.gather(doing, share) for problem in found]


def _damaged(folder: Path, problems: list[str]) -> Finding:
    more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
    return Finding(
        id="checkpoint.damaged",
        severity="warning",
        subject=f"The checkpoint {folder} is damaged or half-written and is not used.",
        evidence="; ".join(problems[:3]) + more + ".",
        next_step="The one before it is used. Remove the damaged folder when you have looked at it.",
    )


def find_checkpoint(path: Path, *, ranks: Ranks | None = None, report: Report | None = None) -> Checkpoint:
    """The checkpoint that ``path`` means: itself, or the newest whole one of a run or ``checkpoints`` folder.

    Collective over ``ranks``, which share the reading that finding the newest whole one takes.

    Raises:
        CheckpointError: nothing of the kind is there, or nothing is whole.
    """
    if (path / manifests.NAME).is_file() or _NAME.fullmatch(path.name):
        return open_checkpoint(path)
    for folder in (path / "checkpoints", path):
        if step_folders(folder):
            found = newest_whole(folder, ranks=ranks, report=report)
            assert found is not None
            return found
    raise CheckpointError(
        f"There is no checkpoint in {path}.",
        evidence="A run folder has checkpoints/step_<number>/, and each of those a manifest.json."
        if path.is_dir()
        else "There is no such folder.",
        next_step="Give the folder of a run that has saved (checkpoint.interval), or one checkpoint folder.",
    )


def clean_unfinished(folder: Path, report: Report | None = None) -> None:
    """Removes what saves left behind that were cut short. Only for the process that owns the run folder.

    A save that replaces a checkpoint of the same step moves the old one aside for a moment; if that moment was the
    last, the old one is put back.
    """
    if not folder.is_dir():
        return
    temporary_name(folder / LATEST).unlink(missing_ok=True)
    for path in sorted(folder.iterdir()):
        match = _UNFINISHED.fullmatch(path.name)
        if match is None or not path.is_dir():
            continue
        original = path.with_name(match.group(1))
        if match.group(2) and not original.exists():
            path.rename(original)
            continue
        shutil.rmtree(path, ignore_errors=True)
        if report is not None and not match.group(2):
            report(
                Finding(
                    id="checkpoint.unfinished",
                    severity="note",
                    subject=f"Removed {path.name}: a checkpoint that was being written when the run ended.",
                    evidence="Its manifest.json was not there yet, or it had not got its final name.",
                    next_step="Nothing to do; the newest whole checkpoint is used.",
                )
            )
