"""Who says what, where? Rank 0 speaks to the console; every rank writes to its own file in the run folder."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.logging import RichHandler

from paceline.report.console import make_console

ROOT = "paceline"


def log_once(logger: logging.Logger, level: int, message: str, *args: Any) -> None:
    """Logs ``message`` (after its arguments are filled in) the first time only, for as long as ``logging_to`` holds.

    On the console rank 0 alone says it, in the log files every rank.
    """
    logger.log(level, message, *args, extra={"once": True}, stacklevel=2)


@contextmanager
def logging_to(
    folder: Path | None, *, rank: int = 0, console: Console | None = None, level: int = logging.INFO
) -> Iterator[logging.Logger]:
    """Sends the logger ``paceline`` and those below it to ``folder/rank_N.log`` and, on rank 0, to the console.

    The other ranks put warnings and worse on the console too: what only rank 5 sees must not stay in a file. Python's
    own ``warnings`` go the same way. All handlers are taken away at the end of the block.

    Args:
        folder: where the files go; None for the console alone.
        console: default: standard error, so that standard output stays clean for what was asked for.
    """
    handlers = [_console_handler(console or make_console(stderr=True), rank, level)]
    if folder is not None:
        handlers.append(_file_handler(folder, rank))
    once = _OnceFilter()
    loggers = [logging.getLogger(ROOT), logging.getLogger("py.warnings")]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.setLevel(min(level, logging.INFO))
        logger.propagate = False
        logger.addFilter(once)
        for handler in handlers:
            logger.addHandler(handler)
    for handler in handlers:
        # filters of a logger do not see the records of loggers below it
        handler.addFilter(once)
    logging.captureWarnings(True)
    try:
        yield loggers[0]
    finally:
        logging.captureWarnings(False)
        for logger, (old_level, propagate) in zip(loggers, before, strict=True):
            logger.setLevel(old_level)
            logger.propagate = propagate
            logger.removeFilter(once)
            for handler in handlers:
                logger.removeHandler(handler)
        for handler in handlers:
            handler.close()


def _console_handler(console: Console, rank: int, level: int) -> logging.Handler:
    handler: logging.Handler
    speaker = "" if rank == 0 else f"[rank {rank}] "
    if console.is_terminal:
        handler = RichHandler(
            console=console, show_path=False, markup=False, rich_tracebacks=False, log_time_format="[%X]"
        )
        handler.setFormatter(logging.Formatter(f"{speaker}%(message)s"))
    else:
        # in a file or a pipe rich would fill every line with blanks up to its width
        handler = logging.StreamHandler(console.file)
        handler.setFormatter(logging.Formatter(f"[%(asctime)s] %(levelname)s {speaker}%(message)s", "%H:%M:%S"))
    handler.setLevel(level if rank == 0 else max(level, logging.WARNING))
    # tracebacks of errors that the user is told in a sentence are marked so
    handler.addFilter(lambda record: not getattr(record, "file_only", False))
    if rank != 0:
        # what is said once follows from the recipe and the layout, and rank 0 says it
        handler.addFilter(lambda record: not getattr(record, "once", False))
    return handler


def _file_handler(folder: Path, rank: int) -> logging.Handler:
    folder.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(folder / f"rank_{rank}.log", encoding="utf-8")
    handler.setLevel(logging.INFO)
    handler.setFormatter(logging.Formatter(f"%(asctime)s [rank {rank}] %(levelname)s %(name)s: %(message)s"))
    return handler


class _OnceFilter(logging.Filter):
    """Drops a record marked ``once`` whose text was seen. Handlers share it: all of them let the same record pass."""

    def __init__(self) -> None:
        super().__init__()
        self._first: dict[tuple[str, str], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if not getattr(record, "once", False):
            return True
        key = (record.name, record.getMessage())
        return self._first.setdefault(key, record.created) == record.created
