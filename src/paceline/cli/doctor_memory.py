"""Would `paceline train` start here, or refuse because this host's memory is too small? The same check, told."""

from __future__ import annotations

from dataclasses import replace

from paceline.cli.host_check import host_findings
from paceline.config.run import RunConfig
from paceline.doctor.config import least_ranks
from paceline.errors import ConfigError
from paceline.report.finding import Finding
from paceline.runtime.host import HostMemory, host_memory
from paceline.runtime.launcher import ProcessInfo


def judge_host_memory(
    config: RunConfig, info: ProcessInfo, ranks: int | None, *, gpus: int, memory: HostMemory | None = None
) -> list[Finding]:
    """What the start of the run says of this host's memory; what it refuses is an error here.

    Args:
        ranks: of the whole run; None where nobody said, then the fewest that the recipe allows.
        gpus: of this host, as programs see them; 0 = everything lives in host memory.
        memory: of this host, asked for where it is None.
    """
    world_size = ranks or least_ranks(config)
    if info.launcher != "single":
        world_size, here = info.world_size, info.local_world_size
    else:
        nodes = config.cluster.nodes
        here = min(world_size, gpus or (config.cluster.gpus_per_node if nodes else world_size))
    on_cpu = config.cluster.device == "cpu" or not gpus
    try:
        found = host_findings(config, world_size, here, on_cpu=on_cpu, memory=memory or host_memory())
    except ConfigError as problem:
        return [
            Finding(
                id="recipe.host-memory",
                severity="error",
                subject=problem.subject,
                evidence=f"{problem.evidence} `paceline train` refuses it.",
                next_step=problem.next_step,
            )
        ]
    return [replace(each, id="recipe.host-memory") for each in found]
