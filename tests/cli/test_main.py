"""What a person sees who asks for help, mistypes, or asks for something that cannot be."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.text import Text
from typer.testing import CliRunner

from paceline.cli.main import VERBS, _register, app
from tests.cli.commands import paceline

COMMANDS = (
    [],
    ["train"],
    ["generate"],
    ["bench"],
    ["bench", "train"],
    ["data"],
    ["data", "build"],
    ["data", "inspect"],
    ["data", "verify"],
    ["data", "merge"],
    ["data", "train-tokenizer"],
)


@pytest.fixture(scope="module")
def whole() -> typer.Typer:
    if not app.registered_commands:
        _register(VERBS)
    return app


def help_of(whole: typer.Typer, command: list[str]) -> str:
    result = CliRunner().invoke(whole, [*command, "--help"], env={"COLUMNS": "80", "NO_COLOR": "1"})
    assert result.exit_code == 0, result.output
    return result.output


def source_of(whole: typer.Typer, command: list[str]) -> str:
    """The help text of a command, without its markup."""
    found: Any = typer.main.get_command(whole)
    for name in command:
        found = found.commands[name]
    return re.sub(r"\[/?bold\]", "", found.help or "")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_fits_80_columns_and_its_examples_stay_whole(command: list[str], whole: typer.Typer) -> None:
    text = help_of(whole, command)
    lines = text.splitlines()
    assert all(len(line) <= 80 for line in lines)
    # the lines of a docstring are kept as they are: a longer one would leave its last words alone on a line
    assert [line for line in source_of(whole, command).splitlines() if len(line) > 78] == []
    if "train" in command or command == []:
        assert "  paceline " in text, "an example"


def test_every_verb_is_listed(whole: typer.Typer) -> None:
    text = help_of(whole, [])
    for verb in VERBS:
        assert f"│ {verb} " in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], "No such command 'trian'"),
        (["train", "--step", "3"], "No such option: --step"),
        (["train", "recipe.toml", "--nproc", "0"], "greater than or equal to 1"),
        (["bench", "trian"], "No such command 'trian'"),
    ],
)
def test_a_mistyped_command_is_told(arguments: list[str], words: str) -> None:
    done = paceline(*arguments)
    assert done.returncode == 2
    assert words in done.stderr and "Traceback" not in done.stderr


def test_version_tells_versions_and_devices() -> None:
    done = paceline("--version")
    assert done.returncode == 0
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert {"paceline", "python", "torch"} <= set(names)
    assert names[-1] in ("device", "gpu")


def test_help_and_errors_of_a_recipe_do_not_wait_for_torch(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("")
    check = (
        "import sys\nfrom paceline.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    print('torch' in sys.modules, end.code)\n"
    )
    for arguments, code in (
        (["train", "--help"], 0),
        (["train", str(recipe), "--set", "train.nothing=1"], 2),
        (["train", str(recipe), "--set", "parallel.tp=3", "--nproc", "3"], 2),
        (["train", str(recipe), "--dry-run", "--nproc", "8"], 0),
        (["train", "--presets"], 0),
    ):
        done = subprocess.run(
            [sys.executable, "-c", check, *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**os.environ, "COLUMNS": "80"},
        )
        last = done.stdout.splitlines()[-1]
        assert last in (f"False {code}", f"False {code or None}"), (arguments, done.stdout[-300:], done.stderr)


def test_no_bracketed_name_of_a_help_text_is_taken_for_markup(whole: typer.Typer) -> None:
    """`[cluster]` is a section of a recipe, not a style: rich leaves it out of a help text unless it is escaped."""
    lost = []
    for path, command in _commands(typer.main.get_command(whole), ()):
        texts = [command.help or "", command.epilog or "", *(getattr(one, "help", "") or "" for one in command.params)]
        for text in texts:
            shown = Text.from_markup(text).plain
            names = [name for name in re.findall(r"\[([\w.-]+)\]", text) if name not in ("bold", "dim")]
            lost += [f"{' '.join(path)}: [{name}]" for name in names if f"[{name}]" not in shown]
    assert lost == []


def _commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from _commands(inner, (*path, name))
