"""Starts the processes of this machine, through torch's own elastic launcher.

Each process runs the same command line again, with the environment that torchrun would give it; a process that fails
ends the others. Signals are passed on and waited for, so that a run that is asked to stop can save first.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import psutil
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from paceline.errors import LaunchError


def start_local(arguments: Sequence[str], num_processes: int, *, use_gpus: bool = True) -> int:
    """Runs ``paceline ARGUMENTS`` in ``num_processes`` processes of this machine and returns the exit code.

    The exit code is 0, the code of the first process that failed, or 130 after Ctrl-C.

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
        # not SIGTERM and SIGINT: the launcher would kill processes that are still saving
        signals_to_handle="SIGHUP",
    )
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
    with _pass_signals_on() as received:
        try:
            elastic_launch(config, sys.executable)("-m", "paceline", *arguments)
        except ChildFailedError as error:
            _, failure = error.get_first_failure()
            # a negative code is the signal that ended the process; the shell's convention is 128 + signal
            return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return 128 + signal.SIGINT if signal.SIGINT in received else 0


@contextmanager
def _pass_signals_on() -> Iterator[list[int]]:
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        # a terminal sends Ctrl-C to every process of the group itself; a second copy would mean "at once"
        if number == signal.SIGTERM:
            for child in psutil.Process().children():
                child.send_signal(number)
        received.append(number)

    previous = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
