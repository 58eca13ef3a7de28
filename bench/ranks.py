"""The processes of one job: started, watched, ended; also several ranks of a run on one GPU."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


class Ranks:
    """Processes in a process group of their own. The first that fails ends the others, which would wait for it."""

    def __init__(self, arguments: Sequence[str], environments: Sequence[Mapping[str, str]], log: Path) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        with log.open("wb") as out:
            for environment in environments:
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, *arguments],
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        stdin=subprocess.DEVNULL,
                        env=environment,
                        # of the first one, which is not waited for before all are started
                        process_group=self._processes[0].pid if self._processes else 0,
                    )
                )

    def poll(self) -> int | None:
        """None while any runs; else 0, or the code of one that failed."""
        codes = [process.poll() for process in self._processes]
        failed = [code for code in codes if code]
        if failed and None in codes:
            self.stop()
        return failed[0] if failed else None if None in codes else 0

    def stop(self) -> None:
        """A launcher passes SIGTERM on; what is still there a while after is killed."""
        for number, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, 10)):
            try:
                os.killpg(self._processes[0].pid, number)
            except ProcessLookupError:
                return
            if self._ended_within(patience):
                return

    def _ended_within(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        for process in self._processes:
            try:
                process.wait(timeout=max(end - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                return False
        return True


def sharing_one_gpu(environment: Mapping[str, str], processes: int) -> list[dict[str, str]]:
    """The environments of ranks that share the GPU they see, each as if it were alone on a host of its own.

    NCCL refuses two ranks on one GPU of one host ("Duplicate GPU detected"), and tells hosts apart by NCCL_HOSTID.
    Between hosts it takes the network: here sockets of the loopback device, several to a connection.
    """
    common = {
        "WORLD_SIZE": str(processes),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    usual = {
        "NCCL_NET": "Socket",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_NSOCKS_PERTHREAD": "4",
        "NCCL_SOCKET_NTHREADS": "4",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes)),
    }
    return [
        {
            **usual,
            **environment,
            **common,
            "RANK": str(rank),
            "GROUP_RANK": str(rank),
            "NCCL_HOSTID": f"paceline-{rank}",
        }
        for rank in range(processes)
    ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
