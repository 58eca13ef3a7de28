"""Would the processes of a run fit the memory of this host? Asked before they start.

On a CPU everything lives there, on GPUs what `parallel.offload` leaves there.
"""

from __future__ import annotations

from paceline.config.run import RunConfig
from paceline.costs.memory import estimate_pipeline
from paceline.errors import ConfigError
from paceline.report import units
from paceline.report.finding import Finding
from paceline.runtime.host import HostMemory

PROCESS_BYTES = 2**28
"""Of Python and torch in a process, beside the run: one of a few thousand parameters peaks at 0.34 GiB on a CPU, a part
of which are libraries that processes share."""

FULL = 0.8
"""Of what is available: from here on it is doubtful."""


def host_findings(
    config: RunConfig, world_size: int, processes: int, *, on_cpu: bool, memory: HostMemory
) -> list[Finding]:
    """A warning where ``processes`` of the run would fill most of the host's free memory.

    Raises:
        ConfigError: they need more than the host has, and `cluster.check_host_memory` is on.
    """
    if not on_cpu and config.parallel.offload == "none":
        return []
    estimates = estimate_pipeline(config, world_size)
    each = sum(found.host + (found.total if on_cpu else 0) for found in estimates) / len(estimates) + PROCESS_BYTES
    needed = each * processes
    subject = (
        f"{processes} process{'es' * (processes > 1)} of this run need{'s' * (processes == 1)} about "
        f"{units.size(needed)} of host memory"
    )
    where = "No GPU is used, so all of it is there" if on_cpu else f"parallel.offload = {config.parallel.offload!r}"
    ways = _ways_to_less(config) if on_cpu else "parallel.offload = 'none', or fewer processes on this host"
    if needed > memory.total and config.cluster.check_host_memory:
        raise ConfigError(
            f"{subject}, this host has {units.size(memory.total)}",
            evidence=f"{where}; estimated as in --dry-run, and {units.size(PROCESS_BYTES)} a process for torch.",
            next_step=f"Take {ways}. To start all the same: --set cluster.check_host_memory=false.",
        )
    if needed <= FULL * memory.available:
        return []
    return [
        Finding(
            id="launch.host-memory",
            severity="warning",
            subject=f"{subject}, {units.size(memory.available)} are free",
            evidence=f"{where}; estimated as in --dry-run. When memory is full, the system ends processes (SIGKILL).",
            next_step=f"Take {ways}.",
        )
    ]


def _ways_to_less(config: RunConfig) -> str:
    ways = ["a machine with GPUs", "a smaller model", "a shorter train.seq_len"]
    if config.train.micro_batch_size > 1:
        ways.append("a smaller train.micro_batch_size")
    if config.parallel.recompute != "full":
        ways.append("parallel.recompute = 'full'")
    return f"{', '.join(ways[:-1])} or {ways[-1]}"
