"""Imports run down: the floors of the house as data, and the rules of style that a machine can hold.

A room imports only rooms on lower floors; imports in function bodies and under TYPE_CHECKING count too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

FLOORS = {
    1: "kernels errors report",
    2: "config runtime observe",
    3: "models costs data checkpoint launch",
    4: "parallel planner tasks explain generate",
    5: "optim doctor",
    6: "training",
    7: "tuner bench interop",
    8: "cli",
}
FLOOR_OF = {room: floor for floor, rooms in FLOORS.items() for room in rooms.split()}
DRAWERS = {"utils", "util", "common", "helpers", "helper", "misc", "tools", "shared"}
ENVIRONMENT_READERS = {"runtime", "config/load.py"}

PACKAGE = Path(__file__).parent.parent / "src" / "paceline"
FILES = {path.relative_to(PACKAGE): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
# the package's own __init__ and __main__ stand above the floors
ROOM_FILES = [file for file in FILES if file.stem not in ("__init__", "__main__") or len(file.parts) > 1]


def room_of(file: Path) -> str:
    return file.parts[0].removesuffix(".py")


def imports_of(file: Path) -> Iterator[tuple[str, int]]:
    """Dotted names below ``paceline`` that ``file`` imports, with line numbers; ``from a import b`` gives ``a.b``."""
    for node in ast.walk(FILES[file]):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # "from . import x": counted from the file's own package
                package = ("paceline", *file.parts[:-1])
                base = ".".join((*package[: len(package) - node.level + 1], *filter(None, [node.module])))
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.startswith("paceline."):
                yield name.removeprefix("paceline."), node.lineno


def file_of(name: str) -> Path | None:
    """The file that a dotted name lies in: ``optim.muon.Muon`` is in ``optim/muon.py``."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        for candidate in (Path(*parts[:length]).with_suffix(".py"), Path(*parts[:length], "__init__.py")):
            if candidate in FILES:
                return candidate
    return None


def test_every_room_has_a_floor() -> None:
    assert sorted({room_of(file) for file in ROOM_FILES} - FLOOR_OF.keys()) == []


@pytest.mark.parametrize("file", ROOM_FILES, ids=str)
def test_imports_run_down(file: Path) -> None:
    upward = [
        f"src/paceline/{file}:{line} imports {name}"
        for name, line in imports_of(file)
        for room in [name.split(".")[0]]
        if room in FLOOR_OF and room != room_of(file) and FLOOR_OF[room] >= FLOOR_OF[room_of(file)]
    ]
    assert upward == []


def test_no_circle_within_a_room() -> None:
    arrows = {
        file: {target for name, _ in imports_of(file) if (target := file_of(name)) and room_of(target) == room_of(file)}
        for file in FILES
    }
    while free := [file for file, targets in arrows.items() if not targets]:
        for file in free:
            del arrows[file]
        for targets in arrows.values():
            targets.difference_update(free)
    # what is left imports files that are left, so a circle is among them
    assert {str(file): sorted(map(str, targets)) for file, targets in arrows.items()} == {}


def test_files_are_named_by_the_question_they_answer() -> None:
    assert [str(file) for file in FILES if DRAWERS & {*file.parts[:-1], file.stem}] == []


def test_no_global_statements() -> None:
    found = [
        f"{file}:{node.lineno}" for file in FILES for node in ast.walk(FILES[file]) if isinstance(node, ast.Global)
    ]
    assert found == []


def test_environment_is_read_in_its_places_only() -> None:
    found = [
        f"{file}:{node.lineno}"
        for file in FILES
        if not {room_of(file), str(file)} & ENVIRONMENT_READERS
        for node in ast.walk(FILES[file])
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv")
    ]
    assert found == []


def test_room_init_files_are_empty() -> None:
    inits = [file for file in FILES if file.name == "__init__.py" and len(file.parts) > 1]
    assert [str(file) for file in inits if FILES[file].body] == []
