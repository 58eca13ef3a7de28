"""Context parallelism: a sequence is spread over the ranks of `cp`. Each computes its tokens; attention sees them all.

| method | a rank holds | attention |
| --- | --- | --- |
| ring | chunks i and 2n - 1 - i of 2n | `ring.py`: keys and values travel; any number of heads |
| ulysses | chunk i of n | `ulysses.py`: tokens are exchanged for heads; heads of a rank divide by n |

The model notices nothing: batches are cut here, with positions and documents beside the tokens, and the attention core
is replaced. Everything else of a model treats each token alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.data.batch import Batch
from paceline.kernels.attention import AttentionCore, reference_attention
from paceline.models.attention import GroupedQueryAttention, LatentAttention
from paceline.models.transformer import Transformer
from paceline.parallel.collectives import Axis
from paceline.parallel.mesh import ParallelMesh
from paceline.parallel.ring import RingAttention
from paceline.parallel.sequence import ContextMethod, SequenceLayout
from paceline.parallel.ulysses import UlyssesAttention


def context_part(batch: Batch, axis: Axis, method: ContextMethod) -> Batch:
    """This rank's part of every sequence of a whole batch. Labels were shifted before, so none is lost at a cut.

    Positions become explicit. Document numbers stay those of the whole sequence. The length of sequences must divide
    into the layout's chunks (`config.check` refuses others).
    """
    if axis.size == 1:
        return batch
    layout = SequenceLayout(axis.size, method)
    positions = batch.positions
    if positions is None:
        positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand(batch.tokens.shape)

    def part(whole_BT: Tensor) -> Tensor:
        return layout.part(whole_BT, axis.index, dim=1)

    return Batch(
        tokens=part(batch.tokens),
        labels=part(batch.labels),
        positions=part(positions),
        documents=None if batch.documents is None else part(batch.documents),
        answers=None if batch.answers is None else part(batch.answers),
        fields=batch.fields,
    )


def shard_sequence(stage: Transformer, mesh: ParallelMesh, method: ContextMethod) -> None:
    """Makes the attention of every layer see the tokens of all ranks of `cp`, in place.

    A stage that was built with the reference core keeps to written-out attention. On one rank nothing changes.
    """
    axis = mesh["cp"]
    if axis.size == 1:
        return
    core = attention_core_of(stage)
    if method == "ulysses":
        stage.set_attention_core(UlyssesAttention(axis, core))
    else:
        stage.set_attention_core(RingAttention(axis, reference=core is reference_attention))


def attention_core_of(stage: Transformer) -> AttentionCore:
    """The core that all attention layers of a stage share."""
    layers = [module for module in stage.modules() if isinstance(module, GroupedQueryAttention | LatentAttention)]
    assert layers and all(layer.core is layers[0].core for layer in layers), "one attention core for all layers"
    return layers[0].core
