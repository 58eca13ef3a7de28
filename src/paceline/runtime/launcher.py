"""Which process of how many is this? Read from the launcher's environment, here and nowhere else.

Three ways of being started are told apart:

    torchrun   RANK and WORLD_SIZE are set (also by torchrun inside a Slurm job, and by Kubernetes operators)
    slurm      one task per process under srun; the rendezvous address is the first host of the node list
    single     neither; one process, no network

Torch-free, so that a recipe is checked against the world size before torch is loaded.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from paceline.errors import LaunchError, LostContactError, PacelineError
from paceline.runtime.nodelist import expand_nodelist

Launcher = Literal["torchrun", "slurm", "single"]

LAUNCHER_PID = "PACELINE_LAUNCHER_PID"
"""Environment variable that tells a process of `paceline --nproc` which launcher it belongs to."""


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
    if "SLURM_PROCID" in environ and not in_batch_script(environ):
        return _checked(_from_slurm(environ))
    return ProcessInfo()


def _from_torchrun(environ: Mapping[str, str]) -> ProcessInfo:
    world_size = number_of(environ, "WORLD_SIZE")
    local_world_size = number_of(environ, "LOCAL_WORLD_SIZE", world_size)
    rank = number_of(environ, "RANK")
    if world_size > 1 and not environ.get("MASTER_ADDR"):
        raise LaunchError(
            f"MASTER_ADDR is not set, but WORLD_SIZE = {world_size}.",
            evidence="The processes cannot find each other without the address of rank 0.",
            next_step="Start with `paceline train RECIPE --nproc N` or torchrun, or set MASTER_ADDR and MASTER_PORT.",
        )
    return ProcessInfo(
        rank=rank,
        local_rank=number_of(environ, "LOCAL_RANK", rank % max(local_world_size, 1)),
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=number_of(environ, "GROUP_RANK", rank // max(local_world_size, 1)),
        launcher="torchrun",
        master_addr=environ.get("MASTER_ADDR", "") if world_size > 1 else "",
        master_port=number_of(environ, "MASTER_PORT", 29500),
        restarts=number_of(environ, "TORCHELASTIC_RESTART_COUNT", 0),
    )


def in_batch_script(environ: Mapping[str, str]) -> bool:
    """Whether this is a Slurm batch script itself, not a task of it."""
    # sbatch gives the script itself SLURM_PROCID=0 and the job's SLURM_NTASKS; only tasks that srun started have a step
    return "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" not in environ


def _from_slurm(environ: Mapping[str, str]) -> ProcessInfo:
    world_size = number_of(environ, "SLURM_STEP_NUM_TASKS", number_of(environ, "SLURM_NTASKS", 1))
    tasks_per_node = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    node_rank = number_of(environ, "SLURM_NODEID", 0)
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
        rank=number_of(environ, "SLURM_PROCID"),
        local_rank=number_of(environ, "SLURM_LOCALID", 0),
        world_size=world_size,
        local_world_size=_tasks_on_node(tasks_per_node, node_rank, default=world_size),
        node_rank=node_rank,
        launcher="slurm",
        master_addr=master_addr if world_size > 1 else "",
        # the job id keeps two jobs on one node apart; 15000-30000 lies below the ephemeral ports of Linux
        master_port=number_of(environ, "MASTER_PORT", 15000 + number_of(environ, "SLURM_JOB_ID", 0) % 15000),
        restarts=number_of(environ, "SLURM_RESTART_COUNT", 0),
    )


def _tasks_on_node(text: str, node_rank: int, default: int) -> int:
    """Reads Slurm's ``8(x2),4``: 8 tasks on each of the first two nodes, 4 on the third."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        count, _, repeat = part.partition("(x")
        counts += [int(count)] * int(repeat.rstrip(")") or 1)
    return counts[node_rank] if node_rank < len(counts) else default


def number_of(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """The variable ``name`` as a whole number.

    Raises:
        LaunchError: it is not one, or is not set and there is no default.
    """
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


def wait_for_turn(error: PacelineError, environ: Mapping[str, str] | None = None) -> None:
    """Waits, before an error is printed, for a rank that has more to say; the launcher then ends this one unheard.

    Where all ranks meet the same error, rank 0 tells it; one that only another rank meets is told two seconds later. A
    rank that has only lost contact gives all others ten seconds.
    """
    environ = os.environ if environ is None else environ
    if isinstance(error, LostContactError):
        time.sleep(10.0)
    elif environ.get("RANK", environ.get("SLURM_PROCID", "0")) != "0":
        time.sleep(2.0)
