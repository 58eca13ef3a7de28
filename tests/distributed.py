"""Runs any function on N gloo processes, on a laptop.

``run(func, world_size, *args)`` calls ``func(rank, world_size, *args)`` in a pool of worker processes that is kept
between tests (importing torch in a new process costs seconds), with a fresh default process group each time, and
returns the results by rank. An exception on any rank is raised here with that rank's stack trace; a worker that died or
hung is replaced, so one broken test does not take the next one with it.
"""

from __future__ import annotations

import atexit
import gc
import os
import pickle
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp


def run(func: Callable[..., Any], world_size: int, *args: Any, timeout_seconds: float = 120.0) -> list[Any]:
    """Calls ``func(rank, world_size, *args)`` on every rank and returns the results by rank.

    Raises:
        AssertionError: a rank raised (its stack trace is in the message), died, or did not answer in time.
    """
    return _POOL.run(func, world_size, args, timeout_seconds)


class _Worker:
    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self.connection, child = context.Pipe()
        self.process = context.Process(target=_serve, args=(child,), daemon=True)
        self.process.start()
        child.close()

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


class _Pool:
    def __init__(self) -> None:
        self.workers: dict[int, _Worker] = {}

    def run(
        self, func: Callable[..., Any], world_size: int, args: tuple[Any, ...], timeout_seconds: float
    ) -> list[Any]:
        # a worker keeps its rank: torch remembers meshes by their ranks, with this process's place in them
        for rank in range(world_size):
            if rank in self.workers and not self.workers[rank].process.is_alive():
                self._stop([rank])
            if rank not in self.workers:
                self.workers[rank] = _Worker()
        team = [self.workers[rank] for rank in range(world_size)]
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / "store")
            try:
                for rank, worker in enumerate(team):
                    _send(worker.connection, (func, rank, world_size, store, args, timeout_seconds))
                results, failure = self._collect(team, timeout_seconds)
            except BaseException:
                # answers that nobody has read would be taken for those of the next test
                self._stop(range(world_size))
                raise
        if failure:
            self._stop(range(world_size))
            raise AssertionError(failure)
        return results

    def _collect(self, team: list[_Worker], timeout_seconds: float) -> tuple[list[Any], str]:
        results: list[Any] = [None] * len(team)
        pending = {worker.connection: rank for rank, worker in enumerate(team)}
        failures: list[str] = []
        while pending:
            # after the first failure the others are most likely stuck in a collective: give them a moment, no more
            ready = wait(list(pending), timeout=2.0 if failures else timeout_seconds)
            if not ready:
                after = "what others raised" if failures else f"{timeout_seconds:.0f} s"
                failures.append(f"ranks {sorted(pending.values())} did not answer after {after}")
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                try:
                    ok, value = _receive(connection)
                except EOFError:
                    failures.append(f"rank {rank} died {_how(team[rank])}")
                    continue
                if ok:
                    results[rank] = value
                else:
                    failures.append(f"rank {rank} raised:\n{value}")
        return results, "\n".join(failures)

    def _stop(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self.workers.pop(rank).stop()

    def close(self) -> None:
        self._stop(list(self.workers))


def _how(worker: _Worker) -> str:
    """By its exit code: a signal's below 0. What it printed (gloo ends a process over a lost peer) is on stderr."""
    worker.process.join(5.0)
    code = worker.process.exitcode
    if code == -signal.SIGKILL:
        return "(SIGKILL: most likely the machine was out of memory)"
    return f"({signal.Signals(-code).name})" if code is not None and code < 0 else f"(exit code {code})"


def _send(connection: Connection, value: object) -> None:
    """By value: the library's own way shares memory, at the cost of an open file for each tensor."""
    connection.send_bytes(pickle.dumps(value))


def _receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            func, rank, world_size, store, args, timeout_seconds = _receive(connection)
        except (EOFError, KeyboardInterrupt):
            return
        try:
            _send(connection, (True, _call(func, rank, world_size, store, args, timeout_seconds)))
        except BaseException:  # noqa: BLE001 - everything a test raises goes back to the test
            _send(connection, (False, traceback.format_exc()))


def _call(
    func: Callable[..., Any], rank: int, world_size: int, store: str, args: tuple[Any, ...], timeout_seconds: float
) -> Any:
    import torch.distributed as dist

    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size)
    )
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_seconds),
    )
    try:
        return func(rank, world_size, *args)
    finally:
        dist.destroy_process_group()
        # models hold their groups in circles; a group that is not freed keeps its threads and sockets
        gc.collect()


_POOL = _Pool()
atexit.register(_POOL.close)
