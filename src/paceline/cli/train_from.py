"""`paceline train --from SYSTEM ...`: the recipe that a run of another system becomes, printed."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
import typer

from paceline.config.check import check
from paceline.config.foreign import System, Translation, translate
from paceline.config.foreign_read import read_arguments_file, read_words
from paceline.config.hub import is_hub_folder, model_of, read_config
from paceline.config.load import merge, parse_override, resolve, validate
from paceline.config.run import RunConfig
from paceline.errors import ConfigError, DataError, PacelineError
from paceline.report.console import make_console, print_findings
from paceline.report.finding import Finding, exit_code, worst_first

_PROGRAMS = {"llamafactory": ("llamafactory-cli", "lmf"), "ms-swift": ("swift", "megatron")}
"""Commands of each system that a script is searched for."""
_COMMANDS = ("sft", "pt", "rlhf")
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
"""A hub's name of a model: OWNER/NAME, or NAME alone; anything else is a path of this machine."""
_FILES = (".yaml", ".yml", ".json")


@dataclass(frozen=True, kw_only=True)
class _Read:
    given: dict[str, Any]
    folder: Path
    """Paths in ``given`` begin here."""
    processes: int = 1
    findings: tuple[Finding, ...] = ()


def systems() -> dict[str, System]:
    """By what `--from` calls them."""
    from paceline.config.foreign_llamafactory import LLAMAFACTORY
    from paceline.config.foreign_swift import MS_SWIFT

    return {system.name: system for system in (LLAMAFACTORY, MS_SWIFT)}


def print_recipe_of(name: str, source: str, overrides: Sequence[str], processes: int | None) -> int:
    """Prints the recipe on standard output and what was found on standard error. Starts and writes nothing.

    Returns:
        the exit code: 1 where keys are unknown or contradict each other, though the recipe is printed.

    Raises:
        ConfigError: the system is unknown, ``source`` cannot be read, or what it becomes is no valid recipe though
            nothing that was given is wrong in itself.
    """
    known = systems()
    if name not in known:
        raise ConfigError(f"--from {name} is unknown", next_step=f"Take {' or '.join(known)}.")
    read = _read(source, _PROGRAMS[name])
    translation = translate(
        known[name],
        read.given,
        processes=processes or read.processes,
        folder=read.folder,
        count_rows=functools.cache(_count_rows),
        longest=_longest,
        count_packed=_count_packed,
    )
    tables = translation.tables()
    for override in overrides:
        tables = merge(tables, parse_override(override))
    found = [one for one in translation.findings if processes is None or one.id != "config.from-one-process"]
    found = [*read.findings, *found, *_model_findings(tables), *_data_findings(tables)]
    try:
        own = _own_findings(tables, processes or read.processes)
    except PacelineError as error:
        if not exit_code(found):
            raise
        own = [_finding_of("recipe", error)]  # perhaps by what is told already
    findings = worst_first([*found, *own])
    typer.echo(recipe_text(translation, tables, source))
    print_findings(make_console(stderr=True), findings)
    return exit_code(findings)


def _read(source: str, programs: Sequence[str]) -> _Read:
    """A YAML or JSON file, a script, or a command line."""
    is_text = any(char.isspace() for char in source) or source.startswith("-")
    path = Path(source)
    if not is_text and path.suffix in _FILES:
        return _Read(given=read_arguments_file(path), folder=Path())
    text = source
    if not is_text:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{path} cannot be read",
                evidence=str(error),
                next_step="Give a YAML file, a script, or the command line in quotes.",
            ) from error
    return _read_script(text, programs)


def _read_script(text: str, programs: Sequence[str]) -> _Read:
    """A command of ``programs`` or behind a launcher: its file of arguments, then what its words say otherwise.

    Raises:
        ConfigError: there is none, a quote is not closed, the file cannot be read, or a value is left to the shell.
    """
    from paceline.planner.launch_script import read_launch

    first = (text.split() or [""])[0]
    if first.startswith("--") or first.endswith(_FILES) or first in ("train", *_COMMANDS):
        text = f"{programs[0]} {text}"
    _refuse_open_quotes(text)
    try:
        launch = read_launch(text, programs=programs)
    except ConfigError as error:
        raise ConfigError(
            "no command with flags or a YAML file was found",
            evidence=f"Looked for {', '.join(programs)}, and for a Python file, by itself or behind a launcher.",
            next_step="Give a YAML file, a script, or the command line in quotes.",
        ) from error
    _check_command(launch.program, launch.flags, programs)
    begin = next((at for at, word in enumerate(launch.flags) if word.startswith("--")), len(launch.flags))
    before, given = launch.flags[:begin], _read_flags(launch.flags[begin:])
    said = dict(word.split("=", 1) for word in before if "=" in word)
    files = [word for word in before if word.endswith(_FILES) and "=" not in word]
    if len(files) > 1:
        raise ConfigError(f"{' and '.join(files)}: a run has one file of arguments", next_step="Leave out the others.")
    for file in files:
        given = {**read_arguments_file(Path(file)), **said, **given}
    given, findings = _with_config(given) if "swift" in programs else (given, ())
    if command := _command(launch.program, before, programs):
        given["command"] = command
    world = launch.world_size or _number(launch.environment, "NPROC_PER_NODE") * _number(launch.environment, "NNODES")
    return _Read(given=given, folder=Path(), processes=world, findings=findings)


