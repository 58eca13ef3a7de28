"""Starts the processes of this machine, through torch's own elastic launcher.

Each process runs the same command line again, with the environment that torchrun would give it; a process that fails
ends the others. Signals are passed on and waited for, so that a run that is asked to stop can save first. Processes do
not outlive the launcher: if it is killed, they are asked to stop as by SIGTERM.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

import psutil
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from paceline.errors import LaunchError
from paceline.runtime.launcher import LAUNCHER_PID
from paceline.runtime.signals import STOPPING, stop_signals, tell_terminal


class Ended(NamedTuple):
    """How the processes ended."""

    code: int
    """0, or the code of the first process that failed; 128 + the signal that ended it."""
    signal: int
    """The first signal that the launcher was sent, 0 = none."""


def start_local(
    arguments: Sequence[str], num_processes: int, *, use_gpus: bool = True, when_interrupted: str = STOPPING
) -> Ended:
    """Runs ``paceline ARGUMENTS`` in ``num_processes`` processes of this machine and waits for their end.

    Args:
        when_interrupted: what the terminal is told at the first Ctrl-C.

    Raises:
        LaunchError: there are GPUs, but fewer than processes.
    """
    gpus = torch.cuda.device_count() if use_gpus else 0
    if 0 < gpus < num_processes:
        raise LaunchError(
            f"--nproc {num_processes} asks for more processes than the {gpus} GPUs that are visible",
            evidence="Each process needs a GPU of its own.",
            next_step=f"Use --nproc {gpus}, look at CUDA_VISIBLE_DEVICES, or set cluster.device = 'cpu'.",
        )
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # our own processes say what failed
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id="paceline",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        # none that asks a run to stop: torch's launcher would kill processes that are still saving
        signals_to_handle="SIGQUIT",
    )
    os.environ[LAUNCHER_PID] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
    with _pass_signals_on(when_interrupted) as received:
        try:
            elastic_launch(config, sys.executable)("-m", "paceline", *arguments)
        except ChildFailedError as error:
            _, failure = error.get_first_failure()
            # a negative code is the signal that ended the process; the shell's convention is 128 + signal
            code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
            return Ended(code, received[0] if received else 0)
    return Ended(0, received[0] if received else 0)


def end_with_launcher() -> None:
    """In a process that `start_local` started: asks the kernel for SIGTERM when the launcher ends. Linux only."""
    parent = os.environ.get(LAUNCHER_PID)
    if parent is None or sys.platform != "linux":
        return
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>; Python has no call of its own
    ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGTERM)
    if os.getppid() != int(parent):  # it ended before the call
        os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def _pass_signals_on(when_interrupted: str) -> Iterator[list[int]]:
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        # torch starts each process in a session of its own: the terminal's Ctrl-C reaches the launcher alone
        if number == signal.SIGINT and number not in received:
            tell_terminal(when_interrupted)
        received.append(number)
        for child in psutil.Process().children():
            child.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in stop_signals()}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
