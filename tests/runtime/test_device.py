from __future__ import annotations

import mmap
import platform

import pytest
import torch

from paceline.errors import LaunchError
from paceline.runtime import device
from paceline.runtime.process import ProcessInfo

CPU = torch.device("cpu")


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def local(rank: int, launcher: str = "torchrun") -> ProcessInfo:
    return ProcessInfo(rank=rank, local_rank=rank, world_size=4, local_world_size=4, launcher=launcher)  # type: ignore[arg-type]


def test_each_process_has_its_own_gpu(two_gpus: None) -> None:
    assert [device.choose_device(local(rank)).index for rank in range(2)] == [0, 1]
    assert device.choose_device(local(1), "cpu") == CPU


def test_more_processes_than_gpus(two_gpus: None) -> None:
    with pytest.raises(LaunchError) as caught:
        device.choose_device(local(3))
    assert "Local rank 3 (rank 3)" in caught.value.subject and "2 GPUs are visible" in caught.value.subject
    assert "--nproc 2" in caught.value.next_step


def test_slurm_may_show_each_task_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert device.choose_device(local(3, "slurm")) == torch.device("cuda", 0)
    with pytest.raises(LaunchError):
        device.choose_device(local(3, "torchrun"))


def test_cuda_asked_for_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert device.choose_device(ProcessInfo()) == CPU
    with pytest.raises(LaunchError, match="torch sees none"):
        device.choose_device(ProcessInfo(), "cuda")


def test_cpu_memory_sees_an_allocation() -> None:
    # pages fresh from the kernel: an allocator may hand out memory that is resident already
    size = 64 * 2**20
    with mmap.mmap(-1, size) as kept:
        before = device.memory_stats(CPU)
        kept.write(bytes(1) * size)
        after = device.memory_stats(CPU)
    assert after.allocated_bytes - before.allocated_bytes > 0.9 * size
    assert after.allocated_bytes <= after.peak_bytes < after.total_bytes
    assert after.peak_gib == after.peak_bytes / 2**30


def test_cpu_facts() -> None:
    assert device.device_name(CPU)
    assert device.capability(CPU) is None and device.supports_bf16(CPU)
    device.synchronize(CPU)
    device.reset_peak_memory(CPU)


def test_versions() -> None:
    found = device.versions()
    assert found["torch"] == torch.__version__ and found["python"] == platform.python_version()
    assert "paceline" in found and all(found.values())


@pytest.mark.gpu
def test_gpu_facts() -> None:
    gpu = torch.device("cuda", 0)
    torch.cuda.init()
    device.reset_peak_memory(gpu)
    before = device.memory_stats(gpu)
    kept = torch.empty(64 * 2**20, dtype=torch.uint8, device=gpu)
    after = device.memory_stats(gpu)
    assert after.allocated_bytes - before.allocated_bytes == kept.numel()
    assert after.peak_bytes >= after.allocated_bytes and after.total_bytes > after.reserved_bytes
    assert {"cuda", "nccl", "cudnn", "driver"} <= device.versions().keys()
    assert device.capability(gpu) == torch.cuda.get_device_capability(0) and device.device_name(gpu)
