"""Which tokenizer and which chat template did a run use? They are kept in its folder, and found there.

``tokenizer/`` holds what the data were read with: the tokenizer's file, `tokenizer_config.json` and the chat template;
for the byte tokenizer, which has no file, one that is named ``byte``. ``hub/`` holds the files of the weights that the
run began from.
"""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.data.atomic import write_text

KEPT, COMPANIONS = "tokenizer", "hub"
TEMPLATE = "chat_template.jinja"
CONFIG = "tokenizer_config.json"
TEMPLATE_FILES = (TEMPLATE, "chat_template.json", CONFIG)
"""Where a chat template may lie beside a tokenizer; the first that is there has the last word."""
MORE_TEMPLATES = "additional_chat_templates"
"""Folder of templates for other occasions, by name."""
TOOL_TEMPLATE = Path(MORE_TEMPLATES) / "tool_use.jinja"
_BYTE = "byte"
_BESIDE = (*TEMPLATE_FILES, "special_tokens_map.json", "added_tokens.json", "generation_config.json")
"""Files that are no tokenizer, whatever their names end in."""
_TEXT_FILES = (*TEMPLATE_FILES, "special_tokens_map.json", "added_tokens.json")
"""What belongs to a tokenizer beside its own file."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt")


# ---- keeping


def keep(folder: Path, tokenizer: str, template: str = "") -> None:
    """Copies a tokenizer and its chat template into ``tokenizer/`` of a run folder; what is there already stays.

    Args:
        tokenizer: path of its file, or ``byte``; anything else is not kept.
        template: source of the one that is used instead of the tokenizer's own; empty = that.
    """
    into, source = folder / KEPT, Path(tokenizer)
    if tokenizer == _BYTE:
        _write(into / _BYTE, "Bytes are the tokens: there is no other file.\n")
    elif source.is_file():
        _copy(source, into / source.name)
        _keep_beside(source.parent, into, own=not template)
    else:
        return
    if template:
        _write(into / TEMPLATE, template)


def _keep_beside(source: Path, into: Path, *, own: bool) -> None:
    """What lies beside a tokenizer's file: names of special tokens, and, if it is its ``own`` that is used, the
    template."""
    if own:
        for name in (*TEMPLATE_FILES, TOOL_TEMPLATE):
            if (source / name).is_file():
                _copy(source / name, into / name)
    elif (source / CONFIG).is_file():
        try:
            content = json.loads((source / CONFIG).read_text(encoding="utf-8"))
        except ValueError:
            return  # whoever reads conversations has refused it
        if isinstance(content, dict):
            content.pop("chat_template", None)
            _write(into / CONFIG, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _copy(source: Path, target: Path) -> None:
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f"{target.name}.part")
    shutil.copyfile(source, beside)
    beside.replace(target)


def _write(target: Path, text: str) -> None:
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(target, text)


# ---- finding


def is_run(folder: Path) -> bool:
    """Whether it is a run folder or a checkpoint of one."""
    return (folder / "recipe.toml").is_file()


def tokenizer_of_run(folder: Path) -> str:
    """The tokenizer of a run folder or checkpoint: the copy that was kept, else the one that came with the first
    weights, else what the recipe names, as `load_tokenizer` takes it; empty where none of these is there."""
    return find_kept(*_places(folder)) or str(_recipe_data(folder).get("tokenizer") or "")


def template_of_run(folder: Path) -> str:
    """The chat template of a run folder or checkpoint, as `data.template` would say it; empty = its tokenizer's own, or
    it is no run."""
    if not is_run(folder):
        return ""
    return kept_template(str(_recipe_data(folder).get("template") or ""), *_places(folder))


def find_kept(*folders: Path) -> str:
    """The tokenizer that run folders or checkpoints hold; empty if none does.

    Of two that are the same, the one that has its chat template beside it.
    """
    found: list[Path] = []
    for name in (KEPT, COMPANIONS):
        for folder in folders:
            if name == KEPT and (folder / name / _BYTE).is_file():
                return _BYTE
            found += _tokenizer_files(folder / name)[:1]
    for file in found:
        if file.read_bytes() == found[0].read_bytes() and has_template_files(file.parent):
            return str(file)
    return str(found[0]) if found else ""


def has_template_files(folder: Path) -> bool:
    """Whether a chat template may lie there."""
    return any((folder / name).is_file() for name in TEMPLATE_FILES)


def kept_template(named: str, *folders: Path) -> str:
    """Where to read the template that a run used, if that is not its tokenizer's own: the kept copy, else ``named``.

    Args:
        named: `data.template` of the run.
    """
    for folder in folders:
        copy = folder / KEPT / TEMPLATE
        # bytes have no folder in which a template of their own could be found
        if copy.is_file() and (named or (folder / KEPT / _BYTE).is_file()):
            return str(copy)
    return named


def with_used(found: Mapping[str, Path], *folders: Path) -> dict[str, Path]:
    """``found``, the files that go along with weights, with the tokenizer and the chat template that the run used in
    the place of those that its first weights came with.

    Args:
        found: the hub's names -> paths.
        folders: of the run, or of a checkpoint; the first that has kept something counts.
    """
    kept = next((folder / KEPT for folder in folders if (folder / KEPT).is_dir()), None)
    if kept is None:
        return dict(found)
    used, own = dict(found), {name: kept / name for name in _TEXT_FILES if (kept / name).is_file()}
    for file in _tokenizer_files(kept)[:1]:
        name = "tokenizer.json" if file.suffix == ".json" else "tokenizer.model"
        if name not in found or file.read_bytes() != found[name].read_bytes():
            # another tokenizer: nothing that belongs to the first one stays
            used = {name: path for name, path in found.items() if name not in (*_TOKENIZERS, *_TEXT_FILES)}
            used[name] = file
    if _has_template(own):
        for name in (TEMPLATE, "chat_template.json"):
            used.pop(name, None)
    if TEMPLATE in own and is_another_template(own[TEMPLATE]):
        # for tools a program would take the first model's template, which this one has not learned
        used = {name: path for name, path in used.items() if not name.startswith(f"{MORE_TEMPLATES}/")}
    return used | own


def is_another_template(used: Path) -> bool:
    """Whether a chat template, as `with_used` names it, is one that a run kept and its first weights came without."""
    first = used.parent.parent / COMPANIONS / TEMPLATE
    return used.parent.name == KEPT and not (first.is_file() and first.read_bytes() == used.read_bytes())


def _has_template(files: Mapping[str, Path]) -> bool:
    if TEMPLATE in files or "chat_template.json" in files:
        return True
    try:
        config = json.loads(files[CONFIG].read_text(encoding="utf-8")) if CONFIG in files else {}
    except ValueError:
        return False
    return isinstance(config, dict) and bool(config.get("chat_template"))


def _places(folder: Path) -> tuple[Path, ...]:
    """A checkpoint lies in the folder ``checkpoints`` of its run, unless it was moved or converted."""
    parent = folder.resolve().parent
    return (parent.parent, folder) if parent.name == "checkpoints" else (folder,)


def _tokenizer_files(folder: Path) -> list[Path]:
    """Files of tokenizers, those with the hub's names first."""
    if not folder.is_dir():
        return []
    usual = [folder / name for name in ("tokenizer.json", "tokenizer.model") if (folder / name).is_file()]
    if usual or folder.name == COMPANIONS:
        return usual
    return sorted(file for file in folder.iterdir() if file.suffix in (".json", ".model") and file.name not in _BESIDE)


def _recipe_data(folder: Path) -> Mapping[str, Any]:
    try:
        data = tomllib.loads((folder / "recipe.toml").read_text(encoding="utf-8")).get("data", {})
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, Mapping) else {}
