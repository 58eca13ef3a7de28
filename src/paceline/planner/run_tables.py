"""Tables of runs as text: which columns they have, and what stands in a cell.

A table is a CSV file with a header, its cells parted by commas, semicolons or tabs. Names of columns may be written in
capitals and with blanks around them; columns that are not in `COLUMNS` are not read.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from pathlib import Path

from paceline.errors import ConfigError

REQUIRED = ("layers", "hidden", "heads", "ffn", "seq", "gpu", "n_gpus", "mbs", "gbs")
"""Columns that a row must fill."""
MEASURED = ("step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu_pct", "mem_GiB")
"""What was measured. A row without any is predicted, and compared with nothing."""
COLUMNS = (
    "id", "source", "year", "model", "params_B", "active_params_B", "layers", "hidden", "heads", "kv_heads", "ffn",
    "vocab", "experts", "topk", "seq", "gpu", "n_gpus", "gpus_per_node", "interconnect", "precision", "tp", "pp",
    "vpp", "cp", "ep", "dp", "zero", "mbs", "gbs", "recompute", "tflops_per_gpu", "mfu_pct", "tokens_per_s_per_gpu",
    "step_time_s", "mem_GiB", "notes", "evidence",
)  # fmt: skip
"""Of a table of runs; those that a table lacks are taken as empty."""
AT = "at"
"""Key of a row that was read from a file: its file and line, "runs.csv:7"."""
_SEPARATORS = ",;\t"


class CellError(Exception):
    """A cell that is empty where it is needed, or that holds what cannot be."""


def read_rows(paths: Iterable[Path | str]) -> list[dict[str, str]]:
    """All rows of CSV files, each with all of `COLUMNS`.

    A row that came already (the 55 nanotron rows in two files) is not read twice. One of the same id with other values
    is another row: its id gets the file and the line.

    Raises:
        ConfigError: a file is no table of runs.
    """
    return read_tables(paths)[0]


def read_tables(paths: Iterable[Path | str]) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """(the rows, those that came already); each says in `AT` where it stands."""
    rows: dict[str, dict[str, str]] = {}
    again = []
    for path in paths:
        for number, row in _table(Path(path)):
            at = f"{Path(path).name}:{number}"
            row["id"] = row["id"].strip() or at
            if _same(rows.get(row["id"]), row):
                again.append(row | {AT: at})
                continue
            for name in (row["id"], f"{row['id']} ({at})", f"{row['id']} ({path}:{number})"):
                if name not in rows:
                    rows[name] = row | {"id": name, AT: at}
                    break
    return list(rows.values()), again


def _same(kept: dict[str, str] | None, row: dict[str, str]) -> bool:
    return kept is not None and all(kept[name] == row[name] for name in COLUMNS)


def _table(path: Path) -> list[tuple[int, dict[str, str]]]:
    """Rows with the numbers of their lines."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not written in UTF-8",
            evidence=f"byte {error.start}: {error.reason}.",
            next_step="Save it again as CSV in UTF-8.",
        ) from None
    header = next((line for line in text.splitlines() if line.strip()), "")
    separator = max(_SEPARATORS, key=header.count)
    reader = csv.reader(text.splitlines(keepends=True), delimiter=separator)
    known = {name.lower(): name for name in COLUMNS}
    names: list[str] | None = None
    rows = []
    for cells in reader:
        if not any(cell.strip() for cell in cells):
            continue
        if names is None:
            names = [known.get(cell.strip().lower(), "") for cell in cells]
            if not set(REQUIRED) & set(names):
                raise ConfigError(
                    f"{path} has none of the columns of a table of runs",
                    evidence=f"its first line is {header[:80]!r}.",
                    next_step=f"Name the columns there, at least {', '.join(REQUIRED)}; docs/accuracy.md has all.",
                )
            continue
        row = dict.fromkeys(COLUMNS, "") | {name: cell for name, cell in zip(names, cells, strict=False) if name}
        rows.append((reader.line_num, row))
    if names is None:
        raise ConfigError(f"{path} is empty", next_step=f"A table of runs has at least {', '.join(REQUIRED)}.")
    return rows


def whole_number(row: dict[str, str], name: str, default: int | None = None) -> int:
    """At least 1; 0 where ``default`` is 0.

    Raises:
        CellError: the cell is empty without a default, or holds something else.
    """
    text = row[name].strip()
    if not text:
        if default is None:
            raise CellError(f"{name} is not published")
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    least = 0 if default == 0 else 1
    if not math.isfinite(value) or value != int(value) or not least <= value <= 10**15:
        raise CellError(f"{name} = {text!r} is not a whole number from {least}")
    return int(value)


def measured_number(row: dict[str, str], name: str) -> float | None:
    """Above 0; None where the cell is empty.

    Raises:
        CellError: it holds something else.
    """
    text = row[name].strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value <= 0:
        raise CellError(f"{name} = {text!r} is not a number above 0")
    return value
