"""What has a person handed to us: a run folder, traces, or a log?"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from paceline.config.load import load_recipe
from paceline.errors import ConfigError, PacelineError
from paceline.explain.compare import compare_logs, compare_runs
from paceline.explain.compare_traces import compare_traces
from paceline.explain.explanation import Explanation
from paceline.explain.log_report import card_named, explain_log
from paceline.explain.run_folder import is_run_folder
from paceline.explain.run_report import explain_run
from paceline.explain.trace_report import explain_traces
from paceline.report.finding import Finding

Kind = Literal["run", "trace", "log"]

_MOST_RUNS = 6
"""That are named where a folder holds more."""


def explain(paths: Sequence[Path], *, gpu: str = "", compare: bool = False) -> Explanation:
    """Says what there is to say.

    Args:
        paths: one run folder; traces of the ranks of one program; a log; or two of a kind to compare.
        gpu: the card behind a log; whatever else is given knows its own.
        compare: two traces are compared instead of taken for two ranks.

    Raises:
        ConfigError: a path is missing, not known, or they do not go together; or the card is not known.
    """
    card = card_named(gpu) if gpu else None
    found, used = _explain(paths, gpu=gpu, compare=compare)
    return found if card is None or used else replace(found, findings=(*found.findings, _not_used(card.name)))


def _not_used(name: str) -> Finding:
    return Finding(
        id="explain.gpu-not-used",
        severity="note",
        subject=f"--gpu {name} is not used",
        evidence="It is for one log, which does not name its card; a run folder and a trace name theirs, and two logs "
        "are compared without a peak.",
        next_step="Leave --gpu out.",
        gain="-",
    )


def _explain(paths: Sequence[Path], *, gpu: str, compare: bool) -> tuple[Explanation, bool]:
    """Also whether the card was of use."""
    kinds = [kind_of(path) for path in paths]
    if len(set(kinds)) > 1:
        raise ConfigError(
            "these are of different kinds: "
            + ", ".join(f"{path} ({kind})" for path, kind in zip(paths, kinds, strict=True)),
            next_step="Give one run folder, one log, traces of one program, or two of a kind.",
        )
    kind = kinds[0]
    traces = [trace for path in paths for trace in traces_of(path)] if kind == "trace" else []
    if compare and len(paths) != 2:
        raise ConfigError(f"--compare takes two, not {len(paths)}", next_step="Give the two that are to be compared.")
    if kind == "trace":
        both = compare and len(traces) == 2
        return (compare_traces(traces[0], traces[1]) if both else explain_traces(traces)), False
    if len(paths) == 1:
        return (explain_run(paths[0]), False) if kind == "run" else (explain_log(paths[0], gpu=gpu), True)
    if len(paths) == 2:
        return (compare_runs(*paths) if kind == "run" else compare_logs(*paths)), False
    raise ConfigError(f"{len(paths)} {kind}s were given", next_step="Give one, or two to compare.")


def kind_of(path: Path) -> Kind:
    """By what is in it, not by its name alone.

    Raises:
        ConfigError: there is no such file or folder.
    """
    if path.is_dir():
        if is_run_folder(path):
            return "run"
        if traces_of(path):
            return "trace"
        if inside := runs_in(path):
            shown = [f"`paceline explain {run}`" for run in inside[:_MOST_RUNS]]
            more = f", and {len(inside) - _MOST_RUNS} older ones" if len(inside) > _MOST_RUNS else ""
            raise ConfigError(
                f"{path} is no run folder, it holds {len(inside)} of them"
                if len(inside) > 1
                else f"{path} is no run folder, it holds one",
                next_step=f"Give one, or two to compare: {', '.join(shown)}{more}.",
            )
        raise ConfigError(
            f"{path} is neither a run folder nor a folder of traces",
            evidence="It has no recipe.toml, metrics.jsonl or record/, and no *.json or *.json.gz.",
            next_step="Give the folder that `paceline train` wrote (run.dir), a trace, or a log.",
        )
    if not path.exists():
        raise ConfigError(
            f"there is no {path}", next_step="Give a run folder, traces (*.json, *.json.gz) or a training log."
        )
    if path.suffix == ".toml":
        raise ConfigError(f"{path} is a recipe: it tells what to run, not how it ran", next_step=_runs_of(path))
    head = _head(path).lstrip("\ufeff \t\r\n")
    if not head:
        raise ConfigError(
            f"{path} is empty", next_step="Give a run folder, traces (*.json, *.json.gz) or a training log."
        )
    if head.startswith(("{", "[")) and ('"traceEvents"' in head or '"ph"' in head or "log_history" not in head):
        if head.startswith("{") and "log_history" in head:
            return "log"
        # a log line may begin with a bracket: [2025-12-28 00:20:49] iteration ...
        if head.startswith("{") or head[1:].lstrip().startswith(("{", "]")):
            return "log" if head.startswith("{'") else "trace"
    return "log"


def runs_in(path: Path) -> list[Path]:
    """Run folders below a folder, or below its ``runs``; the newest first."""
    found = [each for folder in (path, path / "runs") if folder.is_dir() for each in _folders(folder)]
    return sorted((each for each in found if is_run_folder(each)), key=lambda run: -run.stat().st_mtime)


def _folders(path: Path) -> list[Path]:
    try:
        return [each for each in path.iterdir() if each.is_dir()]
    except OSError:
        return []


def _runs_of(recipe: Path) -> str:
    """What to give instead of a recipe."""
    if is_run_folder(recipe.parent) and recipe.name == "recipe.toml":
        return f"Give its folder: `paceline explain {recipe.parent}`."
    try:
        where = load_recipe(recipe).config.run.folder
    except (PacelineError, OSError):
        return "Give the folder that `paceline train` wrote (run.dir), by default runs/NAME."
    if is_run_folder(Path(where)):
        return f"Give the folder of its run: `paceline explain {where}`."
    return f"Run it first (`paceline train {recipe}`), then give the folder of its run: `paceline explain {where}`."


def traces_of(path: Path) -> list[Path]:
    """Trace files of a folder, or the file itself."""
    if path.is_file():
        return [path]
    return sorted(each for each in path.iterdir() if each.name.endswith((".json", ".json.gz")) and each.is_file())


def _head(path: Path) -> str:
    try:
        with path.open("rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
        if zipped:
            with gzip.open(path, "rb") as file:
                return file.read(1 << 16).decode(errors="replace")
        with path.open("rb") as file:
            return file.read(1 << 16).decode(errors="replace")
    except (OSError, EOFError, zlib.error):
        return "{" if path.suffix in (".json", ".gz") else ""
