"""Parts of a step: against schedules played out action by action, and in arrays as one by one."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from paceline.config.model import ModelConfig
from paceline.costs.demand import Demand, demand_of, stacked
from paceline.costs.hardware import find_hardware
from paceline.costs.pipeline import ActionSeconds, schedule, simulate
from paceline.costs.profiles import PROFILES, Profile
from paceline.costs.spend import seconds, spend
from paceline.costs.workload import Cluster, Workload

GPU = find_hardware("H100 SXM")
MODEL = ModelConfig(num_layers=16, hidden_size=1024, num_heads=16, vocab_size=256, max_seq_len=2048)
PLAIN = Profile(name="plain", title="", launch_us=0.0, micro_batch_ms=0.0, step_ms=0.0, send_exposed=0.0, send_us=0.0)


def cluster(gpus: int) -> Cluster:
    assert GPU is not None
    return Cluster(gpu=GPU, gpus=gpus, fast_domain=1024)


def test_offload_is_paid_for() -> None:
    """Nothing on the device, copies and the update in its place; sharded parameters in every pass."""
    work = Workload(model=MODEL, seq_len=1024, micro_batch_size=1, global_batch_size=64, precision="bf16")
    plain, offloaded, parameters = (
        spend(demand_of(one, cluster(8), (16.0,)), PLAIN)
        for one in (work, replace(work, offload="optimizer"), replace(work, zero=3, offload="parameters"))
    )
    assert plain["offload"] == 0 < plain["optimizer"]
    assert offloaded["optimizer"] == 0 < offloaded["offload"] < parameters["offload"]


@pytest.mark.parametrize(("pp", "stages_per_rank", "micro_batches"), [(4, 1, 8), (4, 1, 4), (8, 1, 16), (4, 2, 8)])
def test_the_closed_form_of_a_pipeline_is_its_simulation(pp: int, stages_per_rank: int, micro_batches: int) -> None:
    work = Workload(
        model=MODEL,
        seq_len=2048,
        micro_batch_size=1,
        global_batch_size=micro_batches,
        pp=pp,
        stages_per_rank=stages_per_rank,
    )
    layers = [MODEL.num_layers / pp] * pp
    # no optimizer, no head: only the work of stages
    demand = replace(
        demand_of(work, cluster(pp), layers),
        **dict.fromkeys(("head_gemm", "head_memory", "optimizer_bytes", "accumulate", "pp_fast"), 0.0),
    )
    parts = spend(demand, PLAIN)
    forward = demand.gemm_forward / PLAIN.gemm_efficiency + demand.attention_forward / PLAIN.attention_efficiency
    forward += demand.memory_forward / PLAIN.hbm_efficiency
    backward = demand.gemm_backward / PLAIN.gemm_efficiency + demand.attention_backward / PLAIN.attention_efficiency
    backward += demand.memory_backward / PLAIN.hbm_efficiency
    of_stage = MODEL.num_layers / pp / stages_per_rank
    name = "interleaved_1f1b" if stages_per_rank > 1 else "1f1b"
    timeline = simulate(
        schedule(name, pp, stages_per_rank, micro_batches),
        ActionSeconds(
            forward=of_stage * forward, input_gradient=of_stage * backward / 2, weight_gradient=of_stage * backward / 2
        ),
    )
    assert sum(parts.values()) == pytest.approx(timeline.makespan, rel=1e-9)
    assert parts["bubble"] == pytest.approx(timeline.bubble * timeline.makespan, rel=1e-9)


@pytest.mark.parametrize("weights", [1.0, 0.8, 0.5])
@pytest.mark.parametrize(("name", "stages_per_rank"), [("zero_bubble", 1), ("zbv", 2)])
@pytest.mark.parametrize(("pp", "micro_batches"), [(4, 12), (8, 24)])
def test_split_backward_passes_idle_as_simulated(
    name: str, stages_per_rank: int, weights: float, pp: int, micro_batches: int
) -> None:
    """F = I = 1, W = `weights` of a rank's layers: the closed form is that of the schedule's own lists."""
    demand, unit = one_pass(name, pp, stages_per_rank, micro_batches, weights)
    part = unit / stages_per_rank
    timeline = simulate(
        schedule(name, pp, stages_per_rank, micro_batches),
        ActionSeconds(forward=part, input_gradient=part, weight_gradient=weights * part),
    )
    parts = spend(demand, PLAIN)
    assert parts["bubble"] == pytest.approx(timeline.bubble * timeline.makespan, rel=1e-6)


def test_zero_bubble_idles_a_third_of_one_forward_one_backward() -> None:
    """F = I = W: (p - 1)(F + I - W) beside (p - 1)(F + I + W), and, V-shaped, a sixth (arXiv:2401.10241, table 1;
    arXiv:2405.15362, section 3)."""
    idle = {
        name: spend(one_pass(name, 8, stages, 24, 1.0)[0], PLAIN)["bubble"]
        for name, stages in (("1f1b", 1), ("zero_bubble", 1), ("zbv", 2))
    }
    assert idle["zero_bubble"] == pytest.approx(idle["1f1b"] / 3)
    assert idle["zbv"] == pytest.approx(idle["1f1b"] / 6)


def one_pass(name: str, pp: int, stages_per_rank: int, micro_batches: int, weights: float) -> tuple[Demand, float]:
    """A pipeline of nothing but products: F = I = 1, W = ``weights``, in units of the second returned (seconds of a
    rank's layers). A linear's two backward products are equal; what I has more is attention's."""
    work = Workload(
        model=MODEL, seq_len=2048, micro_batch_size=1, global_batch_size=micro_batches, pp=pp, schedule=name,
        stages_per_rank=stages_per_rank,
    )  # fmt: skip
    demand = demand_of(work, cluster(pp), [MODEL.num_layers / pp] * pp)
    names = [field.name for field in fields(demand) if field.name.endswith(("_forward", "_backward", "_again"))]
    nothing = dict.fromkeys((*names, "head_gemm", "head_memory", "optimizer_bytes", "accumulate", "pp_fast"), 0.0)
    seconds_each = 1e-3
    made = {
        "gemm_forward": seconds_each * PLAIN.gemm_efficiency,
        "gemm_backward": 2 * weights * seconds_each * PLAIN.gemm_efficiency,
        "attention_backward": (1 - weights) * seconds_each * PLAIN.attention_efficiency,
    }
    return replace(demand, **nothing | made), seconds_each * MODEL.num_layers / pp


def test_a_slow_last_stage_decides() -> None:
    """Stages of 4, 4, 4 and 4 layers, the last with a head as costly as two: as the simulation has it."""
    work = Workload(model=MODEL, seq_len=2048, micro_batch_size=1, global_batch_size=16, pp=4)
    demand = demand_of(work, cluster(4), [4.0] * 4)
    zero = dict.fromkeys(("head_memory", "optimizer_bytes", "accumulate", "pp_fast"), 0.0)
    layer = sum(spend(replace(demand, **zero, head_gemm=0.0, micro_batches=1, pipeline=1, layers=1, layers_inside=0.0,
                              layers_last=1.0), PLAIN).values())  # fmt: skip
    demand = replace(demand, **zero, head_gemm=2 * layer * PLAIN.gemm_efficiency)
    timeline = simulate(
        schedule("1f1b", 4, 1, 16),
        ActionSeconds(forward=layer, input_gradient=layer, weight_gradient=layer, stage_scale=(4 / 3, 4 / 3, 4 / 3, 2)),
    )
    assert float(seconds(demand, PLAIN)) == pytest.approx(timeline.makespan, rel=1e-9)


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_arrays_give_what_single_layouts_give(profile: Profile) -> None:
    base = Workload(model=MODEL, seq_len=2048, micro_batch_size=2, global_batch_size=64)
    works = [replace(base, tp=tp, pp=pp, zero=zero) for tp in (1, 2) for pp in (1, 2) for zero in (0, 1, 3)]
    demands = [demand_of(work, cluster(8), [MODEL.num_layers / work.pp] * work.pp) for work in works]
    together = seconds(stacked(demands), profile)
    alone = np.array([float(seconds(demand, profile)) for demand in demands])
    np.testing.assert_allclose(together, alone, rtol=1e-12)
    assert np.all(alone > 0)


def test_rings_of_more_ranks_take_more_steps() -> None:
    """A step for each rank and bucket of 25 MB; nothing where gradients are not reduced."""
    work = Workload(model=MODEL, seq_len=1024, micro_batch_size=1, global_batch_size=64, zero=0)
    at_8, at_16 = (demand_of(work, cluster(gpus), (16.0,)).grads_steps for gpus in (8, 16))
    assert at_16 == pytest.approx(2 * at_8) and at_8 > 8
    assert demand_of(replace(work, tp=8), cluster(8), (16.0,)).grads_steps == 0


def test_gradients_that_are_reduced_after_the_backward_pass_hide_behind_nothing() -> None:
    """Of a sharded optimizer alone, where a framework does not overlap them."""
    work = Workload(model=MODEL, seq_len=2048, micro_batch_size=2, global_batch_size=64)
    behind = replace(PLAIN, gradient_overlap=1.0, parameter_overlap=0.0)
    after = replace(behind, overlaps_sharded=False)
    for zero, same in ((0, True), (1, False)):
        demand = demand_of(replace(work, zero=zero), cluster(8), (float(MODEL.num_layers),))
        hidden, shown = (spend(demand, profile)["dp_communication"] for profile in (behind, after))
        assert hidden == shown if same else shown > 2 * hidden
        assert seconds(demand, after) - seconds(demand, behind) == pytest.approx(shown - hidden)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_host_that_runs_ahead_lends_from_one_pass_to_the_other(ahead: bool) -> None:
    """Launches that take 1.5 forward passes are hidden behind forward and backward together; those of 4 are not."""
    work = Workload(model=MODEL, seq_len=2048, micro_batch_size=8, global_batch_size=32)
    demand = demand_of(work, cluster(1), (16.0,))
    device = spend(demand, PLAIN)
    layer = (device["gemm"] + device["attention"] + device["memory_bound"]) / (4 * 16) / 3

    def launch(times: float) -> float:
        return float(spend(demand, replace(PLAIN, host_runs_ahead=ahead, launch_us=times * layer * 1e6))["launch"])

    assert (launch(1.4) == 0) == ahead
    assert launch(4.0) > 0


def test_experts_of_our_kernels_cost_the_same_passes_in_every_split() -> None:
    """Sums of gradients are read and written by the product: as many bytes whatever the micro-batch, twice as often."""
    model = ModelConfig(
        num_layers=2, hidden_size=512, num_heads=8, vocab_size=256, max_seq_len=1024, num_experts=16, top_k=2
    )
    work = Workload(model=model, seq_len=1024, micro_batch_size=1, global_batch_size=8, fused_experts=True)
    one, two = (demand_of(replace(work, micro_batch_size=size), cluster(1), (2.0,)) for size in (1, 2))
    assert (
        one.expert_accumulate
        == two.expert_accumulate
        > 0
        == demand_of(replace(work, fused_experts=False), cluster(1), (2.0,)).expert_accumulate
    )
    assert two.expert_weights_backward == pytest.approx(2 * one.expert_weights_backward)
    frozen = demand_of(replace(work, frozen_weights=True), cluster(1), (2.0,))
    assert frozen.expert_weights_backward == 0
    assert frozen.head_gemm < one.head_gemm
