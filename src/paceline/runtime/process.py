"""Which process of how many is this, and how do the processes find each other?

The environment is read here and nowhere else in the running program. Three ways of being started are told apart:

    torchrun   RANK and WORLD_SIZE are set (also by torchrun inside a Slurm job, and by Kubernetes operators)
    slurm      one task per process under srun; the rendezvous address is the first host of the node list
    single     neither; one process, no network
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from paceline.errors import LaunchError
from paceline.report.finding import Finding
from paceline.runtime.nodelist import expand_nodelist

Launcher = Literal["torchrun", "slurm", "single"]


@dataclass(frozen=True, kw_only=True)
class ProcessInfo:
    """Where this process stands. ``master_addr`` is empty for a single process, which needs no rendezvous."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    launcher: Launcher = "single"
    master_addr: str = ""
    master_port: int = 0
    restarts: int = 0

    @property
    def is_main(self) -> bool:
        """Rank 0 writes the run folder and speaks to the console."""
        return self.rank == 0

    @property
    def num_nodes(self) -> int:
        return -(-self.world_size // self.local_world_size)


def process_info(environ: Mapping[str, str] | None = None) -> ProcessInfo:
    """Reads the launcher's variables from ``environ`` (default: the process's own).

    Raises:
        LaunchError: variables are missing, not numbers, or contradict each other.
    """
    environ = os.environ if environ is None else environ
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _checked(_from_torchrun(environ))
    if "SLURM_PROCID" in environ and not _in_batch_script(environ):
        return _checked(_from_slurm(environ))
    return ProcessInfo()


def _from_torchrun(environ: Mapping[str, str]) -> ProcessInfo:
    world_size = _number(environ, "WORLD_SIZE")
    local_world_size = _number(environ, "LOCAL_WORLD_SIZE", world_size)
    rank = _number(environ, "RANK")
    if world_size > 1 and not environ.get("MASTER_ADDR"):
        raise LaunchError(
            f"MASTER_ADDR is not set, but WORLD_SIZE = {world_size}.",
            evidence="The processes cannot find each other without the address of rank 0.",
            next_step="Start with `paceline train RECIPE --nproc N` or torchrun, or set MASTER_ADDR and MASTER_PORT.",
        )
    return ProcessInfo(
        rank=rank,
        local_rank=_number(environ, "LOCAL_RANK", rank % max(local_world_size, 1)),
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=_number(environ, "GROUP_RANK", rank // max(local_world_size, 1)),
        launcher="torchrun",
        master_addr=environ.get("MASTER_ADDR", "") if world_size > 1 else "",
        master_port=_number(environ, "MASTER_PORT", 29500),
        restarts=_number(environ, "TORCHELASTIC_RESTART_COUNT", 0),
    )


def _in_batch_script(environ: Mapping[str, str]) -> bool:
    # sbatch gives the script itself SLURM_PROCID=0 and the job's SLURM_NTASKS; only tasks that srun started have a step
    return "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" not in environ


def _from_slurm(environ: Mapping[str, str]) -> ProcessInfo:
    world_size = _number(environ, "SLURM_STEP_NUM_TASKS", _number(environ, "SLURM_NTASKS", 1))
    tasks_per_node = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    node_rank = _number(environ, "SLURM_NODEID", 0)
    master_addr = environ.get("MASTER_ADDR", "")
    nodelist = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    if world_size > 1 and not master_addr:
        if not nodelist:
            raise LaunchError(
                f"Neither MASTER_ADDR nor SLURM_JOB_NODELIST is set, but SLURM_NTASKS = {world_size}.",
                evidence="The processes cannot find each other without the address of rank 0.",
                next_step="Start the tasks with srun, or export MASTER_ADDR in the batch script.",
            )
        master_addr = expand_nodelist(nodelist)[0]
    return ProcessInfo(
        rank=_number(environ, "SLURM_PROCID"),
        local_rank=_number(environ, "SLURM_LOCALID", 0),
        world_size=world_size,
        local_world_size=_tasks_on_node(tasks_per_node, node_rank, default=world_size),
        node_rank=node_rank,
        launcher="slurm",
        master_addr=master_addr if world_size > 1 else "",
        # the job id keeps two jobs on one node apart; 15000-30000 lies below the ephemeral ports of Linux
        master_port=_number(environ, "MASTER_PORT", 15000 + _number(environ, "SLURM_JOB_ID", 0) % 15000),
        restarts=_number(environ, "SLURM_RESTART_COUNT", 0),
    )


def _tasks_on_node(text: str, node_rank: int, default: int) -> int:
    """Reads Slurm's ``8(x2),4``: 8 tasks on each of the first two nodes, 4 on the third."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        count, _, repeat = part.partition("(x")
        counts += [int(count)] * int(repeat.rstrip(")") or 1)
    return counts[node_rank] if node_rank < len(counts) else default


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "")
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        value = repr(text) if name in environ else "not set"
        raise LaunchError(
            f"The environment variable {name} is {value}; a whole number is needed.",
            evidence="Other variables of a launcher are set (RANK, WORLD_SIZE or SLURM_PROCID), so it must be too.",
            next_step="Start with torchrun, srun or `paceline train RECIPE --nproc N`, or unset those variables.",
        ) from None


def _checked(info: ProcessInfo) -> ProcessInfo:
    if not 0 <= info.rank < info.world_size:
        raise LaunchError(
            f"Rank {info.rank} is not within the world size {info.world_size}.",
            evidence=f"Both were read from the variables of {info.launcher}.",
            next_step="Ranks count from 0 to WORLD_SIZE - 1; look at what the launcher sets.",
        )
    if not 0 <= info.local_rank < info.local_world_size <= info.world_size:
        raise LaunchError(
            f"Local rank {info.local_rank} of {info.local_world_size} on this node does not fit rank {info.rank} "
            f"of {info.world_size}.",
            evidence=f"All four were read from the variables of {info.launcher}.",
            next_step="LOCAL_RANK counts from 0 to LOCAL_WORLD_SIZE - 1 on each node; look at what the launcher sets.",
        )
    return info


def launch_findings(info: ProcessInfo, visible_gpus: int, environ: Mapping[str, str] | None = None) -> list[Finding]:
    """What looks unintended about how this process was started; ``visible_gpus`` is ``torch.cuda.device_count()``."""
    environ = os.environ if environ is None else environ
    findings = []
    if info.world_size == 1 and visible_gpus > 1:
        findings.append(
            Finding(
                id="launch/one-process-many-gpus",
                severity="note",
                subject=f"{visible_gpus} GPUs are visible, but this run is one process and uses one of them.",
                evidence="World size is 1: " + _why_single(info, environ),
                next_step=f"Start with `--nproc {visible_gpus}` to use them all, "
                "or set CUDA_VISIBLE_DEVICES to the one that is meant.",
            )
        )
    elif info.launcher == "single" and _number(environ, "SLURM_NTASKS", 1) > 1:
        findings.append(
            Finding(
                id="launch/batch-script-without-srun",
                severity="note",
                subject=f"This is a Slurm batch script of {environ['SLURM_NTASKS']} tasks, but only one process runs.",
                evidence="SLURM_STEP_ID is not set: the command was not started by srun.",
                next_step="Put `srun` before `paceline train` in the batch script.",
            )
        )
    return findings


def _why_single(info: ProcessInfo, environ: Mapping[str, str]) -> str:
    if info.launcher != "single":
        return f"{info.launcher} says so."
    if _in_batch_script(environ):
        return "inside a Slurm job, but not started by srun."
    return "not started by a launcher?"


@contextmanager
def process_group(
    info: ProcessInfo,
    device: torch.device,
    *,
    timeout_seconds: float = 600.0,
    environ: MutableMapping[str, str] | None = None,
) -> Iterator[None]:
    """Holds the default process group for as long as the block runs; one process gets a group of one.

    On CUDA the group has two backends: NCCL, bound to ``device`` (so communicators start at once, and errors show here
    instead of at the first collective), and gloo for CPU tensors: asynchronous checkpoints and ``any_rank`` use it
    without touching the GPU's stream. On the CPU it is gloo alone.

    Raises:
        LaunchError: the processes did not meet within ``timeout_seconds``, or the network refused.
    """
    environ = os.environ if environ is None else environ
    if device.type == "cuda":
        # 3 = clean up without waiting; 1 would end the process before the flight recorder's dump is written
        environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=timeout_seconds)
    try:
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=_store(info, timeout),
            rank=info.rank,
            world_size=info.world_size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise LaunchError(
            f"Rank {info.rank} of {info.world_size} could not join the process group "
            f"at {info.master_addr or 'this host'}:{info.master_port}.",
            evidence=str(error).strip().splitlines()[0],
            next_step="Check that every rank was started, that the port is free and reachable, and, on several nodes, "
            "that NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME name the right network.",
        ) from error
    try:
        yield
    except BaseException:
        _tear_down(after_error=True)
        raise
    _tear_down(after_error=False)


def _store(info: ProcessInfo, timeout: timedelta) -> dist.Store:
    if info.world_size == 1:
        return dist.HashStore()
    host = f"[{info.master_addr}]" if ":" in info.master_addr else info.master_addr
    # torch's own handler: under torchrun the agent already serves the store, and rank 0 must not open a second one
    rendezvous = dist.rendezvous(f"tcp://{host}:{info.master_port}", info.rank, info.world_size, timeout=timeout)
    store, _, _ = next(rendezvous)
    return dist.PrefixStore(f"paceline/{info.restarts}", store)


def _tear_down(*, after_error: bool) -> None:
    if not dist.is_initialized():
        return
    if after_error and dist.get_backend() != "gloo" and dist.get_world_size() > 1:
        # The others may never reach our pending collectives: waiting for them would turn an error into a hang.
        # Private in torch 2.11 to 2.13, the only call that aborts every subgroup's communicator at once without the
        # deadlock of pytorch/pytorch#119797; a public `dist.abort_process_group` is awaited.
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


def any_rank(flag: bool) -> bool:
    """Whether ``flag`` is true on any rank; the same answer on all. Collective.

    One integer over gloo on the CPU: the GPU is not synchronised, so this may run on every step.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return flag
    votes = torch.tensor([int(flag)], dtype=torch.int32)
    dist.all_reduce(votes, op=dist.ReduceOp.MAX)
    return bool(votes.item())


def let_rank_zero_speak(environ: Mapping[str, str] | None = None) -> None:
    """Waits a moment on every rank but 0, before an error is printed.

    Where all ranks meet the same error, rank 0 tells it and the launcher ends the others unheard; an error that only
    one rank meets is told by that rank, two seconds later.
    """
    environ = os.environ if environ is None else environ
    if environ.get("RANK", environ.get("SLURM_PROCID", "0")) != "0":
        time.sleep(2.0)
