"""`paceline data inspect --task`: conversations, pairs and judged answers, as a run would learn them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.data.row_report import RowReport, ShownExample

LEARNED = ("«", "»")
"""Stand around what is learned, so that it is seen without colours too."""
BAR = 40


def inspect_rows(
    sources: list[str],
    *,
    task: str,
    options: Mapping[str, object],
    seq_len: int,
    global_batch_size: int,
    samples: int,
    example: int,
    as_json: bool,
) -> bool:
    """Prints what a run with this task would read of the sources; whether no row of it is bad.

    Args:
        options: of the section `[data]`: tokenizer, template, mask, packing, too_long, cache_dir.
    Raises:
        ConfigError, DataError: an unknown task or option, or nothing that can be read.
    """
    from paceline.config.load import validate
    from paceline.data.example_files import RowRequest
    from paceline.data.records import TASKS
    from paceline.data.row_report import report_rows
    from paceline.errors import ConfigError, DataError
    from paceline.report.console import make_console

    if task not in TASKS:
        raise ConfigError(
            f"--task {task!r} is no task that reads rows",
            evidence=f"Known: {', '.join(TASKS)}.",
            next_step="Choose one; without --task a dataset of tokens is shown.",
        )
    config = validate({"data": {"train": [{"path": path} for path in sources], **options}}).data
    request = RowRequest(task=task, seq_len=seq_len, seed=1234, global_batch_size=global_batch_size)
    try:
        report = report_rows(config, request, sources, samples=samples, example=example)
    except DataError as error:
        told = (_as_options(error.subject), _as_options(error.evidence), _as_options(error.next_step))
        raise DataError(told[0], evidence=told[1], next_step=told[2]) from error
    console = make_console()
    if as_json:
        print(json.dumps(report.as_json(), ensure_ascii=False))  # noqa: T201 - for programs: no wrapping, no styles
        return not report.tally.bad
    for line in _counts(report, global_batch_size):
        console.print(line, soft_wrap=True)
    for shown in report.shown:
        _print_example(console, shown)
    return not report.tally.bad


def _as_options(text: str) -> str:
    """A message about a recipe, with fields that are options here called so: ``--template chatml``."""
    named = re.sub(r"\bdata\.(tokenizer|template|mask|packing)\b(?: =(?= ))?", r"--\1", text)
    return re.sub(r"\btrain\.seq_len\b(?: =(?= ))?", "--seq-len", named)


def _many(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _counts(report: RowReport, global_batch_size: int) -> Iterator[Text]:
    yield Text(
        f"{', '.join(report.sources)}: {_many(report.tally.rows, 'row')}, {_many(report.examples, 'example')} for "
        f"{report.task}"
    )
    if report.tally.bad:
        yield Text(report.tally.summary() + ":", style="yellow")
        for line in report.tally.listing().splitlines():
            yield Text(f"  {line}", style="yellow")
        yield Text("  A run refuses them, or leaves them out with data.bad_rows = 'skip'.", style="yellow")
    template = f", template {report.template}" if report.template else ""
    yield Text(f"tokenizer {report.tokenizer}{template}")
    if report.loose_markers:
        yield Text(
            f"{', '.join(report.loose_markers)}: no tokens of this tokenizer, so they are read as text, several tokens "
            "each (--template chooses another template)",
            style="yellow",
        )
    share = report.learned / report.tokens if report.tokens else 0.0
    yield Text(f"{_many(report.tokens, 'token')}, {share:.1%} of them learned")
    names = {0: "min", 50: "median", 100: "max"}
    lengths = "  ".join(f"{names.get(p, f'{p} %')} {value:,}" for p, value in report.lengths.items())
    yield Text(f"tokens a document: {lengths}")
    yield from _bars(report)
    if report.too_long:
        yield Text(
            f"{_many(report.too_long, 'example')} longer than train.seq_len = {report.seq_len:,}: a run refuses, cuts "
            "or leaves them out (data.too_long)",
            style="yellow",
        )
    steps = -(-report.rows // global_batch_size)
    yield Text(
        f"{_many(report.rows, 'sequence')} of up to {report.seq_len:,} tokens, {report.fullness:.1%} full, at most "
        f"{_many(report.most, 'example')} each; an epoch is {_many(steps, 'step')} of {global_batch_size:,}"
    )


def _bars(report: RowReport) -> Iterator[Text]:
    highest = max((count for _, _, count in report.histogram), default=1)
    width = max(len(f"{low:,}-{high:,}") for low, high, _ in report.histogram)
    for low, high, count in report.histogram:
        bar = "█" * round(BAR * count / highest) or ("▏" if count else "")
        yield Text(f"  {f'{low:,}-{high:,}':>{width}} {bar} {count:,}")


def _print_example(console: Console, shown: ShownExample) -> None:
    for document in shown.documents:
        learned = sum(stretch.tokens for stretch in document.stretches if stretch.learned)
        total = sum(stretch.tokens for stretch in document.stretches)
        console.print()
        console.print(
            Text(
                f"example {shown.number} ({shown.path}:{shown.line}), {document.name}: {_many(total, 'token')}, "
                f"{learned:,} learned, which stand between {LEARNED[0]} and {LEARNED[1]}",
                style="bold",
            ),
            soft_wrap=True,
        )
        text = Text()
        for stretch in document.stretches:
            if stretch.learned:
                text.append(f"{LEARNED[0]}{stretch.text}{LEARNED[1]}", style="bold green")
            else:
                text.append(stretch.text, style="dim")
        console.print(text, soft_wrap=True)
