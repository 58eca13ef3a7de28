"""Prints the files and packages of the running Python's standard library that the demo reads, one a line."""

from __future__ import annotations

import sysconfig
from pathlib import Path

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", "turtledemo"}
"""Installed packages, and parts that are mostly data or tests."""


def main() -> None:
    folder = Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.iterdir()):
        is_package = path.is_dir() and any(path.glob("*.py"))
        if path.name not in LEFT_OUT and (path.suffix == ".py" or is_package):
            print(path)


main()
