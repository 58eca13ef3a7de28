"""Where does a step go? A demand divided by a profile's efficiencies, laid on a timeline.

The arithmetic works on floats and, for fits, on arrays over thousands of layouts alike.

Stages of a pipeline run m micro-batches; the slowest one decides, and every other is passed once on the way in and out:
T = m t_max + (sum of all stages - t_max) / v for v runs of layers a rank. With one stage that is m t. Where a backward
pass is split, gradients of weights fill the way out: of a stage's F + I + W, `zero_bubble` leaves F + I - W idle, and
`zbv` F. The lists of `costs/pipeline.py`, simulated, give the same
(tests/costs/test_spend.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
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

    def repeated(self, times: Number) -> _Pass:
        """So often one after the other."""
        return _Pass(**{field.name: getattr(self, field.name) * times for field in fields(self)})


def _where(condition: Number, yes: Number, no: Number) -> Number:
    """`numpy.where`; of single layouts, which a search asks for by the thousand, without numpy's cost."""
    if isinstance(condition, np.ndarray):
        return np.where(condition, yes, no)
    return yes if condition else no


def _most(one: Number, other: Number) -> Number:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.maximum(one, other)
    return one if one >= other else other


def _any(value: Number) -> bool:
    return bool(value.any()) if isinstance(value, np.ndarray) else bool(value)


def _doublings(value: Number) -> Number:
    """log2, at least of 1."""
    return np.log2(np.maximum(value, 1)) if isinstance(value, np.ndarray) else math.log2(max(value, 1))


def _passes(d: Demand, p: Profile) -> tuple[_Pass, _Pass]:
    far = 1.0 + p.far_loss * d.tp_far
    tp_once = d.tp_fast / p.nvlink_efficiency + far * d.tp_node / p.network_efficiency
    tp_once = tp_once + (d.tp_calls * p.call_us + d.tp_wide * p.wide_call_us) * 1e-6
    tp_once = tp_once * (1 - _where(d.tp_async > 0, p.async_tensor_overlap, p.tensor_overlap))
    ep_once = d.ep_fast / p.nvlink_efficiency + d.ep_node / p.network_efficiency + d.ep_calls * p.call_us * 1e-6
    cp_once = d.cp_fast / p.nvlink_efficiency + d.cp_node / p.network_efficiency
    host = d.launches * p.launch_us * 1e-6 + (d.tp_calls + d.ep_calls) * p.call_launch_us * 1e-6
    host = host + far * d.tp_crowd * p.crowded_call_us * 1e-6
    each_expert = d.expert_calls * p.expert_call_us * 1e-6
    kernel = p.attention_efficiency * _where(d.hopper > 0, p.hopper_attention, 1.0)
    attention = d.attention_forward / kernel
    clock = _where(d.ultra > 0, p.ultra_products, 1.0)
    passes = _where(d.eager > 0, p.eager_passes, 1.0) / p.hbm_efficiency
    of_rows = _where(d.eager_experts > 0, p.eager_passes, 1.0)
    of_rows = of_rows / _where(d.fused_experts > 0, p.fused_expert_hbm_efficiency, p.expert_hbm_efficiency)
    hides = d.ep_hidden * p.expert_overlap
    biases = d.expert_biases * 0.5 * p.expert_bias_passes
    of_experts = (d.expert_memory_forward + biases) * of_rows, (d.expert_memory_backward + biases) * of_rows
    gemm, expert_gemm = p.gemm_efficiency * clock, p.expert_gemm_efficiency * clock
    expert_weights = d.expert_weights_backward / (p.expert_weight_efficiency * clock)
    forward = _pass(
        gemm=d.gemm_forward / gemm + d.expert_gemm_forward / expert_gemm,
        attention=attention + d.scores_forward / p.score_efficiency,
        memory=d.memory_forward * passes + of_experts[0] + d.cast_forward / p.cast_efficiency,
        again=0.0 * attention,
        tp=tp_once,
        cp=_most(cp_once - p.ring_overlap * attention, 0.1 * cp_once),
        ep=ep_once,
        hides=hides,
        host=host + each_expert,
    )
    again = d.gemm_again / gemm + d.attention_again / kernel + d.memory_again * passes
    attention = d.attention_backward / kernel
    backward = _pass(
        gemm=d.gemm_backward / gemm + d.expert_gemm_backward / expert_gemm + expert_weights,
        attention=attention + d.scores_backward / p.score_efficiency,
        memory=d.memory_backward * passes + of_experts[1] + d.cast_backward / p.cast_efficiency,
        again=again,
        tp=tp_once * (1 + d.communication_again),
        cp=_most(2 * cp_once - p.ring_overlap * attention, 0.1 * cp_once),
        ep=ep_once * (1 + d.communication_again),
        hides=hides,
        host=host * (1 + d.communication_again) + each_expert * (2 + d.communication_again),
    )
    forward = forward.repeated(d.forwards)
    if p.host_runs_ahead:
        late = host * d.forwards + host * (1 + d.communication_again) - forward.device - backward.device
        forward, backward = replace(forward, launch=_most(late, 0.0)), replace(backward, launch=0.0 * late)
    return forward, backward


