from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distributed import run
from paceline.errors import LaunchError
from paceline.runtime.process import (
    ProcessInfo,
    _let_flight_recorder_write,
    any_rank,
    launch_findings,
    process_group,
    process_info,
)

TORCHRUN = {
    "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "MASTER_ADDR": "node0", "MASTER_PORT": "1234", "TORCHELASTIC_RESTART_COUNT": "2",
}  # fmt: skip
SLURM = {
    "SLURM_JOB_ID": "31007", "SLURM_STEP_ID": "0", "SLURM_PROCID": "9", "SLURM_NTASKS": "12", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1", "SLURM_TASKS_PER_NODE": "8,4", "SLURM_JOB_NODELIST": "gpu[07-08]",
}  # fmt: skip


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


def test_torchrun() -> None:
    info = process_info(TORCHRUN)
    assert info == ProcessInfo(
        rank=5, local_rank=1, world_size=8, local_world_size=4, node_rank=1,
        launcher="torchrun", master_addr="node0", master_port=1234, restarts=2,
    )  # fmt: skip
    assert info.num_nodes == 2 and not info.is_main


def test_torchrun_inside_a_slurm_job_wins() -> None:
    assert process_info(SLURM | TORCHRUN).launcher == "torchrun"


def test_slurm() -> None:
    assert process_info(SLURM) == ProcessInfo(
        rank=9, local_rank=1, world_size=12, local_world_size=4, node_rank=1,
        launcher="slurm", master_addr="gpu07", master_port=16007,
    )  # fmt: skip


def test_slurm_step_smaller_than_its_job() -> None:
    step = {
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "gpu08", "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_PROCID": "1", "SLURM_NODEID": "0",
    }  # fmt: skip
    info = process_info(SLURM | step)
    assert (info.world_size, info.local_world_size, info.master_addr) == (2, 2, "gpu08")


def test_batch_script_without_srun_is_one_process_and_says_so() -> None:
    environ = without(SLURM, "SLURM_STEP_ID") | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    info = process_info(environ)
    assert info == ProcessInfo()
    (finding,) = launch_findings(info, visible_gpus=1, environ=environ)
    assert finding.id == "launch.batch-script-without-srun" and "12 tasks" in finding.subject
    assert "srun" in finding.next_step


def test_single() -> None:
    assert process_info({}) == ProcessInfo()


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (without(TORCHRUN, "MASTER_ADDR"), ["MASTER_ADDR is not set", "WORLD_SIZE = 8"]),
        (without(TORCHRUN, "RANK"), ["RANK is not set"]),
        (without(TORCHRUN, "WORLD_SIZE"), ["WORLD_SIZE is not set"]),
        (TORCHRUN | {"WORLD_SIZE": "eight"}, ["WORLD_SIZE is 'eight'"]),
        (TORCHRUN | {"RANK": "8"}, ["Rank 8", "world size 8"]),
        (TORCHRUN | {"LOCAL_RANK": "4"}, ["Local rank 4 of 4"]),
        (without(SLURM, "SLURM_JOB_NODELIST"), ["SLURM_JOB_NODELIST", "SLURM_NTASKS = 12"]),
    ],
)
def test_bad_environments_are_refused_with_value_and_next_step(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(LaunchError) as caught:
        process_info(environ)
    assert all(word in caught.value.subject for word in words), caught.value.subject
    assert caught.value.next_step


def test_many_gpus_but_one_process() -> None:
    """Case 79: eight visible GPUs, world size 1."""
    (finding,) = launch_findings(ProcessInfo(), visible_gpus=8, environ={})
    assert finding.severity == "note"
    assert "8 GPUs" in finding.subject and "not started by a launcher?" in finding.evidence
    assert "--nproc 8" in finding.next_step
    assert launch_findings(process_info(TORCHRUN), visible_gpus=8, environ=TORCHRUN) == []
    assert launch_findings(ProcessInfo(), visible_gpus=1, environ={}) == []


def test_group_of_one_needs_no_network_and_can_be_made_twice() -> None:
    for _ in range(2):
        with process_group(ProcessInfo(), torch.device("cpu")):
            value = torch.ones(3)
            dist.all_reduce(value)
            assert value.tolist() == [1, 1, 1] and any_rank(True)
        assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("environ", "value"),
    [
        ({}, "3"),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCHELASTIC_RUN_ID": "none"}, "3"),  # torchrun's own
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCHELASTIC_RUN_ID": "none"}, "0"),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, "1"),
    ],
)
def test_errors_of_nccl_leave_time_for_the_flight_recorder(environ: dict[str, str], value: str) -> None:
    _let_flight_recorder_write(environ)
    assert environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == value


