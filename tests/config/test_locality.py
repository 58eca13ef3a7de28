"""Which groups cross nodes, and does the cluster have as many ranks as were started?"""

from __future__ import annotations

from collections.abc import Callable

from paceline.config.asked import Asked
from paceline.config.cluster import ClusterConfig
from paceline.config.load import resolve
from paceline.config.locality import dense_groups, expert_groups
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
    assert "1, 2" in warning.next_step


def test_context_and_expert_parallelism_across_nodes_are_notes(findings: Callable[..., list[Finding]]) -> None:
    small = (BATCH, "cluster.gpus_per_node=2", "model.num_experts=4", "model.top_k=2")
    assert ids(findings(8, *small, "parallel.cp=4")) == {"config.cp-across-nodes": "note"}
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


def test_groups_fold_as_the_mesh_does() -> None:
    # 8 ranks: pp 2, dp 2, tp 2, and experts over the four ranks of a stage
    config = resolve({}, ["parallel.pp=2", "parallel.tp=2", "parallel.ep=2", "parallel.etp=2"]).config
    asked = Asked.of(config, 8)
    assert dense_groups(asked, ("tp",)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert dense_groups(asked, ("pp",)) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert expert_groups(asked) == [[0, 2], [1, 3], [4, 6], [5, 7]]
