"""What a bench keeps between its calls: one JSON file of entries, and the page written from it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jobs import Job

OWN = Path("docs/measured")
"""Folder of the project's own results."""
SHARED = "shared_gpu"
"""Of an entry whose ranks shared one GPU: nothing about its speed counts."""


class DamagedFileError(Exception):
    """A file of results that cannot be read: which, why, and what to do about it."""

    def __init__(self, path: Path, why: str, next_step: str) -> None:
        super().__init__(f"{path}: {why}\n  {next_step}, or restore it from version control.")


class OtherMachineError(Exception):
    """Results of two kinds of machine do not go into one file."""

    def __init__(self, path: Path, before: str, now: str) -> None:
        super().__init__(
            f"{path} holds results of {before}, and this is {now}: nothing was measured.\n"
            "  Choose another --results, or move the file away."
        )


class Results:
    """NAME.json and NAME.md: written anew, in one piece, after every entry. A bench fills in the pages.

    Args:
        kinds: under one of these an entry has its figures, as this type.
        command: what measures it; "" = the script of that name.

    Raises:
        DamagedFileError: a file that is there cannot be read.
    """

    def __init__(self, folder: Path, name: str, kinds: Mapping[str, type], command: str = "") -> None:
        self.folder, self.name, self.kinds = folder, name, kinds
        self.path = folder / f"{name}.json"
        folder.mkdir(parents=True, exist_ok=True)
        self.data: dict[str, Any] = {"command": command or f"bench/{name}.sh", "entries": {}}
        self._machine: dict[str, Any] = {}
        if self.path.is_file():
            self.data = self._read()

    @property
    def entries(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = self.data["entries"]
        return found

    @property
    def are_tiny(self) -> bool:
        return bool(self.data.get("tiny"))

    def is_done(self, job: Job, *, shared: bool = False) -> bool:
        """``shared``: whether figures of ranks that shared a GPU will do."""
        entry = self.entries.get(job.key, {"failed": []})
        return "failed" not in entry and (shared or not entry.get(SHARED))

    def measure_on(self, machine: dict[str, Any], *, mixed: bool = False) -> None:
        """Says what the entries to come are measured on. The page says so once there is one.

        Args:
            mixed: entries of several kinds of devices may stand in one file.

        Raises:
            OtherMachineError: what is there was measured on another kind of device.
        """
        before, now = self.data.get("devices"), machine.get("devices")
        if not mixed and self.entries and before and now and before != now:
            raise OtherMachineError(self.path, before, now)
        self._machine = machine

    def put(self, job: Job, entry: dict[str, Any], records: Sequence[dict[str, Any]] = ()) -> None:
        """``records``: the curve, where the bench keeps it in a file of its own."""
        self.data |= self._machine
        own = {"devices": self._machine.get("devices"), "torch": self._machine.get("versions", {}).get("torch")}
        self.entries[job.key] = entry | {"machine": {name: value for name, value in own.items() if value}}
        self.write()

    def write(self) -> None:
        text = json.dumps(self.data, indent=1)
        # a list of numbers takes a line, not one for each number
        text = re.sub(r"\[(?:[-\d.,e\s]|null)+\]", lambda match: " ".join(match.group().split()), text)
        write_whole(self.path, text + "\n")
        write_whole(self.folder / f"{self.name}.md", "\n".join(self.page()) + "\n")

    def page(self) -> list[str]:
        raise NotImplementedError

    def pages_of(self, data: dict[str, Any]) -> None:
        """Makes every page that is written of ``data``, to find out whether it can be.

        Raises:
            AttributeError, LookupError, TypeError, ValueError: it cannot.
        """
        raise NotImplementedError

    def draw(self) -> None:
        """Pictures, if there are any to draw."""

    def _read(self) -> dict[str, Any]:
        next_step = "Move it away, and what it held is measured anew"
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DamagedFileError(self.path, f"not JSON, cut off perhaps: {error}", next_step) from error
        if problem := self._problem(data):
            raise DamagedFileError(self.path, problem, next_step)
        found: dict[str, Any] = data
        try:
            self.pages_of(found)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise DamagedFileError(
                self.path, f"the pages cannot be written of its entries: {error!r}", next_step
            ) from error
        return found

    def _problem(self, data: object) -> str:
        """What is not as `write` leaves it; "" if all is."""
        if not isinstance(data, dict) or not isinstance(data.get("entries"), dict):
            return "no object with `entries`"
        for key, entry in data["entries"].items():
            if not isinstance(entry, dict) or not isinstance(entry.get("title"), str):
                return f"entry {key}: no object with a `title`"
            if "failed" in entry and not (isinstance(entry["failed"], list) and entry["failed"]):
                return f"entry {key}: `failed` is no list of reasons"
            if "failed" not in entry and not any(isinstance(entry.get(kind), of) for kind, of in self.kinds.items()):
                return f"entry {key}: neither `failed` nor any of {', '.join(f'`{kind}`' for kind in self.kinds)}"
        return ""


def write_whole(path: Path, text: str) -> None:
    """A call that is killed leaves the old file or the new one, never a half."""
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def notes_and_failures(entries: dict[str, dict[str, Any]]) -> list[str]:
    """The end of every page."""
    lines = []
    notes = [f"- `{key}`: {entry['note']}" for key, entry in entries.items() if "note" in entry]
    if notes:
        lines += ["", "## Notes", "", *notes]
    failed = {key: entry["failed"] for key, entry in entries.items() if "failed" in entry}
    if failed:
        lines += ["", "## Failed", ""]
        lines += [f"- `{key}`: {reasons[0]}; {reasons[-1][:160]}" for key, reasons in failed.items()]
    return lines


def head(title: str, data: dict[str, Any]) -> list[str]:
    """The beginning of every page."""
    lines = [f"# {title}", ""]
    if data.get("tiny"):
        lines += ["**A dry run of tiny models on CPUs: no figure below means anything.**", ""]
    if "versions" in data:
        versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
        lines += [f"{data['devices']}; {versions}. Command: `{data['command']}`; each entry's own is in the JSON.", ""]
    return lines
