"""Probes say what they see and nothing where they see nothing; the sampler joins samples; the page is Prometheus'."""

from __future__ import annotations

import ctypes
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from paceline.observe.telemetry import prometheus
from paceline.observe.telemetry.columns import GPU, MACHINE, UNKNOWN
from paceline.observe.telemetry.host import HostProbe, ThreadProbe
from paceline.observe.telemetry.nvml import GpuProbe
from paceline.observe.telemetry.prometheus import PrometheusServer, exposition
from paceline.observe.telemetry.sampler import Sampler


def test_the_host_is_read() -> None:
    probe = HostProbe()
    end = time.monotonic() + 0.2
    while time.monotonic() < end:
        sum(range(1000))
    found = probe.read()
    assert set(found) <= set(MACHINE) and found["process_cpu_pct"] > 10 and found["rss_mb"] > 0
    assert found["host_free_mb"] > 0 and 0 <= found["cpu_busy_pct"] <= 110


def test_infiniband_counters_are_words(tmp_path: Path) -> None:
    counters = tmp_path / "mlx5_0" / "ports" / "1" / "counters"
    counters.mkdir(parents=True)
    received, sent = counters / "port_rcv_data", counters / "port_xmit_data"
    received.write_text("0")
    sent.write_text("garbage")
    probe = HostProbe(infiniband=tmp_path, pressure=tmp_path / "none")
    received.write_text(str(2**28))
    time.sleep(0.1)
    found = probe.read()
    # 2^28 words of 4 bytes are 2^20 KiB, in about 0.1 s
    assert 2**20 * 3 < found["rdma_in_kbs"] < 2**20 * 11 and found["rdma_out_kbs"] == 0
    assert found["cpu_pressure_x100"] == UNKNOWN


def test_a_thread_sees_its_own_processor_time() -> None:
    probe = ThreadProbe()
    time.sleep(0.05)
    asleep, *_ = probe.read()
    end = time.thread_time() + 0.05
    while time.thread_time() < end:
        sum(range(1000))
    awake, queue, preempted = probe.read()
    assert asleep < 20_000 and 40_000 < awake < 80_000 and queue >= UNKNOWN and preempted >= 0
    probe.close()


class Library:
    """An NVML that knows clocks and power, and nothing else."""

    def nvmlInit_v2(self) -> int:  # noqa: N802
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:  # noqa: N802
        return 0 if uuid == b"GPU-1" else 6

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: ctypes.c_uint, value: Any) -> int:  # noqa: N802
        value._obj.value = {1: 1980, 2: 3201}[kind.value]
        return 0

    nvmlDeviceGetMaxClockInfo = nvmlDeviceGetClockInfo  # noqa: N815

    def nvmlDeviceGetPowerUsage(self, handle: Any, value: Any) -> int:  # noqa: N802
        value._obj.value = 650_123
        return 0

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any, value: Any) -> int:  # noqa: N802
        value._obj.value = 0x4
        return 0

    def nvmlDeviceGetTemperature(self, handle: Any, kind: Any, value: Any) -> int:  # noqa: N802
        return 3  # not supported


def test_a_gpu_says_what_its_driver_knows() -> None:
    probe = GpuProbe.open("GPU-1", load=lambda name: Library())
    assert probe is not None and probe.facts == {"gpu_clock_max_mhz": 1980, "gpu_power_limit_w": UNKNOWN}
    assert probe.read() == dict(zip(GPU, (1980, 3201, 650, UNKNOWN, 0x4, UNKNOWN), strict=True))


@pytest.mark.parametrize("uuid", ["GPU-2", "GPU-1"])
def test_without_nvml_there_is_no_gpu(uuid: str) -> None:
    def load(name: str) -> Any:
        if uuid == "GPU-1":
            raise OSError("no such library")
        return Library()

    assert GpuProbe.open(uuid, load=load) is None


def test_samples_are_joined() -> None:
    values = iter([{"gpu_power_w": 100, "gpu_throttle_bits": 4}, {"gpu_power_w": 300, "gpu_throttle_bits": 8}])
    sampler = Sampler([lambda: next(values)])
    assert sampler.take()["gpu_power_w"] == UNKNOWN
    sampler.sample()
    sampler.sample()
    taken = sampler.take()
    assert taken["gpu_power_w"] == 200 and taken["gpu_throttle_bits"] == 12
    assert sampler.take() == taken  # nothing new: the last stands
    sampler.sample()  # the probe is exhausted, raises, and is left out from here on
    sampler.sample()
    assert sampler.take()["gpu_power_w"] == UNKNOWN


def test_the_sampler_runs_by_itself_and_stops() -> None:
    seen = threading.Event()

    def probe() -> dict[str, int]:
        seen.set()
        return {"rss_mb": 1}

    sampler = Sampler([probe], seconds=0.01)
    sampler.start()
    assert seen.wait(5)
    sampler.close()
    assert sampler.take()["rss_mb"] == 1


def test_the_page_is_prometheus_text() -> None:
    server = PrometheusServer(
        0, {"run": 'a "b"\n', "rank": "0"}, lambda: {"step": 12.0, "loss": 2.5, "mfu": float("nan")}, host="127.0.0.1"
    )
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=5) as answer:
        text = answer.read().decode()
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert text == (
        "# TYPE paceline_step gauge\n" + 'paceline_step{run="a \\"b\\"\\n",rank="0"} 12\n'
        "# TYPE paceline_loss gauge\n" + 'paceline_loss{run="a \\"b\\"\\n",rank="0"} 2.5\n'
    )
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}/else", timeout=5)
    taken = PrometheusServer(server.port or 0, {}, dict, host="127.0.0.1")
    assert taken.port is None
    taken.close()
    server.close()


def test_a_port_that_is_none_costs_the_page_alone(caplog: pytest.LogCaptureFixture) -> None:
    server = PrometheusServer(65536, {}, dict, host="127.0.0.1")
    assert server.port is None and "no Prometheus page on port 65536" in caplog.text
    server.close()


def test_clients_that_reset_or_say_nothing_leave_no_trace(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prometheus, "_IDLE_SECONDS", 0.1)
    before, answered = threading.active_count(), threading.Event()

    def values() -> dict[str, float]:
        time.sleep(0.2)  # the client is gone when it is answered
        answered.set()
        return {f"value_{index}": 1.0 for index in range(100_000)}

    server = PrometheusServer(0, {}, values, host="127.0.0.1")
    silent = socket.create_connection(("127.0.0.1", server.port or 0))
    resetting = socket.create_connection(("127.0.0.1", server.port or 0))
    resetting.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
    resetting.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    resetting.close()
    assert answered.wait(10)
    until = time.monotonic() + 10
    while threading.active_count() > before + 1 and time.monotonic() < until:
        time.sleep(0.02)
    assert threading.active_count() <= before + 1, "only the server's own thread is left"
    assert silent.recv(1) == b""
    silent.close()
    server.close()
    told = capfd.readouterr()
    assert not told.err and not told.out


def test_every_sample_is_a_line_of_its_own() -> None:
    assert exposition({"a": 1.0, "b": 2.0}, "").count("\n") == 4
    assert exposition({"skipped_steps_total": 3.0}, "").startswith("# TYPE paceline_skipped_steps_total counter\n")