def _with_config(given: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[Finding, ...]]:
    """ms-swift's ``--config x.yaml``: it puts the file's keys behind the words, so that the file has the last word.

    Source: ``prepare_config_args`` of ms-swift 3.12.

    Raises:
        ConfigError: it names no file, or one that cannot be read.
    """
    words = {key: value for key, value in given.items() if key != "config"}
    if "config" not in given:
        return words, ()
    if not isinstance(given["config"], str):
        raise ConfigError("--config names no file", next_step="Give it one file of arguments: --config sft.yaml.")
    path = Path(given["config"])
    of_file = read_arguments_file(path)
    findings = tuple(
        Finding(
            id="config.from-both",
            severity="warning",
            subject=f"{key} is {value} in the command and {of_file[key]} in {path}",
            evidence="ms-swift takes what the file of --config says, and so does this recipe.",
            next_step=f"Leave {key} out of one of them.",
        )
        for key, value in words.items()
        if key in of_file and str(of_file[key]) != str(value)
    )
    return {**words, **of_file}, findings


def _check_command(program: str, flags: Sequence[str], programs: Sequence[str]) -> None:
    """Of what else these programs do nothing becomes a recipe: ``swift infer``, ``llamafactory-cli chat``.

    Raises:
        ConfigError: the command is another one, or none that is known.
    """
    name = Path(program).name
    trainings = ("train",) if "swift" not in programs else _COMMANDS
    if name not in programs or not flags or flags[0] in trainings:
        return
    word = flags[0]
    if word.startswith("-") or "=" in word or word.endswith(_FILES):
        return
    near = difflib.get_close_matches(word, trainings, n=1, cutoff=0.5)
    raise ConfigError(
        f"{name} {word} is no training",
        evidence=f"A recipe is made of {', '.join(f'{name} {one}' for one in trainings)}.",
        next_step=f"Did you mean {name} {near[0]}?" if near else "Give the command that trains.",
    )


def _command(program: str, before: Sequence[str], programs: Sequence[str]) -> str:
    """``sft``, ``megatron pt``: which of ms-swift's trainings; empty where nothing says it."""
    if "swift" not in programs:
        return ""
    parts = re.split(r"[./]", program.removesuffix(".py"))  # swift, swift/cli/sft.py, swift.cli._megatron.sft
    word = before[0] if before and before[0] in _COMMANDS else parts[-1]
    if word not in _COMMANDS:
        return ""
    return f"megatron {word}" if parts[-1] == "megatron" or "_megatron" in parts else word


def _read_flags(words: Sequence[str]) -> dict[str, Any]:
    given = read_words(words)
    for name, value in given.items():
        text = " ".join(value if isinstance(value, list) else [str(value)]).replace("\N{NO-BREAK SPACE}", " ")
        if text.startswith(("$(", "`")):
            raise ConfigError(
                f"--{name}: {text} is for the shell to compute, and nothing is run here",
                next_step=f"Write its result there: --{name} VALUE.",
            )
    return given


def _refuse_open_quotes(text: str) -> None:
    from paceline.planner.shell_words import skip_piece, tokens

    for token in tokens(text):
        for word in token.array or (token.text,):
            at = 0
            while at < len(word):
                end = skip_piece(word, at)
                is_open = end > len(word) if word[at] == '"' else end == at + 1 or word[end - 1] != word[at]
                if word[at] in "'\"" and is_open:
                    raise ConfigError(
                        f"a quote is not closed: {word[at : at + 40]}", next_step=f"Close it with {word[at]}."
                    )
                at = end


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdigit() and int(text) else 1


def _count_rows(path: str) -> int | None:
    """Rows of a file, a folder or an entry of a ``dataset_info.json``; None where it is not here."""
    from paceline.data.dataset_info import read_entry
    from paceline.data.record_rows import find_record_files, read_rows

    file, _, name = path.partition("#")
    if not Path(file).exists():
        return None
    try:
        entry = read_entry(file, name) if name else None
        if entry is not None and entry.num_samples is not None:
            return entry.num_samples
        files = find_record_files([file if entry is None else entry.path])
        return sum(1 for found in files for _ in read_rows(found))
    except DataError:  # `_data_findings` tells it beside all else
        return None


def _count_packed(tables: Mapping[str, Any]) -> int | None:
    """Sequences of an epoch of the recipe's rows, without those held out; None without rows and tokenizer here."""
    from paceline.data.example_files import RowRequest
    from paceline.data.example_rows import PAIRED
    from paceline.data.example_sets import build_row_datasets

    try:
        config = resolve(merge(dict(tables), {"train": {"steps": 1}, "data": {"epochs": 0.0}})).config
        if not config.data.reads_rows(config.task.kind):
            return None
        found = build_row_datasets(config.data, RowRequest.of(config, keep_tokens=False), train_samples=1)
    except (PacelineError, OSError):
        return None
    reports = [report for report in found.reports if report.split == "train"]
    if config.data.packing == "pack":
        return sum(round(report.samples / report.epochs) for report in reports)
    return sum(report.documents for report in reports) // (2 if config.task.kind in PAIRED else 1)


