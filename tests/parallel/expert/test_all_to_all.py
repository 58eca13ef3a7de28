"""The all-to-all dispatcher inside a whole model: recomputed, and what it says on the wire."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from distributed import run
from paceline.config.parallel import RecomputeMode
from paceline.models.transformer import Transformer
from paceline.parallel.expert.shard import shard_experts
from paceline.parallel.recompute import recompute
from tests.parallel.expert.layers import TOLERANCE, Case, error, layout_of, mesh_of, model_of, put_together
from tests.parallel.tiny import batches, loss_of

CASE: dict[str, Any] = {
    "routing": {"layer_period": 1, "layer_offset": 0, "aux_loss_coef": 0.1, "capacity_factor": 1.0},
    "model": {"num_layers": 2, "hidden_size": 8},
}
MODES: tuple[RecomputeMode, ...] = ("none", "full", "selective")


def test_a_whole_model_with_and_without_recompute() -> None:
    """Loss and every gradient are those of one process, whatever is computed again."""
    for parallel, world_size, modes in (
        ({"ep": 2}, 2, MODES),
        ({"ep": 2, "etp": 2}, 4, ("none", "selective")),
    ):
        for errors in run(_train_whole_model, world_size, Case(parallel=parallel, **CASE), modes):
            for mode, largest in zip(modes, errors, strict=True):
                assert largest <= TOLERANCE, (parallel, mode)


def _train_whole_model(rank: int, world_size: int, case: Case, modes: tuple[RecomputeMode, ...]) -> list[float]:
    _, plain = model_of(case)
    expected = _backward(plain, 0, 1)
    mesh, errors = mesh_of(case, rank, world_size), []
    for mode in modes:
        _, model = model_of(case)
        shards = shard_experts(model, mesh, layout_of(case))
        recompute(list(model.blocks.values()), mode)
        loss = _backward(model, mesh.dp_rank, mesh.dp_size)
        dist.all_reduce(loss)
        gradients, reference = (
            {name: parameter.grad for name, parameter in side.named_parameters() if parameter.grad is not None}
            for side in (model, plain)
        )
        whole = put_together(gradients, reference, shards, mesh)
        errors.append(max(error(loss, expected), *(error(whole[name], reference[name]) for name in reference)))
        assert gradients.keys() == reference.keys() == dict(plain.named_parameters()).keys()
    return errors


def _backward(model: Transformer, dp_rank: int, dp_size: int) -> torch.Tensor:
    tokens, labels = batches(1)
    total = (labels != -100).sum()
    own_tokens, own_labels = (whole.chunk(dp_size)[dp_rank] for whole in (tokens, labels))
    loss = loss_of(model(own_tokens, own_labels), total, len(tokens))
    loss.backward()
    return loss.detach().clone()


def test_what_is_said_is_counted_by_name_and_dropped_rows_stay_here() -> None:
    for parallel, world_size in (({"ep": 2}, 2), ({"ep": 2, "etp": 2}, 4)):
        routing = {"layer_offset": 0, "capacity_factor": 0.5}
        for calls, moved, kept in run(_count, world_size, Case(parallel=parallel, routing=routing)):
            names = {"ep/dispatch/all_to_all", "ep/combine/all_to_all", "ep/weights/all_to_all", "ep/counts/all_to_all"}
            if "etp" in parallel:
                names |= {"etp/dispatch/all_gather", "etp/weights/all_gather", "etp/combine/reduce_scatter"}
                names |= {"etp/counts/all_gather"}
            assert calls.keys() == names
            assert all(count == (1 if "counts" in name else 2) * 2 for name, count in calls.items())
            assert moved == kept


def _count(rank: int, world_size: int, case: Case) -> tuple[dict[str, int], int, int]:
    """Calls by name, rows that were dispatched forward, and assignments here that were kept."""
    config, model = model_of(case)
    mesh = mesh_of(case, rank, world_size)
    shard_experts(model, mesh, layout_of(case))
    rows, kept = 0, 0
    for layer in model.moe_layers():
        x = torch.randn(2, 8, config.hidden_size, dtype=torch.float64, requires_grad=True)
        mesh.traffic.bytes.clear()
        out, extras = layer(x)
        rows += mesh.traffic.bytes["ep/dispatch/all_to_all"] // (8 * config.hidden_size)
        kept += int(extras.load.sum()) - int(extras.dropped)
        assert int(extras.dropped) > 0
        out.sum().backward()
    return dict(mesh.traffic.calls), rows, kept
