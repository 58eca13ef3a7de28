"""Has someone asked this run to stop?"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

STOPPING = "\nstopping after this step, with a checkpoint; Ctrl-C again ends at once\n"


def stop_signals() -> tuple[signal.Signals, ...]:
    """SIGTERM, SIGINT and SIGHUP (a closed terminal); not SIGHUP where it is ignored, as under ``nohup``."""
    heard = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    return tuple(number for number in heard if signal.getsignal(number) != signal.SIG_IGN)


def tell_terminal(text: str) -> None:
    """Writes to standard error from within a signal handler, where Python's own files may be in use."""
    os.write(2, text.encode())


class StopRequest:
    """Turns SIGTERM, SIGINT and SIGHUP into a flag that the training loop polls between two steps.

    Used as a context manager around the loop; the handlers that were there before are restored at its end. The first
    signal sets the flag, so that the step can end and a checkpoint be written. A second SIGINT raises
    ``KeyboardInterrupt``: the way out when the step itself hangs. Outside the main thread Python allows no handlers;
    the flag then can only be set by ``request``.

    Args:
        announce: tell the terminal at the first SIGINT what will happen.
    """

    def __init__(self, *, announce: bool = False) -> None:
        self._announce = announce
        self._signal: int | None = None
        self._reason = ""
        self._previous: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return bool(self._reason)

    @property
    def reason(self) -> str:
        """``"SIGTERM"``, ``"SIGINT"``, ``"SIGHUP"``, what ``request`` was told, or empty."""
        return self._reason

    @property
    def exit_code(self) -> int:
        """0 after SIGTERM (a clean stop that was asked for), 130 after Ctrl-C, as shells expect."""
        return 128 + signal.SIGINT if self._signal == signal.SIGINT else 0

    def request(self, reason: str) -> None:
        self._reason = self._reason or reason

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in stop_signals():
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            # None: the handler was not installed from Python and cannot be put back
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        if number == signal.SIGINT and self._announce:
            tell_terminal(STOPPING)
        self._signal = number
        self.request(signal.Signals(number).name)
