"""What do Megatron-LM's arguments, as its log prints them, say about its speed?

Shares follow from counting: full recomputation makes four forwards of three, so a quarter of the computing time is
spent on it; a pipeline of p stages and m micro-batches idles for (p - 1) / (m v + p - 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from paceline.explain.cause import Cause
from paceline.explain.log_file import LogData


def megatron_causes(log: LogData, facts: Mapping[str, float]) -> Iterator[Cause]:
    """By how much each may cost; what the log lacks for a price is named."""
    if not log.arguments:
        return
    yield from _recomputation(log, facts)
    yield from _bubble(log)
    yield from _switches(log)
    yield from _experts(log)
    yield from _offload(log)


def _recomputation(log: LogData, facts: Mapping[str, float]) -> Iterator[Cause]:
    if log.arguments.get("recompute_granularity") != "full":
        return
    layers, every = log.number("num_layers"), log.number("recompute_num_layers")
    part = 1.0
    if log.arguments.get("recompute_method") == "block" and every > 0 and layers > 0:
        part = min(1.0, every / max(1.0, layers / _at_least_one(log, "pipeline_model_parallel_size")))
    speed = facts.get("tflops")
    hardware = (
        f" The card really does {speed * 4 / 3:.0f} TFLOP/s instead of {speed:.1f}." if speed and part == 1 else ""
    )
    yield Cause(
        id="explain.full-recompute",
        subject="every layer's forward is computed a second time in backward",
        evidence=f"recompute_granularity = full: 4 forwards' worth of work counts as 3, {part / (3 + part):.0%} of the "
        f"computing time.{hardware}",
        next_step="--recompute-granularity selective if memory allows it; a smaller pipeline or more data parallelism "
        "with --use-distributed-optimizer makes room.",
        share=part / (3 + part),
    )


def _bubble(log: LogData) -> Iterator[Cause]:
    stages = log.number("pipeline_model_parallel_size")
    if not stages > 1:
        return
    batch, micro = log.number("global_batch_size"), log.number("micro_batch_size")
    world = log.number("world_size")
    model = stages * _at_least_one(log, "tensor_model_parallel_size") * _at_least_one(log, "context_parallel_size")
    data = log.number("data_parallel_size")
    data = world / model if math.isnan(data) else data
    virtual = log.number("virtual_pipeline_model_parallel_size")
    per_rank = virtual if virtual > 1 else 1.0
    if not batch > 0 or not micro > 0 or not data > 0:
        yield Cause(
            id="explain.pipeline-bubble",
            subject=f"a pipeline of {stages:.0f} stages idles while it fills and empties",
            evidence="Not determined how much: (p - 1) / (m + p - 1) needs the number of micro-batches m = "
            "global batch "
            "/ (micro-batch x data parallel), which the log does not tell.",
            next_step="Tell global and micro batch size; with m = 4 p the bubble is about a fifth.",
            share=None,
        )
        return
    number = batch / (micro * data)
    idle = (stages - 1) / (number * per_rank + stages - 1)
    better = (stages - 1) / (2 * number * per_rank + stages - 1)
    yield Cause(
        id="explain.pipeline-bubble",
        subject=f"{idle:.0%} of a pipeline rank's time is the bubble",
        evidence=f"p = {stages:.0f}, m = {number:.0f} micro-batches, {per_rank:.0f} run(s) of layers a rank: "
        "(p - 1) / (m v + p - 1).",
        next_step="--num-layers-per-virtual-pipeline-stage for interleaving, fewer stages, or more micro-batches "
        "(a smaller micro-batch at the same global batch).",
        share=idle - better,
        certain=idle > 0.1,
    )


def _switches(log: LogData) -> Iterator[Cause]:
    tensor = log.number("tensor_model_parallel_size")
    asked = []
    for name, flag, wanted, why in (
        ("sequence_parallel", "--sequence-parallel", tensor > 1, "less memory and no more traffic"),
        ("use_distributed_optimizer", "--use-distributed-optimizer", True, "memory for less recomputation"),
        ("overlap_grad_reduce", "--overlap-grad-reduce", True, "hides the reduction of gradients"),
        ("overlap_param_gather", "--overlap-param-gather", True, "hides the gathering of parameters"),
        ("use_flash_attn", "--use-flash-attn", log.arguments.get("transformer_impl") == "local", "fused attention"),
    ):
        if not wanted:
            continue
        state = log.is_on(name)
        if state is False:
            yield Cause(
                id=f"explain.megatron-{flag.strip('-')}",
                subject=f"{flag} is off",
                evidence=f"{name} = {log.arguments[name]}; with it: {why}.",
                next_step=f"Add {flag}.",
                share=None,
            )
        elif state is None:
            asked.append(flag)
    if asked:
        yield Cause(
            id="explain.megatron-unknown-flags",
            subject="not determined whether these are on",
            evidence=f"The log does not print {', '.join(asked)}.",
            next_step="Look at the command line; each is worth having.",
            share=None,
        )


def _experts(log: LogData) -> Iterator[Cause]:
    if not log.number("num_experts") > 1:
        return
    advice = []
    if log.is_on("moe_grouped_gemm") is not True:
        advice.append("--moe-grouped-gemm: all experts of a rank in one product")
    dispatcher = log.arguments.get("moe_token_dispatcher_type", "allgather")
    if dispatcher == "allgather":
        advice.append("--moe-token-dispatcher-type alltoall: tokens go to their experts only")
    parallel = log.number("expert_model_parallel_size")
    if not parallel > 1:
        advice.append(
            f"--expert-model-parallel-size {min(8, int(log.number('num_experts')))} with a smaller tensor "
            "parallel size: "
            "experts' products stay large"
        )
    if advice:
        yield Cause(
            id="explain.megatron-experts",
            subject="experts are not run as they could be",
            evidence=f"{log.number('num_experts'):.0f} experts, dispatcher {dispatcher}, grouped products "
            f"{'on' if log.is_on('moe_grouped_gemm') else 'off'}, expert parallel "
            f"{parallel if parallel > 0 else 1:.0f}.",
            next_step="; ".join(advice) + ". NVIDIA/Megatron-LM#756 went from 130 to 230 TFLOP/s with these.",
            share=None,
            severity="warning",
        )


def _offload(log: LogData) -> Iterator[Cause]:
    on = [name for name in ("cpu_offloading", "optimizer_cpu_offload", "offload_optimizer") if log.is_on(name)]
    if on:
        yield Cause(
            id="explain.offload",
            subject="states move between host and card in every step",
            evidence=f"{', '.join(on)} is on.",
            next_step="Leave it out if tensor, pipeline or data parallelism over more cards makes room: "
            "`paceline plan megatron` says what fits.",
            share=None,
            severity="warning",
        )


def _at_least_one(log: LogData, name: str) -> float:
    value = log.number(name)
    return value if value >= 1 else 1.0
