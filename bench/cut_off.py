"""A call that is cut off, by Ctrl-C or from outside, says in a line what was kept and how to go on. No traceback."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator

NOTHING = "nothing of this call was kept; the same command begins anew"
WRITTEN = "what was measured is in the file that the command names; the same command measures the rest"


class CutOff(SystemExit):
    """A signal asked for the end; the exit code is what a shell makes of it, 128 and the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


@contextlib.contextmanager
def ending_on_signals() -> Iterator[None]:
    """Ctrl-C, SIGTERM and a closed terminal's SIGHUP end the call by `CutOff`, so that nothing is left on the GPUs."""

    def end(number: int, frame: object) -> None:
        # whoever is impatient, and a terminal that closes, sends more than one: the next must not cut off the
        # stopping of jobs
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise CutOff(number)

    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        for each, handler in before.items():
            if handler != signal.SIG_IGN:  # nohup
                signal.signal(each, end)
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextlib.contextmanager
def saying(kept: Callable[[], str]) -> Iterator[None]:
    """Says what was kept of a call that is cut off in here, and ends it."""
    try:
        yield
    except (KeyboardInterrupt, CutOff) as cut:
        code = cut.code if isinstance(cut, CutOff) else 128 + signal.SIGINT
        print(f"\ncut off: {kept()}", file=sys.stderr, flush=True)
        sys.exit(code)


@contextlib.contextmanager
def for_a_pipe() -> Iterator[None]:
    """Prints that are many: who reads them may leave early (`| head`), which ends the script without a word."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # the interpreter flushes once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


def run(main: Callable[[], int | None], kept: str = NOTHING) -> None:
    """A whole script."""
    with saying(lambda: kept):
        sys.exit(main())