def test_group_is_torn_down_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), process_group(ProcessInfo(), torch.device("cpu")):
        raise ZeroDivisionError
    assert not dist.is_initialized()


def test_a_missing_rank_is_a_launch_error() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    info = ProcessInfo(
        rank=1, world_size=2, local_rank=1, local_world_size=2, master_addr="127.0.0.1", master_port=port
    )
    with (
        pytest.raises(LaunchError, match=f"Rank 1 of 2 .* 127.0.0.1:{port}"),
        process_group(info, torch.device("cpu"), timeout_seconds=1),
    ):
        raise AssertionError("must not get here")


LATE = """
import sys, torch, torch.distributed as dist
from paceline.errors import LaunchError
from paceline.runtime.process import process_group, process_info
info = process_info()
try:
    with process_group(info, torch.device("cpu"), timeout_seconds=float(sys.argv[1])):
        dist.barrier()  # both have met: what comes after takes its own time
        if info.rank == 1:
            sys.stdin.read()
            sys.exit()
        dist.all_reduce(torch.ones(1))
except LaunchError as error:
    print(type(error).__name__, error)
"""


def test_a_rank_that_does_not_come_is_waited_for_and_then_told_plainly() -> None:
    """Rank 1 hangs until the test lets it go."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    first, hung = (
        subprocess.Popen(
            [sys.executable, "-c", LATE, "6"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    )
    try:
        told = first.communicate(timeout=120)[0]
    finally:
        hung.communicate(timeout=120)
    assert told.startswith("LaunchError rank 0 of 2 waited 6 s for another rank in a collective"), told
    assert "Timed out waiting" in told and "`paceline explain RUN`" in told


def _vote(rank: int, world_size: int) -> tuple[bool, bool]:
    return any_rank(rank == 1), any_rank(False)


def test_any_rank_is_the_same_on_all() -> None:
    assert run(_vote, 2) == [(True, False), (True, False)]


SCRIPT = """
import torch, torch.distributed as dist
from paceline.runtime.process import process_group, process_info
info = process_info()
with process_group(info, torch.device("cpu"), timeout_seconds=60):
    total = torch.tensor([info.rank + 1])
    dist.all_reduce(total)
    print(f"{info.launcher} {info.rank} {total.item()}\\n", end="", flush=True)
"""


def test_two_processes_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["torchrun 0 3", "torchrun 1 3"]


def test_two_processes_under_slurm_variables(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "localhost"}
    shared |= {"MASTER_PORT": str(port), "SLURM_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    inherited = without(dict(os.environ), "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=inherited | shared | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert outputs == ["slurm 0 3\n", "slurm 1 3\n"]


GPU_SCRIPT = """
import sys, torch, torch.distributed as dist
from paceline.runtime.device import choose_device
from paceline.runtime.process import any_rank, process_group, process_info
info = process_info()
device = choose_device(info, "cuda")
with process_group(info, device, timeout_seconds=60):
    pair = dist.new_group(list(range(info.world_size)))
    total = torch.tensor([info.rank + 1.0], device=device)
    dist.all_reduce(total, group=pair)
    assert total.item() == info.world_size * (info.world_size + 1) / 2
    assert any_rank(info.rank == 0) and not any_rank(False)
    print(f"met {info.rank}\\n", end="", flush=True)
    if "fail" in sys.argv:
        if info.rank == 0:
            dist.all_reduce(total, async_op=True)  # the other rank never comes
            raise ZeroDivisionError("on purpose")
        raise ZeroDivisionError("on purpose, too")
"""


@pytest.mark.gpu
@pytest.mark.parametrize("fails", [False, True])
def test_nccl_under_torchrun(tmp_path: Path, fails: bool) -> None:
    """One process a GPU (two at most); after an error the processes end by themselves, long before the timeout."""
    count = min(torch.cuda.device_count(), 2)
    script = tmp_path / "script.py"
    script.write_text(GPU_SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", str(script)]
    result = subprocess.run(command + ["fail"] * fails, capture_output=True, text=True, timeout=150)
    assert (result.returncode != 0) == fails, result.stderr
    assert sorted(result.stdout.splitlines()) == [f"met {rank}" for rank in range(count)]
    assert ("on purpose" in result.stderr) == fails
