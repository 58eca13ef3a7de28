"""Where does a step go? A demand divided by a profile's efficiencies, laid on a timeline.

The arithmetic works on floats and, for fits, on arrays over thousands of layouts alike.

Stages of a pipeline run m micro-batches; the slowest one decides, and every other is passed once on the way in and out:
T = m t_max + (sum of all stages - t_max) / v for v runs of layers a rank (the lists of `costs/pipeline.py`, simulated,
give the same; tests/costs/test_spend.py). With one stage that is m t.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.costs.demand import Demand
from paceline.costs.profiles import Profile

Number = Any


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """A layer's forward or backward."""

    gemm: Number
    attention: Number
    memory: Number
    again: Number
    tp: Number
    cp: Number
    ep: Number
    launch: Number
    """What the host takes longer than the device."""

    @property
    def device(self) -> Number:
        return self.gemm + self.attention + self.memory + self.again + self.tp + self.cp + self.ep

    @property
    def total(self) -> Number:
        return self.device + self.launch


def _where(condition: Number, yes: Number, no: Number) -> Number:
    """`numpy.where` whose result counts as a number."""
    return np.where(condition, yes, no)


def _passes(d: Demand, p: Profile) -> tuple[_Pass, _Pass]:
    far = 1.0 + p.far_loss * d.tp_far
    tp_once = d.tp_fast / p.nvlink_efficiency + far * d.tp_node / p.network_efficiency
    tp_once = tp_once + (d.tp_calls * p.call_us + d.tp_wide * p.wide_call_us) * 1e-6
    tp_once = tp_once * (1 - _where(d.tp_async > 0, p.async_tensor_overlap, p.tensor_overlap))
    ep_once = d.ep_fast / p.nvlink_efficiency + d.ep_node / p.network_efficiency + d.ep_calls * p.call_us * 1e-6
    ep_once = ep_once * (1 - p.expert_overlap)
    cp_once = d.cp_fast / p.nvlink_efficiency + d.cp_node / p.network_efficiency
    host = d.launches * p.launch_us * 1e-6 + (d.tp_calls + d.ep_calls) * p.call_launch_us * 1e-6
    host = host + far * d.tp_crowd * p.crowded_call_us * 1e-6
    kernel = p.attention_efficiency * _where(d.hopper > 0, p.hopper_attention, 1.0)
    attention = d.attention_forward / kernel
    clock = _where(d.ultra > 0, p.ultra_products, 1.0)
    gemm, expert_gemm = p.gemm_efficiency * clock, p.expert_gemm_efficiency * clock
    forward = _pass(
        gemm=d.gemm_forward / gemm + d.expert_gemm_forward / expert_gemm,
        attention=attention + d.scores_forward / p.score_efficiency,
        memory=d.memory_forward / p.hbm_efficiency
        + d.expert_memory_forward / p.expert_hbm_efficiency
        + d.cast_forward / p.cast_efficiency,
        again=0.0 * attention,
        tp=tp_once,
        cp=np.maximum(cp_once - p.ring_overlap * attention, 0.1 * cp_once),
        ep=ep_once,
        host=host,
    )
    again = d.gemm_again / gemm + d.attention_again / kernel + d.memory_again / p.hbm_efficiency
    attention = d.attention_backward / kernel
    backward = _pass(
        gemm=d.gemm_backward / gemm + d.expert_gemm_backward / expert_gemm,
        attention=attention + d.scores_backward / p.score_efficiency,
        memory=d.memory_backward / p.hbm_efficiency
        + d.expert_memory_backward / p.expert_hbm_efficiency
        + d.cast_backward / p.cast_efficiency,
        again=again,
        tp=tp_once * (1 + d.communication_again),
        cp=np.maximum(2 * cp_once - p.ring_overlap * attention, 0.1 * cp_once),
        ep=ep_once * (1 + d.communication_again),
        host=host * (1 + d.communication_again),
    )
    return forward, backward


def _pass(*, host: Number, **parts: Number) -> _Pass:
    device = sum(parts.values())
    return _Pass(**parts, launch=np.maximum(host - device, 0.0))


