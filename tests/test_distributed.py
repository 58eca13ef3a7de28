"""The pool of gloo workers: what one test breaks, the next does not see."""

from __future__ import annotations

import os
import signal

import pytest

import distributed
from distributed import run


class _Unreadable:
    """Raises where it is unpickled: in the process of the tests."""

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return _refuse, ()


def _refuse() -> None:
    raise ValueError("cannot be read")


def _rank(rank: int, world_size: int) -> int:
    return rank


def _unreadable_from_the_first(rank: int, world_size: int) -> object:
    return _Unreadable() if rank == 0 else "the answer of another test"


def _raises_on_the_last(rank: int, world_size: int) -> int:
    assert rank < world_size - 1, "for the test"
    return rank


def test_results_come_back_by_rank_and_errors_with_their_trace() -> None:
    assert run(_rank, 2) == [0, 1]
    with pytest.raises(AssertionError, match=r"rank 1 raised:[\s\S]*for the test"):
        run(_raises_on_the_last, 2)
    assert run(_rank, 2) == [0, 1]


def test_what_cannot_be_read_does_not_reach_the_next_test() -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        run(_unreadable_from_the_first, 2)
    assert run(_rank, 2) == [0, 1]


def _ends(rank: int, world_size: int) -> int:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGABRT)
    return rank


def test_a_worker_that_dies_says_how() -> None:
    with pytest.raises(AssertionError, match=r"rank 1 died \(SIGABRT\)"):
        run(_ends, 2)
    assert run(_rank, 2) == [0, 1]


def test_a_worker_that_died_is_replaced() -> None:
    assert run(_rank, 2) == [0, 1]
    process = distributed._POOL.workers[1].process
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert run(_rank, 2) == [0, 1]
