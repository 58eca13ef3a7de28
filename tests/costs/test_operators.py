"""What a layer computes and moves: recomputation by module, experts' biases and kernels, attention in 8 bits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.config.load import resolve
from paceline.config.model import ModelConfig, MoEConfig
from paceline.costs.demand import Demand, demand_of
from paceline.costs.hardware import find_hardware
from paceline.costs.operators import rates_of
from paceline.costs.profiles import BRIDGE
from paceline.costs.roofline import linear_seconds
from paceline.costs.step import predict
from paceline.costs.traffic import domains_reached
from paceline.costs.workload import Cluster, Workload

GPU = find_hardware("B200 SXM")
assert GPU is not None
CLUSTER = Cluster(gpu=GPU, gpus=16)
MODEL = ModelConfig(
    num_layers=8,
    hidden_size=2048,
    num_heads=16,
    num_kv_heads=4,
    ffn_size=8192,
    vocab_size=32768,
    max_seq_len=4096,
    num_experts=32,
    top_k=4,
    moe=MoEConfig(ffn_size=1024, first_dense_layers=2),
)
WORK = Workload(
    model=MODEL, seq_len=4096, micro_batch_size=1, global_batch_size=64, precision="mxfp8", ep=16,
    recompute="selective", recompute_modules=("layernorm",),
)  # fmt: skip


def demand(**changes: object) -> Demand:
    work = replace(WORK, **changes)  # type: ignore[arg-type]
    return demand_of(work, CLUSTER, (float(work.model.num_layers),))


def test_dense_mlps_and_experts_are_recomputed_by_their_own_names() -> None:
    mlp, moe = demand(recompute_modules=("mlp",)), demand(recompute_modules=("moe",))
    assert moe.gemm_again == pytest.approx(moe.expert_gemm_forward)
    dense_only = MODEL.model_copy(update={"num_experts": 0, "top_k": 0})
    dense = demand(model=dense_only, ep=1, recompute_modules=("mlp",))
    # two of eight layers have a dense MLP
    assert mlp.gemm_again == pytest.approx(dense.gemm_again / 4)
    # rows of experts are sent again with them alone
    assert (mlp.communication_again, moe.communication_again, dense.communication_again) == (0.0, 1.0, 0.5)


def test_up_projections_of_latent_attention_are_recomputed_alone() -> None:
    latent = ModelConfig(
        num_layers=4, hidden_size=2048, num_heads=16, attention="mla", q_lora_rank=512, kv_lora_rank=256,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, ffn_size=8192, vocab_size=32768, max_seq_len=4096,
    )  # fmt: skip
    none = demand(model=latent, ep=1, recompute_modules=("layernorm",))
    up = demand(model=latent, ep=1, recompute_modules=("layernorm", "mla_up_proj"))
    rates = rates_of(replace(WORK, model=latent, ep=1), CLUSTER)
    device = (rates.linear, rates.hbm, rates.multiprocessors)
    expected = linear_seconds(4096, 512, 16 * 192, *device)[0] + linear_seconds(4096, 256, 16 * 256, *device)[0]
    assert none.gemm_again == 0 and up.gemm_again == pytest.approx(expected)
    assert up.memory_again == none.memory_again


def test_biases_of_experts_take_passes_over_their_rows() -> None:
    biased = MODEL.model_copy(update={"mlp_bias": True})
    rows, moe_layers = 4096 * 4, 6 / 8
    assert demand().expert_biases == 0
    assert demand(model=biased).expert_biases == pytest.approx(
        rows * 2048 * moe_layers * 2 / (GPU.memory_tb_per_s * 1e12)
    )
    more = [predict(replace(WORK, model=biased), CLUSTER, replace(BRIDGE, expert_bias_passes=n)) for n in (0.0, 34.0)]
    assert more[1].parts["memory_bound"] > more[0].parts["memory_bound"]
    assert more[1].parts["gemm"] == more[0].parts["gemm"]


def test_epilogues_spare_the_activation_and_its_casts() -> None:
    apart, fused = demand(), demand(expert_epilogues=True)
    assert fused.expert_memory_forward < apart.expert_memory_forward
    assert fused.cast_forward < apart.cast_forward and fused.expert_gemm_forward == apart.expert_gemm_forward
    assert demand(dispatcher_permutes=True).expert_memory_forward < apart.expert_memory_forward


def test_weights_that_are_not_kept_in_eight_bits_are_cast_for_every_micro_batch() -> None:
    kept, cast = demand(), demand(casts_weights=True)
    assert cast.cast_forward > kept.cast_forward and cast.gemm_forward == kept.gemm_forward
    more = demand(casts_weights=True, micro_batch_size=2).cast_forward - demand(micro_batch_size=2).cast_forward
    assert more == pytest.approx(cast.cast_forward - kept.cast_forward)  # whatever the number of tokens
    fp8 = {"model": {"preset": "llama3_1b"}, "train": {"precision": "fp8"}}
    cached, at_each_use = (
        Workload.of(resolve(fp8 | {"train": {"precision": "fp8", "fp8_weight_cache": on}}).config)
        for on in (True, False)
    )
    sharded = Workload.of(resolve(fp8 | {"parallel": {"zero": 3}}).config)
    assert (cached.casts_weights, at_each_use.casts_weights, sharded.casts_weights) == (False, True, True)


def test_eight_bits_quicken_attention_and_head() -> None:
    assert demand(fp8_attention=True).attention_forward == pytest.approx(0.7 * demand().attention_forward)
    narrow, wide = demand(fp8_head=True), demand()
    assert narrow.head_gemm < 0.7 * wide.head_gemm and narrow.head_memory > wide.head_memory  # casts
    recipe = {"model": {"preset": "llama3_1b"}, "train": {"precision": "fp8", "fp8_head": True}}
    assert Workload.of(resolve(recipe).config).fp8_head


@pytest.mark.parametrize("pattern", [0, 2])
def test_every_layer_of_experts_sends_its_rows(pattern: int) -> None:
    """Whatever windows part the layers into groups."""
    windows = {"sliding_window": 128 if pattern else 0, "sliding_window_period": pattern or 1}
    found = demand(model=MODEL.model_copy(update=windows))
    assert found.ep_calls == pytest.approx(2 * 6 / 8)


def test_rows_that_are_sent_behind_other_work_take_less_of_the_step() -> None:
    work = replace(WORK, ep=8)
    shown, hidden = (predict(replace(work, overlaps_experts=on), CLUSTER, BRIDGE) for on in (False, True))
    assert 0 < hidden.parts["ep_communication"] < 0.5 * shown.parts["ep_communication"]
    # no more than there is to hide behind
    none = predict(replace(work, overlaps_experts=True), CLUSTER, replace(BRIDGE, expert_overlap=0.0))
    assert none.parts["ep_communication"] == pytest.approx(shown.parts["ep_communication"])


@pytest.mark.parametrize(
    ("groups", "chosen", "top_k", "domains", "expected"),
    [
        (1, 1, 1, 8, 1.0),
        (1, 1, 8, 8, 8 * (1 - (7 / 8) ** 8)),
        (8, 4, 8, 8, 4 * (1 - (3 / 4) ** 8)),  # a group on each of 8 nodes, 4 of them chosen
        (8, 1, 8, 4, 1.0),  # two groups on a node: all in one of them
        (8, 8, 8, 4, 4 * (1 - (3 / 4) ** 8)),  # all chosen: no limit
        (2, 1, 1000, 8, 4.0),  # a group on four nodes, and all of them hit
    ],
)
def test_domains_reached(groups: int, chosen: int, top_k: int, domains: int, expected: float) -> None:
    routing = MoEConfig(ffn_size=64, num_groups=groups, top_k_groups=chosen)
    model = MODEL.model_copy(update={"num_experts": 4096, "top_k": top_k, "moe": routing})
    spec = model.blocks()[-1].feed_forward
    assert domains_reached(spec, domains) == pytest.approx(expected, rel=1e-3)  # type: ignore[arg-type]


def test_clamped_experts_pass_over_gate_and_up_once_more() -> None:
    rows, moe_layers, width = 4096 * 4, 6 / 8, MODEL.expert_ffn_size
    plain, clamped = demand(), demand(clamped_experts=True)
    once = rows * width * moe_layers * 2 / (GPU.memory_tb_per_s * 1e12)
    assert clamped.expert_memory_forward - plain.expert_memory_forward == pytest.approx(8 * once)
    assert clamped.expert_memory_backward - plain.expert_memory_backward == pytest.approx(10 * once)
    assert clamped.expert_gemm_forward == plain.expert_gemm_forward
    # recomputed with the activation, and part of products that activate by themselves
    again = [demand(clamped_experts=on, recompute_modules=("moe_act",)).memory_again for on in (False, True)]
    assert again[1] - again[0] == pytest.approx(8 * once)
    assert demand(clamped_experts=True, expert_epilogues=True) == demand(expert_epilogues=True)