def spend(d: Demand, p: Profile) -> dict[str, Number]:
    """Seconds of a step by `costs/step.py: PARTS`; they sum to the step."""
    forward, backward = _passes(d, p)
    m = d.micro_batches
    layer = forward.total + backward.total
    # accumulation of gradients is a stage's, not a layer's
    head_gemm, head_memory = (
        d.head_gemm / (p.gemm_efficiency * _where(d.ultra > 0, p.ultra_products, 1.0)),
        d.head_memory / p.hbm_efficiency,
    )
    rest = p.micro_batch_ms * 1e-3 + d.accumulate / p.hbm_efficiency * (m > 1)
    inside = d.layers_inside * layer + rest
    last = d.layers_last * layer + head_gemm + head_memory + rest
    last_is_worst = last >= inside
    worst = _where(last_is_worst, last, inside)
    at = _where(last_is_worst, d.layers_last, d.layers_inside)
    everything = d.layers * layer + head_gemm + head_memory + d.pipeline * rest
    send = d.pp_fast / p.nvlink_efficiency + d.pp_node / p.network_efficiency + p.send_us * 1e-6
    piped = d.pipeline > 1
    sends = piped * m * 2 * d.interleaved * send * p.send_exposed
    bubble = (everything - worst) / d.interleaved + piped * 2 * (d.pipeline - 1) * send
    # what the last backward and the next forward can hide
    stage_forward, stage_backward = at * forward.total, at * backward.total
    network = p.network_efficiency * p.data_network
    reduce = d.grads_fast / p.nvlink_efficiency + d.grads_node / network + d.grads_steps * p.ring_step_us * 1e-6
    reduce = reduce * _where((d.zero > 0) & (not p.reduces_whole), 1.0, 2.0)
    gather = d.params_fast / p.nvlink_efficiency + d.params_node / network + d.dp_tensors * p.tensor_gather_us * 1e-6
    once = _exposed(reduce, p.gradient_overlap * stage_backward) + _exposed(gather, p.parameter_overlap * stage_forward)
    hidden = p.gradient_overlap * stage_backward
    backward_gather = _exposed(gather, hidden)
    forward_gather = _exposed(gather, p.parameter_overlap * stage_forward)
    if p.accumulates_whole:
        always = m * (forward_gather + backward_gather) + _exposed(reduce, hidden)
    else:
        always = m * (forward_gather + _exposed(gather + reduce, hidden))
    link = p.host_link_efficiency
    offload = _exposed(d.host_down / link, p.gradient_overlap * stage_backward) + d.host_update
    offload = offload + _exposed(d.host_up / link, p.parameter_overlap * stage_forward)
    each = d.host_up_each / link
    offload = offload + m * (_exposed(each, hidden) + _exposed(each, p.parameter_overlap * stage_forward))
    dp = _where(d.sharded > 0, always, once)
    loss = _where(last_is_worst, 1.0, 0.0)

    def per_step(name: str) -> Number:
        return m * at * (getattr(forward, name) + getattr(backward, name))

    parts = {
        "gemm": per_step("gemm") + m * loss * head_gemm,
        "attention": per_step("attention"),
        "memory_bound": per_step("memory") + m * loss * head_memory + m * d.accumulate / p.hbm_efficiency * (m > 1),
        "launch": per_step("launch"),
        "recompute": per_step("again"),
        "tp_communication": per_step("tp"),
        "cp_communication": per_step("cp"),
        "ep_communication": per_step("ep"),
        "pp_communication": sends,
        "dp_communication": dp,
        "bubble": bubble,
        "optimizer": d.optimizer_bytes
        / _where(d.optimizer_fused > 0, p.fused_optimizer_efficiency, p.optimizer_efficiency),
        "offload": offload,
        "overhead": m * p.micro_batch_ms * 1e-3
        + p.step_ms * 1e-3
        + p.step_latency_ms * 1e-3 * np.log2(np.maximum(d.dp_size, 1)),
    }
    parts["overhead"] = parts["overhead"] + p.jitter * np.log2(d.nodes) * sum(parts.values())
    return parts


def _exposed(communication: Number, window: Number) -> Number:
    """What is left of it beside a window; the last bucket always is."""
    return np.maximum(communication - window, 0.03 * communication)


def seconds(d: Demand, p: Profile) -> Number:
    """Of a step."""
    return sum(spend(d, p).values())
