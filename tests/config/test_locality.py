"""Which groups cross nodes, and does the cluster have as many ranks as were started?"""

from __future__ import annotations

from collections.abc import Callable

from paceline.config.cluster import ClusterConfig
from paceline.report.finding import Finding

BATCH = "train.global_batch_size=64"


def ids(found: list[Finding]) -> dict[str, str]:
    return {finding.id: finding.severity for finding in found}


def test_tensor_parallelism_across_nodes_is_a_warning(findings: Callable[..., list[Finding]]) -> None:
    two_nodes = (BATCH, "parallel.tp=4", "cluster.gpus_per_node=4")
    assert findings(8, *two_nodes) == []
    order = 'parallel.order=["tp", "pp", "dp_replicate", "dp_shard", "cp"]'
    (warning,) = findings(8, *two_nodes, order)
    assert ids([warning]) == {"config.tp-across-nodes": "warning"} and "tp last" in warning.next_step
    (warning,) = findings(8, BATCH, "parallel.tp=4", "cluster.gpus_per_node=2")
    assert "may be 1, 2;" in warning.next_step
    # only degrees that the model admits too: not 3 and 6
    (warning,) = findings(8, BATCH, "parallel.tp=4", "cluster.gpus_per_node=6")
    assert "may be 1, 2;" in warning.next_step


def test_context_and_expert_parallelism_across_nodes_are_notes(findings: Callable[..., list[Finding]]) -> None:
    small = (BATCH, "cluster.gpus_per_node=2", "model.num_experts=4", "model.top_k=2")
    (note,) = findings(8, *small, "parallel.cp=4")
    assert ids([note]) == {"config.cp-across-nodes": "note"} and "parallel.cp up to 2." in note.next_step
    assert ids(findings(8, *small, "parallel.ep=4")) == {"config.ep-across-nodes": "note"}
    assert findings(8, *small, "parallel.ep=2", "parallel.cp=2", "parallel.pp=4") == []


def test_the_cluster_says_how_many_ranks_there_are(findings: Callable[..., list[Finding]]) -> None:
    assert findings(16, BATCH, "cluster.nodes=2") == []
    (refused,) = findings(8, BATCH, "cluster.nodes=2")
    assert refused.severity == "error" and "are 16 ranks, 8 were started" in refused.subject
    # case 79: eight devices, one process
    (refused,) = findings(1, BATCH, "cluster.nodes=1")
    assert "8 ranks, 1 was started" in refused.subject and "launcher" in refused.next_step
    assert findings(1, BATCH) == [] and findings(12, "train.global_batch_size=12") == []


def test_nodes_are_as_many_as_the_ranks_need() -> None:
    assert ClusterConfig().num_nodes(1) == 1 and ClusterConfig().num_nodes(17) == 3
    assert ClusterConfig(nodes=4).num_nodes(32) == 4
