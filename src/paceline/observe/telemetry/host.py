"""What are this machine's processors, memory, disks and networks doing? Read from the kernel's counters."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import psutil

from paceline.observe.telemetry.columns import UNKNOWN

_INFINIBAND = Path("/sys/class/infiniband")
_PRESSURE = Path("/proc/pressure/cpu")


class HostProbe:
    """Rates between two calls of ``read``; levels at the second. What a container hides is left unknown."""

    def __init__(self, infiniband: Path = _INFINIBAND, pressure: Path = _PRESSURE) -> None:
        self._process = psutil.Process()
        self._counters = sorted(infiniband.glob("*/ports/*/counters")) if infiniband.is_dir() else []
        self._pressure = pressure
        self._last_time = time.monotonic()
        self._last = self._totals()

    def read(self) -> dict[str, int]:
        """By name of `columns.MACHINE`."""
        now, totals = time.monotonic(), self._totals()
        seconds = max(now - self._last_time, 1e-3)
        before, self._last, self._last_time = self._last, totals, now

        def rate(name: str) -> float | None:
            return None if name not in totals or name not in before else (totals[name] - before[name]) / seconds

        cpus = psutil.cpu_count() or 1
        found = {
            "cpu_busy_pct": _scaled(rate("cpu_busy"), 100 / cpus),
            "process_cpu_pct": _scaled(rate("process_cpu"), 100),
            "io_wait_pct": _scaled(rate("io_wait"), 100 / cpus),
            "disk_read_kbs": _scaled(rate("disk_read"), 1 / 1024),
            "disk_write_kbs": _scaled(rate("disk_write"), 1 / 1024),
            "network_in_kbs": _scaled(rate("network_in"), 1 / 1024),
            "network_out_kbs": _scaled(rate("network_out"), 1 / 1024),
            # the counters count words of four bytes
            "rdma_in_kbs": _scaled(rate("rdma_in"), 4 / 1024),
            "rdma_out_kbs": _scaled(rate("rdma_out"), 4 / 1024),
            # share of the time in which something that could run had no processor, in hundredths of a percent
            "cpu_pressure_x100": _scaled(rate("pressure"), 1e-2),
        }
        with contextlib.suppress(OSError, psutil.Error):
            found["load_x100"] = round(os.getloadavg()[0] * 100)
            found["host_free_mb"] = psutil.virtual_memory().available >> 20
            found["rss_mb"] = self._process.memory_info().rss >> 20
        return found

    def _totals(self) -> dict[str, float]:
        totals: dict[str, float] = {}
        with contextlib.suppress(OSError, psutil.Error, AttributeError):
            times = psutil.cpu_times()
            waiting = getattr(times, "iowait", 0.0)
            totals["cpu_busy"] = sum(times[:7]) - times.idle - waiting if len(times) >= 7 else times.user + times.system
            totals["io_wait"] = waiting
            own = self._process.cpu_times()
            totals["process_cpu"] = own.user + own.system
        with contextlib.suppress(OSError, psutil.Error, RuntimeError):
            disks = psutil.disk_io_counters()
            if disks is not None:
                totals |= {"disk_read": disks.read_bytes, "disk_write": disks.write_bytes}
        with contextlib.suppress(OSError, psutil.Error):
            network = psutil.net_io_counters()
            if network is not None:
                totals |= {"network_in": network.bytes_recv, "network_out": network.bytes_sent}
        if self._counters:
            totals["rdma_in"] = sum(_number(folder / "port_rcv_data") for folder in self._counters)
            totals["rdma_out"] = sum(_number(folder / "port_xmit_data") for folder in self._counters)
        with contextlib.suppress(OSError, ValueError, IndexError):
            # microseconds, of which 1e6 a second are all
            totals["pressure"] = float(self._pressure.read_text().split("total=", 1)[1].split()[0])
        return totals


def _scaled(rate: float | None, factor: float) -> int:
    return UNKNOWN if rate is None else max(0, round(rate * factor))


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


class ThreadProbe:
    """What the thread that made it was given by the kernel: time on a processor, time waiting for one, preemptions."""

    def __init__(self) -> None:
        task = Path(f"/proc/self/task/{_native_id()}/schedstat")
        self._file = task.open("rb", buffering=0) if _readable(task) else None
        self._last = self._totals()

    def read(self) -> tuple[int, int, int]:
        """(CPU us, us in the run queue, times preempted) since the last call; the last two unknown off Linux."""
        now = self._totals()
        before, self._last = self._last, now
        cpu, queue, preempted = (new - old for new, old in zip(now, before, strict=True))
        return cpu // 1000, max(queue, 0) // 1000 if self._file else UNKNOWN, preempted

    def _totals(self) -> tuple[int, int, int]:
        waited = 0
        if self._file is not None:
            with contextlib.suppress(OSError, ValueError, IndexError):
                self._file.seek(0)
                waited = int(self._file.read(64).split()[1])
        return time.thread_time_ns(), waited, _preemptions()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _native_id() -> int:
    import threading

    return threading.get_native_id()


def _readable(path: Path) -> bool:
    try:
        return len(path.read_bytes().split()) >= 3
    except OSError:
        return False


def _preemptions() -> int:
    import resource

    who = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)
    return resource.getrusage(who).ru_nivcsw