def _longest(path: str) -> int | None:
    """Tokens of the longest sequence of a model's folder; None where it is not here or none that can be read."""
    if not is_hub_folder(path):
        return None
    return model_of(read_config(Path(path))).max_seq_len


def _model_findings(tables: Mapping[str, Any]) -> list[Finding]:
    """Where the model is no folder here, whether the recipe runs cannot be said yet."""
    name = str(tables.get("model", {}).get("init_from", ""))
    if not name or Path(name).is_dir():
        return []
    return [
        Finding(
            id="config.from-model",
            severity="warning",
            subject=f"model.init_from = {name!r} is no folder here",
            evidence="Weights are read from a folder; nothing is downloaded.",
            next_step=f"Download it there first: hf download {name} --local-dir {name}"
            if _HUB_NAME.fullmatch(name)
            else "It is a path: look for a mistype, or set model.init_from to the folder that holds the model.",
        )
    ]


def _data_findings(tables: Mapping[str, Any]) -> list[Finding]:
    """Names of a hub, files that are elsewhere, and data sets that a description does not have."""
    from paceline.data.dataset_info import read_entry

    findings = []
    for key in ("train", "valid"):
        found = tables.get("data", {}).get(key, "")
        items = found if isinstance(found, list | tuple) else [found]
        sources = [str(item["path"] if isinstance(item, Mapping) else item).partition("#") for item in items]
        for file, _, name in sources:
            if not name or not Path(file).exists():
                continue
            try:
                read_entry(file, name)
            except DataError as error:
                findings.append(_finding_of("data", error))
        paths = [file for file, _, _ in sources]
        absent = [path for path in dict.fromkeys(paths) if path and path != "synthetic" and not Path(path).exists()]
        if absent:
            findings.append(
                Finding(
                    id="config.from-data",
                    severity="warning",
                    subject=f"data.{key} names what is not here: {', '.join(absent)}",
                    evidence="Rows are read from files; names of a hub are not looked up.",
                    next_step="Download them, and name the files or their folder.",
                )
            )
    return findings


def _finding_of(what: str, error: PacelineError) -> Finding:
    """A refusal as one finding among others."""
    return Finding(
        id=f"config.from-{what}",
        severity="error",
        subject=error.subject,
        evidence=error.evidence or "A run with this recipe would be refused.",
        next_step=error.next_step,
    )


def _own_findings(tables: Mapping[str, Any], processes: int) -> list[Finding]:
    """What a start with this recipe would be told; nothing of it where the model is not here.

    Raises:
        ConfigError: a value is none of its field.
    """
    model = dict(tables.get("model", {}))
    if not Path(str(model.get("init_from", ""))).is_dir():
        validate({**tables, "model": {key: value for key, value in model.items() if key != "init_from"}})
        return []
    recipe = resolve(dict(tables))
    return [one for one in check(recipe.config, recipe.registry, processes) if one.severity != "note"]


# ---- text


def recipe_text(translation: Translation, tables: Mapping[str, Any], source: str) -> str:
    """The recipe as TOML, with a comment behind each field that says where it comes from."""
    said = {ours: _comment(translation, ours) for ours in translation.fields}
    lines = [f"# {translation.system.title}: {' '.join(source.split())[:90]}"]
    sections = [name for name in RunConfig.model_fields if name in tables]
    for section, fields in ((name, tables[name]) for name in (*sections, *(tables.keys() - set(sections)))):
        lines += ["", f"[{section}]"]
        nested = {key: value for key, value in fields.items() if isinstance(value, Mapping)}
        for key, value in fields.items():
            if key not in nested:
                lines += _line(key, value, said.get(f"{section}.{key}", ""))
        for key, inner in nested.items():
            lines += ["", f"[{section}.{key}]"]
            for name, value in inner.items():
                lines += _line(name, value, said.get(f"{section}.{key}.{name}", ""))
    left_out = [finding for finding in translation.findings if finding.severity != "note"]
    if left_out:
        lines += ["", "# Not in this recipe as it was asked for:"]
        lines += [f"#   {finding.subject}. {finding.evidence}" for finding in worst_first(left_out)]
    return "\n".join(lines)


def _comment(translation: Translation, ours: str) -> str:
    origin = translation.origins[ours]
    return f"{origin.said} (the default there)" if origin.is_default else origin.said


def _line(key: str, value: Any, comment: str) -> list[str]:
    plain = list(value) if isinstance(value, tuple) else value
    if isinstance(plain, list) and not any(isinstance(one, Mapping) for one in plain):
        inner = ", ".join(tomli_w.dumps({"x": one}).strip().removeprefix("x = ") for one in plain)
        text = f"{key} = [{inner}]"
    else:
        text = tomli_w.dumps({key: plain}).strip()
    if "\n" in text:
        return [*([f"# {comment}"] if comment else []), text]
    return [f"{text}  # {comment}" if comment else text]
