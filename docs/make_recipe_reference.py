"""Writes docs/reference/recipe.md from the schema. Run it through scripts/docs.

What this version refuses by name is not kept in a list here: every choice of every field is put to the recipe check.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import annotated_types
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from paceline.config.check import check
from paceline.config.load import resolve
from paceline.config.run import RunConfig
from paceline.errors import ConfigError

TARGET = Path(__file__).parent / "reference" / "recipe.md"

HEAD = """\
# Recipe reference

<!-- Written by docs/make_recipe_reference.py from the schema. Change the docstrings of src/paceline/config, then run
     scripts/docs. -->

A recipe is a TOML file with one table a section. Every field has a default, so a recipe names only what differs.
`extends = "other.toml"` at the top starts from another recipe, relative to the recipe's own folder.
`--set section.key=value` changes one field from the command line.

`paceline train RECIPE --print-recipe` shows the resolved recipe, presets expanded.
`paceline train --print-schema` gives this page as a JSON schema, for editors.

An unknown key is refused, with the nearest known one. A value that the schema knows but this version cannot run is
refused by name before any process starts; such values are marked **not yet** below.
"""


def text_of_page() -> str:
    """The whole page."""
    parts = [HEAD, _contents()]
    for name, section in _sections():
        parts.append(_section(name, section))
    return "\n".join(parts)


def _sections() -> Iterator[tuple[str, type[BaseModel]]]:
    """Sections and the sections inside them, in the order of the schema."""
    for name, info in RunConfig.model_fields.items():
        section = info.annotation
        assert isinstance(section, type) and issubclass(section, BaseModel)
        yield name, section
        for inner, inner_info in section.model_fields.items():
            kind = inner_info.annotation
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield f"{name}.{inner}", kind


def _contents() -> str:
    return "Sections: " + " · ".join(f"[`{name}`](#{_anchor(name)})" for name, _ in _sections()) + "\n"


def _anchor(name: str) -> str:
    return name.replace(".", "")  # as GitHub and mkdocs make it from the heading


def _section(name: str, section: type[BaseModel]) -> str:
    lines = [f"## {name}", "", _one_line(section.__doc__ or ""), "", "| field | type | default | meaning |"]
    lines.append("| --- | --- | --- | --- |")
    for key, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            continue
        meaning = _one_line(info.description or "")
        refused = _refused(f"{name}.{key}", info)
        if refused:
            meaning = f"{meaning} **Not yet:** {refused}.".strip()
        lines.append(f"| `{key}` | {_type(info)} | {_default(info)} | {_cell(meaning)} |")
    return "\n".join(lines) + "\n"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _type(info: FieldInfo) -> str:
    return _cell(_kind(info.annotation) + _limits(info))


def _kind(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " · ".join(f"`{value}`" for value in arguments)
    if origin is tuple:
        inner = [item for item in arguments if item is not Ellipsis]
        listed = f"list of {_kind(inner[0])}"
        return listed if Ellipsis in arguments else f"{listed} ({len(inner)})"
    if arguments:  # a union
        return ", or ".join(_kind(item) for item in arguments)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "`{" + ", ".join(annotation.model_fields) + "}`"
    return {int: "integer", float: "number", bool: "true · false", str: "text"}[annotation]


def _limits(info: FieldInfo) -> str:
    signs = {annotated_types.Ge: ">=", annotated_types.Gt: ">", annotated_types.Le: "<=", annotated_types.Lt: "<"}
    found = []
    for item in info.metadata:
        for kind, sign in signs.items():
            if isinstance(item, kind):
                found.append(f"{sign} {getattr(item, kind.__name__.lower())}")
    return f" {', '.join(found)}" if found else ""


def _default(info: FieldInfo) -> str:
    value = info.default
    if value in ("", ()):
        return "empty"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return "`[" + ", ".join(f'"{item}"' if isinstance(item, str) else str(item) for item in value) + "]`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def _refused(key: str, info: FieldInfo) -> str:
    """The values of a field that the recipe check refuses as not available in this version."""
    section, field = key.split(".", 1)
    if "." in field or not section:
        return ""
    choices = get_args(info.annotation) if get_origin(info.annotation) is Literal else ()
    return ", ".join(f"`{value}`" for value in choices if _is_not_yet(section, field, value))


def _is_not_yet(section: str, field: str, value: Any) -> bool:
    tables: dict[str, Any] = {"train": {"global_batch_size": 8}}
    tables.setdefault(section, {})[field] = value
    try:
        recipe = resolve(tables)
        findings = check(recipe.config, recipe.registry, world_size=2)
    except (ConfigError, ValidationError):
        return False  # refused for another reason: it needs company from other fields
    return any(finding.id == "config.not-yet" for finding in findings)


def main() -> None:
    TARGET.write_text(text_of_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
