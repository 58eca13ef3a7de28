"""A closed-form guess at a layout, in microseconds: which degrees are worth predicting at all?

The order of magnitude of each term, optimistic: half of the peak, links at 80 %, communication hidden where it can be.
Never shown to anybody; `tests/planner/test_space.py` holds that what it lets through contains the best of all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from paceline.config.run import RunConfig
from paceline.costs.adapters import step_flops_per_token
from paceline.costs.layers import moe_parameters
from paceline.costs.state_bytes import StateBytes
from paceline.costs.workload import Cluster, Workload


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """What decides where parameters and tokens lie; everything else is decided within."""

    tp: int
    pp: int
    cp: int
    ep: int
    etp: int
    zero: int
    dp_replicate: int


class Rough:
    """The sizes of one recipe on one cluster, for many degrees."""

    def __init__(self, config: RunConfig, cluster: Cluster) -> None:
        self.config, self.cluster = config, cluster
        model, train = config.model, config.train
        self.layers, self.hidden, self.seq_len = model.num_layers, model.hidden_size, train.seq_len
        self.batch = train.global_batch_size
        self.flops = step_flops_per_token(config) * self.batch * train.seq_len
        self.states = StateBytes.of(Workload.of(config))
        self.total = self.states.frozen or self.states.learned
        moe = [block.feed_forward for block in model.blocks() if block.is_moe]
        self.moe_layers = len(moe)
        self.experts = 0
        for spec in moe:
            router_and_shared = moe_parameters(spec, active=True)  # type: ignore[arg-type]
            whole = moe_parameters(spec)  # type: ignore[arg-type]
            each = (whole - router_and_shared) // max(1, model.num_experts - model.top_k)
            self.experts += each * model.num_experts

    @cached_property
    def peak(self) -> float:
        gpu, precision = self.cluster.gpu, self.config.train.precision
        found = gpu.peak_tflops("fp8" if precision == "fp8" else "bf16") or gpu.peak_tflops("fp16") or 100.0
        return 0.5e12 * found

    def held(self, of: Degrees) -> tuple[float, float]:
        """(dense, expert) parameters of a rank before ZeRO."""
        return (self.total - self.experts) / (of.tp * of.pp), self.experts / (of.ep * of.etp * of.pp)

    def least_bytes(self, of: Degrees) -> float:
        """Of a rank, with everything recomputed and one sequence at a time: less cannot be."""
        dense, experts = self.held(of)
        gpus = self.cluster.gpus
        shards = max(1, gpus // (of.tp * of.pp) // of.dp_replicate)
        expert_shards = max(1, gpus // of.pp // (of.ep * of.etp))
        width = 4 if self.config.train.precision == "fp32" else 2
        accumulate = 2 if self.config.parallel.accumulate_dtype == "bf16" else 4
        moments = {"adamw": 8.0, "adamw8bit": 2.1, "muon": 4.0}[self.config.optim.name]
        states = 0.0
        learned: tuple[tuple[float, int], ...] = ((dense, shards), (experts, expert_shards))
        if self.states.frozen:  # adapters learn alone, about as many on each rank of tp and pp
            learned = ((self.states.learned / (of.tp * of.pp), shards),)
            states = self._frozen_bytes(of, dense / shards + experts / expert_shards, dense + experts, width)
        for count, ways in learned:
            if of.zero <= 1:
                states += count * (width + accumulate) + count * (4 + moments) / (ways if of.zero else 1)
            else:
                states += count * (8 + moments) / ways + (2 * count if of.zero == 2 else 0)
        if self.config.parallel.offload != "none":
            states -= (4 + moments) * sum(count / ways for count, ways in learned)
        tokens = self.seq_len / of.cp / of.tp
        return states + 2 * tokens * self.hidden * self.layers

    def _frozen_bytes(self, of: Degrees, shard: float, whole: float, width: int) -> float:
        """Of a rank's frozen weights: the flat engine has them whole; FSDP shards them as they are computed with, and
        at ZeRO-2 gathers them all."""
        if of.zero <= 1:
            return self.states.each_frozen * whole
        return width * (shard + (whole if of.zero == 2 else 0))

    def seconds(self, of: Degrees) -> float:
        """Of a step, with the micro-batch and the schedule that suit the degrees best."""
        gpus = self.cluster.gpus
        dp = gpus // (of.tp * of.pp * of.cp)
        count = max(1, self.batch // dp)
        compute = self.flops / gpus / self.peak
        if count > 1 and of.pp == 1:
            compute *= 0.97
        stages = max(1, min(8, self.layers // of.pp)) if of.pp > 1 else 1
        seconds = compute * (1 + (of.pp - 1) / (count * stages))
        tokens = self.batch * self.seq_len / dp / of.cp
        layers = self.layers / of.pp
        if of.tp > 1:
            sums = 4 * 2 * tokens * self.hidden * (of.tp - 1) / of.tp
            seconds += layers * sums / self._link(of.tp) + 1e-5 * 4 * layers * count
        if of.cp > 1:
            seconds += 0.03 * compute + 1e-5 * of.cp * layers * count
        if of.ep > 1 and self.moe_layers:
            sent = 4 * 2 * tokens / of.tp * self.hidden * self.config.model.top_k * (of.ep - 1) / of.ep
            seconds += self.moe_layers / of.pp * sent / self._link(of.ep)
        dense, experts = self.held(of)
        learned = self.states.learned / (of.tp * of.pp) if self.states.frozen else dense + experts
        replicas = gpus // (of.tp * of.pp)
        if of.zero >= 2:
            # with micro-batches of several sequences there are fewer of them
            gathers = max(1.0, count / 8) if of.zero == 3 else 1
            traffic = (dense + experts) * 4 * gathers + 4 * learned
            seconds += 0.02 * compute + max(0.0, traffic / self._link(replicas // of.dp_replicate) - 0.8 * compute)
        elif replicas > 1:
            seconds += max(0.1, 1 - 0.5 * compute) * 6 * learned / self._link(of.tp * replicas) / count**0.5
        return seconds

    def _link(self, ranks: int) -> float:
        """Bytes a second of a rank among so many neighbours."""
        gpu = self.cluster.gpu
        inside = gpu.nvlink_gb_per_s or gpu.pcie_gb_per_s or 25.0
        return 0.8e9 * (inside if ranks <= self.cluster.domain else min(inside, self.cluster.node_gb_per_s))
