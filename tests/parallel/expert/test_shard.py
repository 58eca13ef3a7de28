"""Expert layers on 2, 4 and 8 ranks against one process, in float64: every layout, every kind of routing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distributed import run
from paceline.config.parallel import ParallelConfig
from paceline.models.moe import LocalDispatcher
from paceline.parallel.expert.shard import shard_experts
from paceline.parallel.mesh import ParallelMesh
from paceline.parallel.sequence import SequenceLayout
from tests.parallel.expert.layers import TOLERANCE, Case, compare_all, layout_of, mesh_of, model_of, place
from tests.parallel.tiny import tiny_config, tiny_model

LOSSES = {"aux_loss_coef": 0.3, "z_loss_coef": 0.2}
TOP2: dict[str, Any] = {"routing": LOSSES}
SWITCH: dict[str, Any] = {
    "routing": LOSSES | {"normalize_top_k": False, "capacity_factor": 0.75},
    "model": {"top_k": 1, "activation": "gelu", "mlp_bias": True},
}
DEEPSEEK: dict[str, Any] = {
    "routing": LOSSES
    | {"score": "sigmoid", "bias_balance": True, "num_groups": 4, "top_k_groups": 2, "num_shared_experts": 1}
    | {"shared_gate": True, "score_scale": 2.5},
    "model": {"num_experts": 8, "top_k": 3, "mlp_bias": True},
}
CAPACITY: dict[str, Any] = {"routing": LOSSES | {"capacity_factor": 1.0}, "model": {"num_experts": 8, "top_k": 3}}
KINDS = {"top2": TOP2, "switch": SWITCH, "deepseek": DEEPSEEK, "capacity": CAPACITY}

LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [
        {"ep": 2},
        {"etp": 2},
        {"tp": 2},
        {"tp": 2, "ep": 2},
        {"cp": 2, "ep": 2},
        {"cp": 2, "cp_method": "ulysses", "etp": 2},
    ],
    4: [
        {"ep": 4},
        {"ep": 2},
        {"ep": 2, "etp": 2},
        {"etp": 4},
        {"tp": 2, "ep": 4},
        {"cp": 2, "ep": 2, "dp_replicate": 2},
        {"tp": 2, "cp": 2, "ep": 2, "etp": 2},
        {"cp": 4, "ep": 4},
        {"pp": 2, "tp": 2, "ep": 2},
    ],
    8: [{"tp": 2, "cp": 2, "ep": 4, "etp": 2}, {"tp": 2, "cp": 2, "ep": 2, "etp": 2}],
}


def judge(cases: list[Case], world_size: int) -> list[dict[str, float]]:
    """Runs cases on all ranks and holds every error to the tolerance. Returns what rank 0 says of each case."""
    results = run(compare_all, world_size, cases)
    for result in results:
        for case, numbers in zip(cases, result, strict=True):
            bad = {name: numbers[name] for name in ("out", "x", "aux", "gradients") if not numbers[name] <= TOLERANCE}
            assert not bad, f"{case}: {bad}"
    return results[0]


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_every_layout_gives_the_plain_layer(world_size: int) -> None:
    kinds = [(kind, layout) for layout in LAYOUTS[world_size] for kind in KINDS]
    found = judge([Case(parallel=layout, **KINDS[kind]) for kind, layout in kinds], world_size)
    for (kind, layout), numbers in zip(kinds, found, strict=True):
        assert bool(numbers["rows"]) == ("ep" in layout or "etp" in layout) and numbers["router"] > 1e-2
        assert (numbers["dropped"] > 0) == (kind in ("switch", "capacity"))


def test_a_compiled_layer_on_parts_of_sequences() -> None:
    found = judge([Case(parallel={"cp": 2, "ep": 2}, compiled=True, **CAPACITY)], 2)
    assert found[0]["dropped"] > 0


def test_experts_that_take_rows_as_they_come() -> None:
    """Kernels of ours (here their twins) behind every dispatcher, with drops, idle experts and ranks without rows."""
    switch = SWITCH | {"model": SWITCH["model"] | {"mlp_bias": False}}
    kinds = {"top2": TOP2, "switch": switch, "capacity": CAPACITY}
    layouts: list[dict[str, Any]] = [{}, {"ep": 2}, {"etp": 2}, {"tp": 2, "ep": 2}]
    cases = [Case(parallel=layout, kernels=True, **kind) for layout in layouts for kind in kinds.values()]
    cases += [
        Case(parallel={"ep": 2}, kernels=True, change="nobody chooses the first half", **switch),
        Case(parallel={"ep": 2}, kernels=True, change="tokens go elsewhere", **TOP2),
        Case(parallel={}, kernels=True, compiled=True, **CAPACITY),
        Case(parallel={"ep": 2}, kernels=True, compiled=True, **TOP2),
    ]
    judge(cases, 2)


def test_experts_that_pick_theirs_of_all_tokens() -> None:
    """As above, with every token on every rank: also in a compiled block, which is one graph."""
    switch = SWITCH | {"model": SWITCH["model"] | {"mlp_bias": False}}
    more: dict[str, Any] = {"kernels": True, "gathered": True}
    layouts: list[dict[str, Any]] = [{"ep": 2}, {"etp": 2}, {"tp": 2, "ep": 2}]
    cases = [Case(parallel=layout, **kind, **more) for layout in layouts for kind in (TOP2, switch, CAPACITY)]
    cases += [
        Case(parallel={"ep": 2}, change="nobody chooses the first half", **switch, **more),
        Case(parallel={"ep": 2}, compiled=True, **CAPACITY, **more),
    ]
    assert all(numbers["rows"] for numbers in judge(cases, 2)[:-1])  # what is compiled is not counted
    uneven: dict[str, Any] = {"model": {"num_experts": 5, "top_k": 3}, "routing": LOSSES | {"ffn_size": 7}}
    judge([Case(parallel=layout, **uneven, **more) for layout in ({"ep": 4}, {"ep": 2, "etp": 2})], 4)


def test_experts_without_tokens_and_ranks_without_rows() -> None:
    """Nobody chooses an expert, or any expert of a rank; or all tokens of a rank are sent away."""
    idle = [
        Case(
            parallel={"ep": 2, "etp": etp},
            change="nobody chooses expert 0",
            routing={"score": "sigmoid", "bias_balance": True, "aux_loss_coef": 0.3},
        )
        for etp in (1, 2)
    ]
    one_sided = [Case(parallel={"ep": 2, "etp": etp}, change="nobody chooses the first half") for etp in (1, 2)]
    swapped = [
        Case(parallel={"ep": 2}, change="tokens go elsewhere", **SWITCH),
        Case(parallel={"cp": 2, "tp": 2, "ep": 4}, change="tokens go elsewhere", **TOP2),
        Case(parallel={"ep": 4}, change="nobody chooses the first half", **SWITCH),
    ]
    assert all(numbers["idle"] for numbers in judge([idle[0], one_sided[0]], 2))
    judge([swapped[0]], 2)
    judge([*idle, *one_sided, *swapped], 4)


def test_uneven_experts_and_widths() -> None:
    """5 experts on 2 and 4 ranks; a width of 7 over 2 ranks."""
    more: dict[str, Any] = {"model": {"num_experts": 5, "top_k": 3}, "routing": LOSSES | {"ffn_size": 7}}
    judge([Case(parallel={"ep": 4}, **more), Case(parallel={"ep": 2, "etp": 2}, **more)], 4)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_balance_loss_alone_gives_the_same_router_gradient(score: Any) -> None:
    """Case 70: coefficient 1, main loss 0; over data, context and tensor parallel ranks, and not zero."""
    routing = {"aux_loss_coef": 1.0, "score": score}
    layouts: list[dict[str, Any]] = [{}, {"cp": 2}, {"tp": 2}, {"cp": 2, "ep": 2}, {"ep": 2}]
    found = judge([Case(parallel=layout, routing=routing, main_loss=0.0) for layout in layouts], 2)
    assert all(numbers["router"] > 1e-3 for numbers in found)


def test_every_element_is_somewhere_once_and_comes_back_unchanged() -> None:
    """Cases 49 and 65: EP1 -> EP2 -> EP1 is byte-equal, nothing is left unwritten, nothing counted twice."""
    for layout in ({"ep": 4}, {"ep": 2}, {"ep": 2, "etp": 2}, {"tp": 2, "etp": 2}, {}):
        case = Case(parallel=layout, **SWITCH)
        _, plain = model_of(case)
        whole = dict(plain.named_parameters())
        ranks = run(_local_experts, 4, case)
        for name in ranks[0]:
            back, times = torch.full_like(whole[name], float("nan")), torch.zeros_like(whole[name])
            for shards in ranks:
                shard, local, ways, replicas = shards[name]
                place(back, local, shard)
                box = torch.zeros_like(whole[name])
                place(box, torch.ones_like(local), shard)
                times += box / (ways * replicas)
            assert torch.equal(back, whole[name]), name
            assert bool((times == 1).all()), name
        assert set(ranks[0]) == {name for name in whole if ".experts." in name}


def _local_experts(rank: int, world_size: int, case: Case) -> dict[str, Any]:
    _, model = model_of(case)
    mesh = mesh_of(case, rank, world_size)
    shards = shard_experts(model, mesh, layout_of(case))
    local = dict(model.named_parameters())
    found = {}
    for name, shard in shards.items():
        assert shard.expert and shard.saved
        replicas = 1
        for axis in shard.replicas:
            replicas *= axis.size
        bare = type(shard)(whole=shard.whole, offsets=shard.offsets)  # process groups do not travel
        found[name] = (bare, local[name].detach(), mesh.size("edp"), replicas)
    return found


def test_meta_tensors_and_models_without_experts() -> None:
    run(_check_meta, 4)


def _check_meta(rank: int, world_size: int) -> None:
    mesh = ParallelMesh(ParallelConfig(ep=2, etp=2), world_size=world_size, rank=rank, device_type="cpu")
    layout = SequenceLayout(1, "ring")
    model = tiny_model(tiny_config(moe=True))
    shards = shard_experts(model, mesh, layout)
    (experts,) = (layer.experts for layer in model.moe_layers())
    assert experts.up_weight.is_meta and experts.up_weight.shape == (2, 2, 4, 16)
    assert experts.down_weight.shape == (2, 16, 4)
    assert shards["blocks.1.feed_forward.experts.up_weight"].offsets == (2 * (rank // 2), 0, 4 * (rank % 2), 0)
    assert shard_experts(tiny_model(tiny_config()), mesh, layout) == {}
    alone = tiny_model(tiny_config(moe=True))
    trivial = ParallelMesh(ParallelConfig(), world_size=world_size, rank=rank, device_type="cpu")
    assert all(shard.expert for shard in shard_experts(alone, trivial, layout).values())
    assert isinstance(alone.moe_layers()[0].dispatcher, LocalDispatcher)
    assert alone.moe_layers()[0].router.sequences.parts == 1