def _pass(*, host: Number, ep: Number, hides: Number, **parts: Number) -> _Pass:
    """``hides``: the share of the rest behind which rows of experts are sent."""
    rest = sum(parts.values())
    exposed = _most(ep - hides * rest, _EXPERTS_EXPOSED * ep) if _any(ep) else ep
    return _Pass(**parts, ep=_where(hides > 0, exposed, ep), launch=_most(host - rest - exposed, 0.0))


@dataclass(frozen=True, kw_only=True)
class _Step:
    """What a step is made of, on the slowest pipeline rank."""

    micro_batches: Number
    forward: _Pass
    backward: _Pass
    layers: Number
    """Of that rank."""
    head: Number
    """1 where it has the head."""
    head_gemm: Number
    head_memory: Number
    accumulate: Number
    """Of a micro-batch: adding its gradients to the sum."""
    sends: Number
    bubble: Number
    data_parallel: Number
    optimizer: Number
    offload: Number
    overhead: Number


def _step(d: Demand, p: Profile) -> _Step:
    forward, backward = _passes(d, p)
    m = d.micro_batches
    layer = forward.total + backward.total
    # accumulation of gradients is a stage's, not a layer's
    accumulate = d.accumulate / p.hbm_efficiency * (m > 1)
    # a first micro-batch's are written, not read
    accumulate = accumulate + d.expert_accumulate / p.fused_expert_hbm_efficiency * _where(m > 1, 1.0, 0.5)
    head_gemm = d.head_gemm / (p.gemm_efficiency * _where(d.ultra > 0, p.ultra_products, 1.0))
    head_memory = d.head_memory / p.hbm_efficiency
    rest = p.micro_batch_ms * 1e-3 + accumulate
    inside = d.layers_inside * layer + rest
    last = d.layers_last * layer + head_gemm + head_memory + rest
    last_is_worst = last >= inside
    at = _where(last_is_worst, d.layers_last, d.layers_inside)
    everything = d.layers * layer + head_gemm + head_memory + d.pipeline * rest
    idle = (everything - _where(last_is_worst, last, inside)) * _idle_share(d, forward, backward)
    send = d.pp_fast / p.nvlink_efficiency + d.pp_node / p.network_efficiency + p.send_us * 1e-6
    piped = d.pipeline > 1
    # what the last backward and the next forward can hide
    before, behind = p.parameter_overlap * at * forward.total, p.gradient_overlap * at * backward.total
    if not p.overlaps_sharded:
        behind = behind * _where(d.zero > 0, 0.0, 1.0)
    latency = p.step_latency_ms * _doublings(d.dp_size)
    return _Step(
        micro_batches=m,
        forward=forward,
        backward=backward,
        layers=at,
        head=_where(last_is_worst, 1.0, 0.0),
        head_gemm=head_gemm,
        head_memory=head_memory,
        accumulate=accumulate,
        sends=piped * m * 2 * d.interleaved * send * p.send_exposed,
        bubble=idle + piped * 2 * (d.pipeline - 1) * send,
        data_parallel=_data_parallel(d, p, before, behind),
        optimizer=d.optimizer_bytes
        / _where(d.optimizer_fused > 0, p.fused_optimizer_efficiency, p.optimizer_efficiency),
        offload=_offload(d, p, before, behind),
        overhead=(m * p.micro_batch_ms + p.step_ms + latency) * 1e-3,
    )


