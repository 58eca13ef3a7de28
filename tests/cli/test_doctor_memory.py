"""Doctor says of this host's memory what the start of a run says."""

from __future__ import annotations

from typing import Any

from paceline.cli.doctor_memory import judge_host_memory
from paceline.config.load import resolve
from paceline.config.run import RunConfig
from paceline.runtime.host import HostMemory
from paceline.runtime.launcher import ProcessInfo, process_info

GIB = 2**30


def config(**sections: Any) -> RunConfig:
    return resolve(
        {"model": {"preset": "llama3_1b"}, "train": {"seq_len": 2048, "global_batch_size": 8}} | sections
    ).config


def alone() -> ProcessInfo:
    return process_info({})


def memory(gib: int) -> HostMemory:
    return HostMemory(total=gib * GIB, available=gib * GIB)


def test_enough_says_nothing() -> None:
    assert judge_host_memory(config(), alone(), None, gpus=0, memory=memory(2000)) == []


def test_processes_are_those_of_the_recipe_or_as_asked() -> None:
    (one,) = judge_host_memory(config(), alone(), None, gpus=0, memory=memory(4))
    assert one.severity == "error" and one.subject.startswith("1 process of this run")
    (four,) = judge_host_memory(config(), alone(), 4, gpus=0, memory=memory(4))
    assert four.subject.startswith("4 processes of this run")
    nodes = config(cluster={"nodes": 2, "gpus_per_node": 4})
    (here,) = judge_host_memory(nodes, alone(), 8, gpus=0, memory=memory(4))
    assert here.subject.startswith("4 processes of this run"), "those of one node"


def test_with_gpus_only_what_is_offloaded_counts() -> None:
    assert judge_host_memory(config(), alone(), 8, gpus=8, memory=memory(1)) == []
    offloaded = config(parallel={"zero": 3, "offload": "optimizer"})
    (finding,) = judge_host_memory(offloaded, alone(), 8, gpus=8, memory=memory(1))
    assert finding.severity == "error" and "8 processes" in finding.subject
    assert "parallel.offload = 'optimizer'" in finding.evidence
