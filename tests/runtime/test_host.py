"""Memory of the machine, within the limit of a container."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from paceline.runtime.host import host_memory

GIB = 2**30


def test_without_a_limit_it_is_the_machine(tmp_path: Path) -> None:
    found = host_memory(tmp_path)
    assert found.total == psutil.virtual_memory().total and 0 < found.available <= found.total
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory(tmp_path).total == found.total


@pytest.mark.parametrize(
    ("limit", "used", "stat"),
    [
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ],
)
def test_a_container_may_use_less(tmp_path: Path, limit: str, used: str, stat: str) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / limit).write_text(f"{GIB // 4}\n")
    (tmp_path / used).write_text(f"{GIB // 8}\n")
    (tmp_path / stat).write_text(f"anon 5\ninactive_file {GIB // 16}\n")
    found = host_memory(tmp_path)
    assert found.total == GIB // 4 and found.available == GIB // 4 - GIB // 8 + GIB // 16


@pytest.mark.parametrize("text", ["\u00b2", "-1", "many", ""])
def test_what_is_no_number_is_no_limit(tmp_path: Path, text: str) -> None:
    (tmp_path / "memory.max").write_text(text)
    assert host_memory(tmp_path).total == psutil.virtual_memory().total


def test_odd_lines_of_a_container_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{GIB}\n")
    (tmp_path / "memory.current").write_text(f"{GIB}\n")
    (tmp_path / "memory.stat").write_bytes(b"inactive_file\ninactive_file x\n")
    assert host_memory(tmp_path).available == 0
    # v1 counts what child groups hold in a line of its own
    (tmp_path / "memory.stat").write_text(f"inactive_file 0\ntotal_inactive_file {GIB // 2}\n")
    assert 0 < host_memory(tmp_path).available <= GIB // 2