def _idle_share(d: Demand, forward: _Pass, backward: _Pass) -> Number:
    """Of what a pipeline of one stage a rank is idle with 1F1B: the work of a micro-batch on all other ranks.

    Fewer micro-batches than ranks leave less to interleave: of p - 1, p - m are passed as if there were one stage a
    rank, and m - 1 at the pace of v. Of a single micro-batch nothing is interleaved. So it is in `costs/pipeline.py`,
    which has the schedules' timelines: to the digit, but for zero bubble with several stages a rank and m < p, which
    is up to two fifths less idle than this.
    """
    p, m, v = d.pipeline, d.micro_batches, d.interleaved
    others = _most(p - 1, 1)
    paced = _where(m < p, (p - m + (m - 1) / v) / others, 1 / v)
    if not _any(d.splits):
        return paced
    weights = 0.5 * backward.gemm  # of a linear's two products; attention and the rest have none
    inputs, whole = backward.total - weights, forward.total + backward.total
    # the products for weights of the micro-batches before fill up
    filled = 1 - _most(p - m, 0) / others
    zero_bubble = _most(forward.total + inputs - filled * weights, 0.0) / whole
    of_few = (forward.total + inputs) - (m - 1) * weights / others
    v_shaped = _most(forward.total / v, of_few) / whole
    return _where(d.splits == 0, paced, _where(d.splits == 1, zero_bubble * paced, v_shaped))


def _data_parallel(d: Demand, p: Profile, before: Number, behind: Number) -> Number:
    """What is not hidden of reductions and gathers. ``before``, ``behind``: what a forward, a backward can hide."""
    network = p.network_efficiency * p.data_network
    reduce = d.grads_fast / p.nvlink_efficiency + d.grads_node / network + d.grads_steps * p.ring_step_us * 1e-6
    reduce = reduce * _where((d.zero > 0) & (not p.reduces_whole), 1.0, 2.0)
    gather = d.params_fast / p.nvlink_efficiency + d.params_node / network + d.dp_tensors * p.tensor_gather_us * 1e-6
    reduced, gathered = _exposed(reduce, behind), _exposed(gather, before)
    if not _any(d.sharded):
        return reduced + gathered + _copies(d, p)
    if p.accumulates_whole:
        always = d.micro_batches * (gathered + _exposed(gather, behind)) + reduced
    else:
        always = d.micro_batches * (gathered + _exposed(gather + reduce, behind))
    return _where(d.sharded > 0, always, reduced + gathered) + _copies(d, p)


def _copies(d: Demand, p: Profile) -> Number:
    """At the rate of one large copy."""
    if not p.copies_shards:
        return 0.0
    return (d.micro_batches * d.copies_each + d.copies_once) / p.fused_optimizer_efficiency


def _offload(d: Demand, p: Profile, before: Number, behind: Number) -> Number:
    if not _any(d.host_update):
        return 0.0
    link = p.host_link_efficiency
    once = _exposed(d.host_down / link, behind) + d.host_update + _exposed(d.host_up / link, before)
    each = d.host_up_each / link
    return once + d.micro_batches * (_exposed(each, behind) + _exposed(each, before))


_EXPERTS_EXPOSED = 0.1
"""Of rows' sending that is hidden: the first and the last of a step."""


def _exposed(communication: Number, window: Number) -> Number:
    """What is left of it beside a window; the last bucket always is."""
    return _most(communication - window, 0.03 * communication)


def spend(d: Demand, p: Profile) -> dict[str, Number]:
    """Seconds of a step by `costs/step.py: PARTS`; they sum to the step."""
    step = _step(d, p)
    m = step.micro_batches

    def per_step(name: str) -> Number:
        return m * step.layers * (getattr(step.forward, name) + getattr(step.backward, name))

    return {
        "gemm": per_step("gemm") + m * step.head * step.head_gemm,
        "attention": per_step("attention"),
        "memory_bound": per_step("memory") + m * (step.head * step.head_memory + step.accumulate),
        "launch": per_step("launch"),
        "recompute": per_step("again"),
        "tp_communication": per_step("tp"),
        "cp_communication": per_step("cp"),
        "ep_communication": per_step("ep"),
        "pp_communication": step.sends,
        "dp_communication": step.data_parallel,
        "bubble": step.bubble,
        "optimizer": step.optimizer,
        "offload": step.offload,
        "overhead": step.overhead,
    }


def seconds(d: Demand, p: Profile) -> Number:
    """Of a step: the sum of `spend`, at half its cost."""
    step = _step(d, p)
    of_rank = step.layers * (step.forward.total + step.backward.total) + step.accumulate
    of_rank = of_rank + step.head * (step.head_gemm + step.head_memory)
    whole = step.micro_batches * of_rank + step.sends + step.bubble + step.data_parallel
    return whole + step.optimizer + step.offload + step.overhead
