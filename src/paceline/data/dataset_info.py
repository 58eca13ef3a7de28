"""LLaMA-Factory's ``dataset_info.json``: which files a named data set has, and how they are laid out.

Two traps of the format, kept as they are: where ``columns`` is given, a column that is not listed is not there, and the
same for ``tags``. Only files are read; a name on a hub is refused with the way to go on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from paceline.data.json_lines import type_name
from paceline.data.messages import CALL, Tags
from paceline.data.record_columns import Layout
from paceline.errors import DataError

FILE_NAME = "dataset_info.json"
HUBS = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
ALPACA_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output"}
COLUMNS = frozenset(
    (
        *("prompt", "query", "response", "history", "messages", "system", "tools"),
        *("images", "videos", "audios", "chosen", "rejected", "kto_tag"),
    )
)
DEFAULT_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
_ROLES = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": CALL,
    "system_tag": "system",
}
_OPENAI_TAGS = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": "function_call",
    "system_tag": "system",
}
_KNOWN = frozenset((*HUBS, "file_name", "formatting", "ranking", "subset", "split", "folder", "num_samples", "columns"))


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One data set of a ``dataset_info.json``."""

    name: str
    path: Path
    """a file or a folder"""
    layout: Layout
    num_samples: int | None = None
    """draw so many rows, repeating where there are fewer"""


def read_entry(file: str | Path, name: str) -> Entry:
    """The entry ``name`` of a ``dataset_info.json`` (or of the folder that holds one).

    Raises:
        DataError: no such file or entry, it is not on this disk, or a key or value in it is not known.
    """
    path = Path(file)
    path = path / FILE_NAME if path.is_dir() else path
    entries = _read(path)
    if name not in entries:
        near = get_close_matches(name, entries, n=1)
        raise DataError(
            f"{path} has no data set {name!r}",
            evidence=f"It has {', '.join(list(entries)[:8])}{', ...' if len(entries) > 8 else ''}.",
            next_step=f"Did you mean {near[0]!r}?" if near else "Name one of them in data.train.",
        )
    return _entry(path, name, entries[name])


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read",
            evidence=str(error),
            next_step="data.dataset_info names LLaMA-Factory's dataset_info.json or its folder.",
        ) from error
    except ValueError as error:
        raise DataError(f"{path}: not JSON", evidence=str(error), next_step="Mend it, or copy it again.") from error
    if not isinstance(content, dict):
        raise DataError(
            f"{path}: {type_name(content)} where an object was expected",
            next_step='It maps names to descriptions: {"mine": {"file_name": "mine.json"}}.',
        )
    return content


def _entry(path: Path, name: str, value: Any) -> Entry:
    def wrong(what: str, why: str, step: str) -> DataError:
        return DataError(f"{path}, {name!r}: {what}", evidence=why, next_step=step)

    if not isinstance(value, dict):
        raise wrong(f"{type_name(value)} where an object was expected", "", 'Write {"file_name": "FILE"}.')
    if unknown := sorted(value.keys() - _KNOWN - {"tags"}):
        raise wrong(f"unknown key {unknown[0]!r}", f"Known: {', '.join(sorted(_KNOWN | {'tags'}))}.", "Correct it.")
    if not value.get("file_name"):
        where = next((f"{key} = {value[key]!r}" for key in HUBS if value.get(key)), "no file_name")
        raise wrong(
            f"not on this disk ({where})",
            "Names of a hub are not looked up: a run must read the same data at every start.",
            f'Download it, and write "file_name": "FOLDER OR FILE" here, relative to {path.parent}.',
        )
    data = path.parent / str(value["file_name"])
    if value.get("folder"):
        data = data / str(value["folder"])
    if not data.exists():
        raise wrong(f"file_name {value['file_name']!r} is not there", f"Looked for {data}.", "Check the name.")
    data = _part_of(data, value, wrong)
    samples = value.get("num_samples")
    if samples is not None and (type(samples) is not int or samples < 1):
        raise wrong(f"num_samples = {samples!r}", "It is a whole number above 0.", "Correct it, or leave it out.")
    return Entry(name=name, path=data, layout=_layout(value, wrong), num_samples=samples)


def _part_of(data: Path, value: Mapping[str, Any], wrong: Any) -> Path:
    """``subset`` and ``split`` choose within a folder: a folder or file of that name. In one file there is no part."""
    for key in ("subset", "split"):
        part = value.get(key)
        if not part or (key == "split" and part == "train" and not data.is_dir()):
            continue
        inside = sorted(data.glob(f"{part}*")) if data.is_dir() else []
        exact = [p for p in inside if p.name == part or p.name.split(".")[0] == part]
        if len(exact or inside) == 1:
            data = (exact or inside)[0]
        elif part != "train" or inside:
            raise wrong(
                f"{key} = {part!r} is not one folder or file in {data}",
                f"Found {', '.join(p.name for p in inside) or 'none'}.",
                "Name the file itself in file_name.",
            )
    return data


def _layout(value: Mapping[str, Any], wrong: Any) -> Layout:
    formatting = value.get("formatting", "alpaca")
    if formatting not in ("alpaca", "sharegpt", "openai"):
        raise wrong(f"formatting = {formatting!r}", "Known: alpaca, sharegpt, openai.", "Correct it.")
    ranking = bool(value.get("ranking", False))
    columns = value.get("columns")
    if columns is None:
        columns = dict(ALPACA_COLUMNS) if formatting == "alpaca" else {"messages": "conversations"}
        if ranking:
            columns |= {"chosen": "chosen", "rejected": "rejected"}
            columns.pop("response", None)
    if unknown := sorted(columns.keys() - COLUMNS):
        raise wrong(f"unknown column {unknown[0]!r}", f"Known: {', '.join(sorted(COLUMNS))}.", "Correct it.")
    needed = ["prompt"] if formatting == "alpaca" else ["messages"]
    needed += ["chosen", "rejected"] if ranking else []
    if missing := [name for name in needed if name not in columns]:
        raise wrong(
            f"columns has no {missing[0]!r}",
            "Where columns is given, a column that is not listed counts as not there.",
            f'Add "{missing[0]}": "KEY IN A ROW".',
        )
    return Layout(
        formatting=formatting,
        columns={name: str(column) for name, column in columns.items() if column},
        ranking=ranking,
        tags=_tags(value.get("tags"), formatting, wrong),
    )


def _tags(given: Mapping[str, str] | None, formatting: str, wrong: Any) -> Tags:
    default = _OPENAI_TAGS if formatting == "openai" else DEFAULT_TAGS
    tags = default if given is None else given
    if unknown := sorted(tags.keys() - DEFAULT_TAGS.keys()):
        raise wrong(f"unknown tag {unknown[0]!r}", f"Known: {', '.join(DEFAULT_TAGS)}.", "Correct it.")
    return Tags(
        role_key=str(tags.get("role_tag", default["role_tag"])),
        content_key=str(tags.get("content_tag", default["content_tag"])),
        roles={str(tags[tag]): role for tag, role in _ROLES.items() if tags.get(tag)},
    )
