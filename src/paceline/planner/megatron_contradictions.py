"""Flags of a Megatron-LM command line that contradict each other whatever the model is: asked also where the flags
describe no model that can be built."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.config.asked import error
from paceline.planner.megatron_flags import Flags
from paceline.report.finding import Finding


def contradictions(flags: Flags) -> Iterator[Finding]:
    """Pairs of flags, and flags without the one that they need."""
    pairs = (
        ("fp16", "bf16", "Parameters have one precision.", "Keep --bf16 on Ampere and later."),
        ("train-iters", "train-samples", "The run's length is given twice.", "Keep one of them."),
        ("lr-warmup-iters", "lr-warmup-fraction", "The warm-up is given twice.", "Keep one of them."),
        (
            "use-torch-fsdp2",
            "use-distributed-optimizer",
            "FSDP2 shards the optimizer's state itself; Megatron asserts.",
            "Drop --use-distributed-optimizer.",
        ),
        (
            "use-torch-fsdp2",
            "use-megatron-fsdp",
            "They are two implementations of the same thing.",
            "Keep one of them.",
        ),
        (
            "recompute-activations",
            "recompute-granularity",
            "--recompute-activations is --recompute-granularity selective.",
            "Keep --recompute-granularity.",
        ),
        ("swiglu", "squared-relu", "An MLP has one activation.", "Keep one of them."),
        ("swiglu", "openai-gelu", "An MLP has one activation.", "Keep one of them."),
        ("sequence-parallel", "no-async-tensor-model-parallel-allreduce", "", ""),
    )
    for first, second, because, step in pairs:
        if because and flags.on(first) and flags.on(second):
            yield error("megatron.contradiction", f"--{first} and --{second} are both given", because, step)
    needs = (
        ("overlap-param-gather", ("use-distributed-optimizer", "use-megatron-fsdp", "use-torch-fsdp2")),
        ("overlap-param-gather", ("overlap-grad-reduce", "use-megatron-fsdp", "use-torch-fsdp2")),
        ("fp8-param-gather", ("fp8-format",)),
        ("group-query-attention", ("num-query-groups",)),
        ("tp-comm-overlap", ("sequence-parallel",)),
    )
    for name, others in needs:
        if flags.on(name) and not flags.on(*others):
            yield error(
                "megatron.contradiction",
                f"--{name} without --{others[0]}",
                f"--{name} needs it; Megatron asserts.",
                f"Add --{others[0]}, or drop --{name}.",
            )
    if flags.text("recompute-granularity") == "selective" and flags.on("recompute-method"):
        yield error(
            "megatron.contradiction",
            f"--recompute-granularity selective with --recompute-method {flags.text('recompute-method')}",
            "Methods (uniform, block) are those of full recomputation.",
            "Drop --recompute-method, or say --recompute-granularity full.",
        )
    if flags.text("recompute-granularity") == "full" and not flags.on("recompute-method"):
        yield error(
            "megatron.contradiction",
            "--recompute-granularity full without --recompute-method",
            "Megatron asserts that a method (uniform or block) is given.",
            "Add --recompute-method uniform --recompute-num-layers 1.",
        )
    tp = flags.integer("tensor-model-parallel-size", 1)
    if flags.integer("num-experts", 0) > 1 and tp > 1 and not flags.on("sequence-parallel"):
        yield error(
            "megatron.contradiction",
            f"--num-experts {flags.text('num-experts')} with --tensor-model-parallel-size {tp} and no "
            "--sequence-parallel",
            "Megatron trains experts with tensor parallelism only where sequences are parallel too.",
            "Add --sequence-parallel.",
        )
