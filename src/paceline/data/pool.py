"""Worker processes that take tasks one at a time and give results back in task order."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Generic, TypeVar

from paceline.errors import DataError, PacelineError

Task = TypeVar("Task")
Result = TypeVar("Result")


class WorkerPool(Generic[Task, Result]):
    """Runs ``work(task)`` in ``num_workers`` processes.

    Results come in the order of the tasks and at most ``4 * num_workers`` tasks ahead of the oldest unfinished one, so
    memory is bounded however uneven the tasks are. A process that dies or raises is a DataError, not a hang. Processes
    start with the pool: start it before any thread (a progress display), since a fork copies only the calling thread.
    """

    def __init__(self, work: Callable[[Task], Result], num_workers: int) -> None:
        # a fork shares the loaded tokenizer and starts at once, but is safe only while no other thread runs
        alone = threading.active_count() == 1
        context = multiprocessing.get_context("fork") if alone else multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for _ in range(num_workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, work, ours), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def map_ordered(self, tasks: Iterable[Task]) -> Iterator[Result]:
        source = enumerate(tasks)
        window = 4 * len(self._processes)
        idle = list(self._connections)
        busy: dict[Connection, int] = {}
        finished: dict[int, Result] = {}
        oldest, exhausted = 0, False
        while True:
            # only an idle worker is sent to: it is reading, so neither side can block the other
            while idle and not exhausted and len(busy) + len(finished) < window:
                entry = next(source, None)
                if entry is None:
                    exhausted = True
                    break
                connection = idle.pop(0)
                self._send(connection, entry[1])
                busy[connection] = entry[0]
            while oldest in finished:
                yield finished.pop(oldest)
                oldest += 1
            if not busy:
                if exhausted and not finished:
                    return
                continue
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                finished[busy.pop(ready)] = self._receive(ready)
                idle.append(ready)

    def __enter__(self) -> WorkerPool[Task, Result]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._connections:
            connection.close()  # a worker that waits for a task reads the end of the pipe and leaves
        for process in self._processes:
            if kind is not None:
                process.terminate()
            process.join()

    def _send(self, connection: Connection, task: Task) -> None:
        try:
            connection.send(task)
        except BrokenPipeError as error:
            raise self._died(connection) from error

    def _receive(self, connection: Connection) -> Result:
        try:
            succeeded, value = connection.recv()
        except (EOFError, ConnectionResetError) as error:
            raise self._died(connection) from error
        if succeeded:
            result: Result = value
            return result
        raise value

    def _died(self, connection: Connection) -> DataError:
        process = self._processes[self._connections.index(connection)]
        process.join(5)
        killed = process.exitcode == -signal.SIGKILL
        return DataError(
            f"a worker process ended unexpectedly (exit code {process.exitcode})",
            evidence="It was killed, which usually means that the system ran out of memory."
            if killed
            else "It could not say why; a fault in native code ends a process like this.",
            next_step="Use fewer --workers, or look into the system's log.",
        )


def _unexpected(error: BaseException) -> DataError:
    """An exception that nobody foresaw, as a sentence: its type, its text and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"Raised in {Path(frames[-1].filename).name}, line {frames[-1].lineno}. " if frames else ""
    memory = isinstance(error, MemoryError)
    return DataError(
        f"a worker process failed: {type(error).__name__}: {str(error)[:500]}",
        evidence=place + ("There was not enough memory." if memory else "Nobody foresaw this for any input."),
        next_step="Use fewer --workers."
        if memory
        else "Report it with this message; meanwhile leave out the input that causes it.",
    )


def _serve(connection: Connection, work: Callable[[Task], Result], parent_end: Connection) -> None:
    # a forked worker holds copies of the parent's end; with this one open it would never see the pipe close
    parent_end.close()
    while True:
        try:
            task = connection.recv()
            message: tuple[bool, object] = (True, work(task))
        except (EOFError, KeyboardInterrupt):
            return
        except PacelineError as error:
            message = (False, error)
        except OSError as error:
            message = (False, DataError(f"a worker cannot go on: {error}", next_step="Check the disk and the inputs."))
        except BaseException as error:  # noqa: BLE001 - the last chance to say why; a panic of native code is no Exception
            message = (False, _unexpected(error))
        try:
            connection.send(message)
        except (BrokenPipeError, ConnectionResetError):
            return
