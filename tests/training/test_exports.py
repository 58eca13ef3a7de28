"""Exports that are missing, cut short or out of date are made good; what is there is never lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.training.exports import clean_exports, is_current, make_room, mark_outdated, put_in_place


def export(folder: Path, text: str) -> None:
    folder.mkdir(parents=True)
    (folder / "weights").write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_one_that_is_older_than_the_way_there_is_replaced_at_once(tmp_path: Path) -> None:
    exports = tmp_path / "exports"
    for step in (2, 4, 6):
        export(exports / f"step_{step:08d}", "before")
    kept, folder = exports / "step_00000002", exports / "step_00000004"
    assert [path.name for path in mark_outdated(tmp_path, 2)] == ["step_00000004", "step_00000006"]
    assert is_current(kept) and not is_current(folder)
    target = make_room(folder)
    assert target != folder and (folder / "weights").read_text() == "before"
    export(target, "after")
    put_in_place(target, folder)
    assert is_current(folder) and (folder / "weights").read_text() == "after"
    assert names(exports) == ["step_00000002", "step_00000004", "step_00000006", "step_00000006.outdated"]


@pytest.mark.parametrize(
    ("left", "weights"),
    [
        ({"": "before", ".tmp-1234abcd": "half"}, "before"),
        ({"": "before", ".tmp-new.tmp-1234abcd": "half"}, "before"),
        ({"": "before", ".tmp-new": "after"}, "after"),
        ({".tmp-old": "before", ".tmp-new": "after"}, "after"),
        ({"": "after", ".tmp-old": "before"}, "after"),
        ({".tmp-old": "before"}, "before"),
    ],
    ids=lambda value: "".join(value),
)
def test_a_kill_at_any_moment_leaves_one_whole_export(left: dict[str, str], weights: str, tmp_path: Path) -> None:
    for ending, text in left.items():
        export(tmp_path / f"step_00000004{ending}", text)
    export(tmp_path / "step_00000002", "another")
    (tmp_path / "mine.tmp-1").mkdir()
    clean_exports(tmp_path)
    assert names(tmp_path) == ["mine.tmp-1", "step_00000002", "step_00000004"]
    assert (tmp_path / "step_00000004" / "weights").read_text() == weights
