"""What the recipes that a release of Megatron Bridge ships say of a layout, where its published tables do not.

Its tables print the layout alone. What is recomputed, whether the dispatcher permutes rows and what runs in 8 bits
stands in the recipe that the release has for that very layout (`scripts/performance/configs`, since 26.08
`megatron/bridge/perf_recipes`), which changed from release to release. `release_recipes.csv` holds that of mixtures of
experts, as far as a stored recipe has the row's layout; nothing in it was measured.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache
from pathlib import Path

_FILE = Path(__file__).with_name("release_recipes.csv")
_KEY = ("model", "gpu", "precision", "n_gpus", "tp", "pp", "vpp", "cp", "ep", "mbs", "gbs")


def with_release(row: Mapping[str, str]) -> dict[str, str]:
    """The row, with its release's own recipe where it says nothing of what that decides."""
    found = _recipes().get((_release(row["source"]), *(row[name].strip() for name in _KEY)))
    if found is None:
        return dict(row)
    recompute, kernels = found
    notes = "; ".join(filter(None, (row["notes"], kernels if kernels not in row["notes"] else "")))
    return {**row, "recompute": row["recompute"].strip() or recompute, "notes": notes}


def _release(source: str) -> str:
    """ "26.04" of "Megatron Bridge [26.04 NeMo Container / Pre-Training Performance]"."""
    return source.partition("[")[2].partition(" ")[0].rstrip("]")


@cache
def _recipes() -> dict[tuple[str, ...], tuple[str, str]]:
    with _FILE.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {(row["release"], *(row[name] for name in _KEY)): (row["recompute"], row["kernels"]) for row in rows}
