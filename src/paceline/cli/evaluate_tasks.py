"""`paceline eval MODEL --tasks ...`: lm-evaluation-harness asks, the model answers."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.errors import ConfigError, to_install
from paceline.report.console import make_console, print_table
from paceline.report.table import Table, table

if TYPE_CHECKING:
    from paceline.generate.load import Speaker


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the command line says of the tasks."""

    tasks: tuple[str, ...]
    num_fewshot: int | None = None
    limit: int = 0
    chat: bool = False
    include_path: Path | None = None
    output: Path | None = None
    batch_size: int = 8
    as_json: bool = False


def refuse_missing(wanted: Wanted) -> None:
    """Before the model is read: raises ConfigError where the package is not there, or the output is."""
    if find_spec("lm_eval") is None:
        raise ConfigError(
            f"--tasks {','.join(wanted.tasks)} needs lm-evaluation-harness, which is not installed",
            evidence="It is an extra: tasks bring their own data sets and metrics.",
            next_step=f"Once: {to_install('eval')}.",
        )
    if wanted.output is not None and wanted.output.exists():
        raise ConfigError(f"{wanted.output} exists", next_step="Give another name, or move it.")


def ask(speaker: Speaker, wanted: Wanted, is_main: bool) -> None:
    """Runs the tasks and prints a table, or one JSON line.

    Raises:
        ConfigError: a task is not known, or a chat template is asked for and there is none.
    """
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    from paceline.generate.chat import template_of
    from paceline.generate.harness import PacelineLM

    template = template_of(speaker) if wanted.chat else None
    include = None if wanted.include_path is None else str(wanted.include_path)
    manager = TaskManager(include_path=include)
    _refuse_unknown(wanted.tasks, manager)
    results = simple_evaluate(
        model=PacelineLM(speaker, batch_size=wanted.batch_size, template=template),
        tasks=list(wanted.tasks),
        num_fewshot=wanted.num_fewshot,
        limit=wanted.limit or None,
        apply_chat_template=wanted.chat,
        task_manager=manager,
        log_samples=wanted.output is not None,
    )
    if not is_main or results is None:
        return
    if wanted.output is not None:
        wanted.output.write_text(json.dumps(results, indent=1, default=str), encoding="utf-8")
    scores = results["results"]
    if wanted.as_json:
        typer.echo(json.dumps({"tasks": scores, "step": speaker.step}, default=str))
        return
    print_table(make_console(), _scores(scores, results.get("n-shot", {}), wanted.limit))


def _refuse_unknown(names: tuple[str, ...], manager: Any) -> None:
    known = manager.all_tasks
    for name in names:
        if manager.match_tasks([name]):
            continue
        near = difflib.get_close_matches(name, known, n=3)
        raise ConfigError(
            f"lm-evaluation-harness has no task {name!r}",
            evidence=f"It knows {len(known):,} tasks and groups.",
            next_step=(f"Did you mean {' or '.join(near)}? " if near else "")
            + "`lm-eval ls tasks` lists them; --include-path adds your own.",
        )


def _scores(results: Mapping[str, Mapping[str, Any]], shots: Mapping[str, Any], limit: int) -> Table:
    rows = []
    for task, found in results.items():
        for key, value in found.items():
            metric, _, how = key.partition(",")
            if not isinstance(value, int | float) or isinstance(value, bool) or metric.endswith("_stderr"):
                continue
            if not how:
                continue  # counts of samples, not a score
            error = found.get(f"{metric}_stderr,{how}")
            spread = f"{error:.4f}" if isinstance(error, int | float) else ""
            rows.append((task, str(shots.get(task, "")), metric, "" if how == "none" else how, f"{value:.4f}", spread))
    notes = (f"{limit} questions of each task only: no figure to compare.",) if limit else ()
    return table(("task", ">shots", "metric", "answer taken by", ">score", ">standard error"), rows, notes=notes)
