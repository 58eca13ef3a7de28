"""How do the processes of a run find each other, agree, and part again?

Which process this is, `launcher.py` reads from the environment.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline.errors import LaunchError, LostContactError
from paceline.report.finding import Finding
from paceline.runtime.launcher import ProcessInfo as ProcessInfo
from paceline.runtime.launcher import in_batch_script, number_of
from paceline.runtime.launcher import process_info as process_info


def launch_findings(info: ProcessInfo, visible_gpus: int, environ: Mapping[str, str] | None = None) -> list[Finding]:
    """What looks unintended about how this process was started; ``visible_gpus`` is ``torch.cuda.device_count()``."""
    environ = os.environ if environ is None else environ
    findings = []
    if info.world_size == 1 and visible_gpus > 1:
        findings.append(
            Finding(
                id="launch.one-process-many-gpus",
                severity="note",
                subject=f"{visible_gpus} GPUs are visible, but this run is one process and uses one of them.",
                evidence="World size is 1: " + _why_single(info, environ),
                next_step=f"Start with `--nproc {visible_gpus}` to use them all, "
                "or set CUDA_VISIBLE_DEVICES to the one that is meant.",
            )
        )
    elif info.launcher == "single" and number_of(environ, "SLURM_NTASKS", 1) > 1:
        findings.append(
            Finding(
                id="launch.batch-script-without-srun",
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
    if in_batch_script(environ):
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
        LostContactError: another rank ended in the middle of the block.
        LaunchError: also if another rank did not come to a collective in that time (gloo; NCCL ends the process).
    """
    environ = os.environ if environ is None else environ
    if device.type == "cuda":
        _let_flight_recorder_write(environ)
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
    except RuntimeError as error:
        _tear_down(after_error=True)
        if any(words in str(error) for words in _PEER_IS_GONE):
            raise LostContactError(
                f"rank {info.rank} of {info.world_size} lost contact with another rank in the middle of a collective",
                evidence=str(error).splitlines()[0],
                next_step="The rank that ended first knows why: see its message, or its file in the run folder's logs. "
                "Without either, the system ended it (out of memory?): look at `dmesg`.",
            ) from error
        if _PEER_IS_LATE in str(error):
            raise LaunchError(
                f"rank {info.rank} of {info.world_size} waited {timeout_seconds:g} s for another rank in a collective, "
                "and gave up",
                evidence=str(error).splitlines()[0],
                next_step="`paceline explain RUN`, with the run's folder, names the rank that hangs and shows where. "
                "If it was only slow, raise cluster.timeout_seconds.",
            ) from error
        raise
    except BaseException:
        _tear_down(after_error=True)
        raise
    _tear_down(after_error=False)


def _let_flight_recorder_write(environ: MutableMapping[str, str]) -> None:
    """Errors of NCCL are handled by 3 (no waiting for its clean-up), unless another value was asked for."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    # torchrun (2.11 to 2.13) gives its processes 1, which ends one before the dump is written
    if environ.get(name) in (None, "1" if "TORCHELASTIC_RUN_ID" in environ else None):
        environ[name] = "3"


_PEER_IS_GONE = ("Connection closed by peer", "Connection reset by peer", "remote process exited")
"""What gloo and NCCL say; they have no class of error for it."""
_PEER_IS_LATE = "Timed out waiting"
"""What gloo says after the timeout of its group."""


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
