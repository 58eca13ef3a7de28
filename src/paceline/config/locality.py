"""Which groups of ranks cross from one machine to another, and does that matter?

Tensor parallelism talks twice a layer and waits; context and expert parallelism move as much but can hide a part of it.
All of them belong inside a node, where links are some ten times faster. Pipeline stages and data parallelism may cross.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.config.asked import Asked, error, listed
from paceline.config.layout import tensor_degrees
from paceline.config.ranks import RankOrder
from paceline.report.finding import Finding


def cluster_size(asked: Asked) -> Iterator[Finding]:
    """`cluster.nodes`, where it is given, says how many ranks there are to be."""
    cluster, world_size = asked.config.cluster, asked.world_size
    ranks = cluster.nodes * cluster.gpus_per_node
    if not cluster.nodes or ranks == world_size:
        return
    alone = (
        "Only one process was started, perhaps without a launcher: use --nproc, torchrun or srun."
        if world_size == 1
        else f"Start {ranks} ranks, or set cluster.nodes = 0 to take as many nodes as the ranks need."
    )
    yield error(
        "config.cluster-size",
        f"cluster.nodes = {cluster.nodes} * cluster.gpus_per_node = {cluster.gpus_per_node} are {ranks} ranks, "
        f"{world_size} {'was' if world_size == 1 else 'were'} started",
        "There is one rank for each GPU.",
        alone,
    )


def locality(asked: Asked) -> Iterator[Finding]:
    """A warning where tensor parallelism crosses nodes, notes for context and expert parallelism."""
    per_node, parallel = asked.config.cluster.gpus_per_node, asked.parallel
    if asked.world_size <= per_node:
        return
    ranks = RankOrder(parallel=parallel, world_size=asked.world_size)
    if ranks.nodes_spanned("tp", per_node) > 1:
        yield Finding(
            id="config.tp-across-nodes",
            severity="warning",
            subject=f"parallel.tp = {parallel.tp} crosses nodes of cluster.gpus_per_node = {per_node}",
            evidence="Every layer waits for its gathers and scatters, between nodes at a tenth of the speed or less.",
            next_step=_keep_inside(asked),
        )
    for axis, what in (
        ("cp", "keys and values of every layer"),
        ("ep", "the tokens of every expert layer"),
    ):
        if ranks.nodes_spanned(axis, per_node) > 1:
            yield Finding(
                id=f"config.{axis}-across-nodes",
                severity="note",
                subject=f"parallel.{axis} = {getattr(parallel, axis)} crosses nodes of cluster.gpus_per_node = "
                f"{per_node}",
                evidence=f"It moves {what} between nodes.",
                next_step=f"Inside a node it would be faster: {_smaller(asked, axis)}.",
            )


def _keep_inside(asked: Asked) -> str:
    parallel, per_node = asked.parallel, asked.config.cluster.gpus_per_node
    if parallel.order[-1] != "tp" and per_node % parallel.tp == 0:
        return "Put tp last in parallel.order: neighbouring ranks differ in the last axis."
    inside = [tp for tp in tensor_degrees(asked) if per_node % tp == 0]
    return f"Inside a node parallel.tp may be {listed(inside)}; parallel.pp may cross nodes."


def _smaller(asked: Asked, axis: str) -> str:
    """The largest degree whose groups fit a node, with the axis that lies inside it as it is."""
    inner, per_node = "etp" if axis == "ep" else "tp", asked.config.cluster.gpus_per_node
    degree: int = getattr(asked.parallel, inner)
    limit = per_node // degree
    if limit < 1:
        return f"parallel.{inner} = {degree} fills more than one already"
    if getattr(asked.parallel, axis) <= limit:
        return "its groups would fit; look at parallel.order and cluster.gpus_per_node"
    return f"parallel.{axis} up to {limit}" + (f" beside parallel.{inner} = {degree}" if degree > 1 else "")
