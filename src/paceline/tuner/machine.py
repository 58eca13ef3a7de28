"""What do trials run on? The device by name, its memory, and what the planner knows of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

from paceline.config.run import RunConfig
from paceline.costs.hardware import Hardware, find_hardware
from paceline.costs.profiles import PACELINE, Profile
from paceline.costs.step import room_of
from paceline.costs.workload import INTERCONNECTS, Cluster
from paceline.doctor.hardware.card import Card
from paceline.doctor.hardware.live import Live, look
from paceline.errors import LaunchError
from paceline.planner.machines import usual_interconnect
from paceline.runtime.host import host_memory

HOST_SHARE = 0.8
"""Of the host's free memory, that trials on CPUs may take: full memory ends other programs, not only the trial."""

PROCESS_BYTES = 0.35 * 2.0**30
"""A run of a few thousand parameters peaks at 0.34 to 0.41 GiB on a CPU."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """This host, and how many of its devices a trial takes."""

    name: str
    """Of one device."""
    on_gpu: bool
    ranks: int
    memory_bytes: float
    """Of one device; on CPUs a rank's share of what is free."""
    hardware: Hardware | None
    """None where the table of hardware does not have it: nothing is predicted then, only ordered by rough figures."""
    profile: Profile = PACELINE
    has_flash4: bool = False
    """Whether `train.attention_kernel = "flash4"` finds its package."""

    @cached_property
    def cluster(self) -> Cluster:
        """For predictions; of a device that is not in the table, with rough figures of its kind."""
        card = self.hardware or _unknown(self.name, self.memory_bytes, on_gpu=self.on_gpu)
        network = INTERCONNECTS[usual_interconnect(card)][0] if self.hardware else 10.0
        return Cluster(gpu=card, gpus=self.ranks, gpus_per_node=self.ranks, node_gb_per_s=network)

    @property
    def process_bytes(self) -> float:
        """Of Python and torch, where they count: on CPUs the whole process is measured."""
        return 0.0 if self.on_gpu else PROCESS_BYTES

    @property
    def room_bytes(self) -> float:
        """What a rank's tensors may take at their peak."""
        return room_of(self.cluster, self.profile) if self.on_gpu else self.memory_bytes

    @property
    def text(self) -> str:
        return f"{self.ranks} x {self.name}"


def _unknown(name: str, memory_bytes: float, *, on_gpu: bool) -> Hardware:
    """Orders of magnitude: only the order of predictions is used, and little of that."""
    rates = (100.0, 1.0, 100.0) if on_gpu else (0.5, 0.03, None)
    return Hardware(
        name=name,
        bf16=rates[0],
        fp8=None,
        fp32=rates[0],
        memory_gb=memory_bytes / 2**30,
        memory_tb_per_s=rates[1] or 0.0,
        nvlink_gb_per_s=rates[2],
        pcie_gb_per_s=10.0,
        patterns=(),
        source="assumed",
        memory_share=1.0,
    )


_QUESTION = """
import json, torch
cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps([[card.name, card.total_memory] for card in cards]))
"""
_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))


def asked_torch() -> tuple[Card, ...]:
    """GPUs that torch sees and no tool of the driver tells of, asked in a process that leaves nothing on them."""
    if not any(path.exists() for path in _DRIVERS):
        return ()
    done = subprocess.run([sys.executable, "-c", _QUESTION], capture_output=True, text=True, check=False)
    try:
        found = json.loads(done.stdout)
    except ValueError:
        return ()
    return tuple(Card(index=index, name=name, memory_bytes=size) for index, (name, size) in enumerate(found))


def find_machine(
    config: RunConfig,
    ranks: int,
    *,
    look: Callable[[], Live] = look,
    ask_torch: Callable[[], tuple[Card, ...]] = asked_torch,
    profile: Profile = PACELINE,
) -> Machine:
    """This host as a recipe would use it. `cluster.gpu` names the card where the driver's name is not in the table.

    Raises:
        LaunchError: there are GPUs, and fewer than ranks; or the recipe wants GPUs and there are none.
    """
    cards = () if config.cluster.device == "cpu" else look().cards or ask_torch()
    if not cards:
        if config.cluster.device == "cuda":
            raise LaunchError(
                "cluster.device = 'cuda', and no GPU is found here",
                next_step="`paceline doctor` says what is seen. For CPUs: --set cluster.device=cpu.",
            )
        free = HOST_SHARE * host_memory().available / ranks
        return Machine(name="CPU", on_gpu=False, ranks=ranks, memory_bytes=free, hardware=None, profile=profile)
    if len(cards) < ranks:
        raise LaunchError(
            f"--nproc {ranks} asks for more processes than the {len(cards)} GPUs of this host",
            evidence="Each process of a trial needs a GPU of its own.",
            next_step=f"Use --nproc {len(cards)}; for CPUs --set cluster.device=cpu.",
        )
    card = cards[0]
    hardware = find_hardware(card.name) or (find_hardware(config.cluster.gpu) if config.cluster.gpu else None)
    memory = min((float(one.memory_bytes) for one in cards[:ranks] if one.memory_bytes), default=0.0)
    if hardware is not None:
        memory = min(memory or hardware.memory_bytes, hardware.memory_bytes)
    return Machine(
        name=card.name, on_gpu=True, ranks=ranks, memory_bytes=memory or 16 * 2.0**30, hardware=hardware,
        profile=profile, has_flash4=find_spec("flash_attn") is not None,
    )  # fmt: skip
