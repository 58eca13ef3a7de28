"""Work beside the compute stream: communication and copies that the next kernels need not wait for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Lane:
    """A CUDA stream of its own. On the CPU it is no lane at all: work runs where it is called.

    So on a GPU a chain of steps is written down one after the other and still overlaps with compute; on the CPU
    overlap comes from asynchronous collectives, and ``asynchronous`` says which of the two it is.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def asynchronous(self) -> bool:
        """Whether what runs in the lane is already beside the caller's stream."""
        return self._stream is not None

    @contextmanager
    def run(self) -> Iterator[None]:
        """What is queued inside begins after all that the current stream was given so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """A point in the lane, to be given to `wait`."""
        return self._stream.record_event() if self._stream is not None else None

    def wait(self, mark: torch.cuda.Event | None) -> None:
        """The current stream goes on only when the lane has passed ``mark``. The host does not wait."""
        if mark is not None and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(mark)

    def drain(self) -> None:
        """The host waits until the lane is empty: before the CPU reads what was copied to it."""
        if self._stream is not None:
            self._stream.synchronize()
