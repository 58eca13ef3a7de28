"""Which part of the plain model does this rank run, and what does the last stage hold a second time?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from paceline.config.parallel import ParallelConfig
from paceline.costs.stages import stages_of_rank
from paceline.models.transformer import Transformer
from paceline.parallel.mesh import ParallelMesh
from paceline.parallel.shards import Shard, shard_of


def split_into_stages(
    model: Transformer, config: ParallelConfig, mesh: ParallelMesh, cut: Sequence[range]
) -> tuple[Transformer, ...]:
    """This rank's stages in the order of the model: views of ``model``, whose other parts are then dropped with it.

    Args:
        model: plain, usually on the meta device.
        cut: the blocks of every stage (`costs.stages.cut_stages`).
    """
    own, last = stages_of_rank(config, mesh["pp"].index), len(cut) - 1
    assert len(cut) == config.pp * len(own), f"{len(cut)} stages were cut, {len(own)} are on each of {config.pp} ranks"
    return tuple(model.part(cut[stage], first=stage == 0, last=stage == last) for stage in own)


def tied_shards(stages: Sequence[Transformer], shards: Mapping[str, Shard], mesh: ParallelMesh) -> dict[str, Shard]:
    """Entries for an embedding that first and last stage hold on different ranks, to be put over those in ``shards``.

    Its gradient is then the sum over the two ranks (`ends`), so both update it alike, and the first stage's copy is the
    one in checkpoints. Empty where nothing is held twice; in a V schedule both stages are on one rank and share it.
    """
    if mesh["ends"].size == 1 or any(stage.is_first and stage.is_last for stage in stages):
        return {}
    first = any(stage.is_first for stage in stages)
    last = any(stage.is_last for stage in stages)
    if first == last:  # neither, or both: a V
        return {}
    end = next(stage for stage in stages if (stage.is_first if first else stage.is_last))
    if end.embed is None or not end.needs_embedding_last:
        return {}
    found = {}
    for name, parameter in end.embed.named_parameters(prefix="embed"):
        shard = shard_of(name, parameter, shards)
        found[name] = replace(shard, replicas=(*shard.replicas, mesh["ends"]), saved=shard.saved and first)
    return found
