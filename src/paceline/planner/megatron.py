"""A Megatron-LM command line or launch script as a Paceline recipe, and as a workload that can be predicted.

    run = read_megatron(text, gpus=64)
    run.config       the recipe: [model], [train], [parallel], [optim]
    run.work         the same step as Megatron-LM itself would run it
    run.findings     contradictions (errors), what the flags leave off (warnings, notes), what was not understood

Megatron's own defaults hold: no precision flag is fp32, no distributed optimizer is ZeRO-0, experts are cut over tp
unless told otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.config.load import resolve
from paceline.config.model import ModelConfig
from paceline.config.run import RunConfig
from paceline.costs.workload import Precision, Recompute, Workload
from paceline.errors import ConfigError
from paceline.planner.launch_script import Launch, read_launch
from paceline.planner.megatron_contradictions import contradictions
from paceline.planner.megatron_flags import Flags, parse_flags
from paceline.planner.megatron_model import model_fields, padded
from paceline.planner.megatron_training import optim_fields, run_fields


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees and options as Megatron will use them."""

    tp: int
    pp: int
    cp: int
    ep: int
    etp: int
    stages_per_rank: int
    pipeline_layout: tuple[int, ...]
    zero: int
    fsdp: bool
    """FSDP2 or Megatron-FSDP."""
    recompute: Recompute
    recompute_layers: int
    """With `full` and the block method: so many layers of each rank; 0 = all."""
    micro_batch_size: int
    global_batch_size: int
    seq_len: int
    precision: Precision


@dataclass(frozen=True, kw_only=True)
class MegatronRun:
    """What was read."""

    launch: Launch
    flags: Flags
    layout: Layout
    config: RunConfig
    """The nearest Paceline recipe, with the vocabulary as it is."""
    work: Workload
    """What Megatron-LM runs, with the vocabulary as it pads it."""
    gpus: int
    gpus_reason: str
    gpus_per_node: int

    @property
    def dp(self) -> int:
        return self.work.dp(self.gpus)

    @property
    def micro_batches(self) -> int:
        return self.work.micro_batches(self.gpus)


def read_megatron(
    text: str, *, gpus: int | None = None, gpus_per_node: int | None = None, given: Mapping[str, str] | None = None
) -> MegatronRun:
    """Reads a command line, a list of flags, or a whole script.

    Args:
        gpus: overrides what the script says.
        given: variables that are set before the script begins.

    Raises:
        ConfigError: there is no such command in it, a size is missing, or a value is no number.
    """
    launch = read_launch(text, given)
    flags = parse_flags(launch.flags)
    fields = model_fields(flags)
    layout = _layout(flags, fields)
    count, reason = _world_size(launch, layout, gpus)
    config = _recipe(flags, fields, layout, count, gpus_per_node or launch.gpus_per_node or min(8, count))
    return MegatronRun(
        launch=launch,
        flags=flags,
        layout=layout,
        config=config,
        work=_workload(flags, config, layout),
        gpus=count,
        gpus_reason=reason,
        gpus_per_node=config.cluster.gpus_per_node,
    )


def _world_size(launch: Launch, layout: Layout, gpus: int | None) -> tuple[int, str]:
    if gpus:
        return gpus, "--gpus"
    if launch.world_size:
        nodes = f"{launch.nodes or 1} node{'s' * ((launch.nodes or 1) > 1)} of {launch.gpus_per_node}"
        return launch.world_size, f"{nodes}, says the script"
    fewest = layout.tp * layout.pp * layout.cp
    if (experts := layout.ep * layout.etp) > layout.tp * layout.cp:
        fewest = layout.pp * experts
    return fewest, "the fewest that the layout fits (or --gpus N)"


def _layout(flags: Flags, fields: Mapping[str, Any]) -> Layout:
    tp = flags.degree("tensor-model-parallel-size", 1)
    pp = flags.degree("pipeline-model-parallel-size", 1)
    micro = flags.degree("micro-batch-size", 1)
    fsdp = flags.on("use-torch-fsdp2", "use-megatron-fsdp")
    experts = int(fields.get("num_experts", 0))
    recompute, layers = _recompute(flags)
    layers_of_stage = _pipeline_layout(flags, int(fields["num_layers"]), pp)
    return Layout(
        tp=tp,
        pp=pp,
        cp=flags.degree("context-parallel-size", 1),
        ep=flags.degree("expert-model-parallel-size", 1) if experts else 1,
        etp=flags.degree("expert-tensor-parallel-size", tp) if experts else 1,
        stages_per_rank=len(layers_of_stage) // pp
        if layers_of_stage and len(layers_of_stage) > pp
        else _stages_per_rank(flags, int(fields["num_layers"]), pp),
        pipeline_layout=layers_of_stage,
        zero=_zero(flags),
        fsdp=fsdp,
        recompute=recompute,
        recompute_layers=layers,
        micro_batch_size=micro,
        global_batch_size=flags.integer("global-batch-size", 0),
        seq_len=flags.integer("seq-length", 0),
        precision=_precision(flags),
    )


def _precision(flags: Flags) -> Precision:
    if flags.on("fp8-format"):
        return "mxfp8" if flags.text("fp8-recipe") == "mxfp8" else "fp8"
    if flags.on("fp4-format"):
        return "nvfp4"
    return "bf16" if flags.on("bf16") else "fp16" if flags.on("fp16") else "fp32"


def _zero(flags: Flags) -> int:
    if flags.on("use-torch-fsdp2"):
        return 3
    if flags.on("use-megatron-fsdp"):
        strategies = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
        return strategies.get(flags.text("data-parallel-sharding-strategy", "no_shard"), 0)
    if flags.on("deepspeed"):
        # bf16 under DeepSpeed shards the optimizer's state with stage 0 as well
        return max(flags.integer("zero-stage", 0), int(flags.on("bf16")))
    return int(flags.on("use-distributed-optimizer"))


def _recompute(flags: Flags) -> tuple[Recompute, int]:
    layers = flags.integer("recompute-num-layers", 0)
    if flags.on("checkpoint-activations") or (flags.on("recompute-method") and not flags.on("recompute-granularity")):
        return "full", 0
    if flags.text("recompute-granularity") == "full":
        return "full", layers if flags.text("recompute-method") == "block" else 0
    selective = flags.on("recompute-activations") or flags.text("recompute-granularity") == "selective"
    return ("selective" if selective else "none"), 0


def _stages_per_rank(flags: Flags, layers: int, pp: int) -> int:
    if pp == 1:
        return 1
    if flags.on("num-virtual-stages-per-pipeline-rank"):
        return flags.integer("num-virtual-stages-per-pipeline-rank", 1)
    of_stage = flags.integer("num-layers-per-virtual-pipeline-stage", 0)
    return max(1, layers // pp // of_stage) if of_stage else 1


def _pipeline_layout(flags: Flags, layers: int, pp: int) -> tuple[int, ...]:
    if pp == 1:
        return ()
    text = flags.text("pipeline-model-parallel-layout")
    if text:
        return tuple(stage.count("t") for stage in _expanded(text).split("|"))
    first = flags.integer("decoder-first-pipeline-num-layers", 0)
    last = flags.integer("decoder-last-pipeline-num-layers", 0)
    if first or last:
        rest, between = layers - first - last, pp - bool(first) - bool(last)
        if between <= 0 or rest % between:
            return ()  # refused by `conflicts`
        return (*((first,) if first else ()), *(rest // between,) * between, *((last,) if last else ()))
    # DeepSpeed's partition by type counts embedding and head as layers
    counted = "embedding" in flags.text("pp-partition-method")
    embedding = counted or flags.on("account-for-embedding-in-pipeline-split")
    loss = counted or flags.on("account-for-loss-in-pipeline-split")
    if (embedding or loss) and (layers + embedding + loss) % pp == 0:
        each = (layers + embedding + loss) // pp
        return (each - embedding, *(each,) * (pp - 2), each - loss)
    return ()


def _expanded(text: str) -> str:
    """``Et*2|(tt|)*3mL`` as ``Ett|tt|tt|tt|mL``."""
    text = text.strip("'\"").replace(",", "")
    while found := re.search(r"\(([^()]*)\)(?:\*(\d+))?", text):
        text = text[: found.start()] + found[1] * int(found[2] or 1) + text[found.end() :]
    return re.sub(r"(\w)\*(\d+)", lambda found: found[1] * int(found[2]), text).strip("|")


def _recipe(flags: Flags, fields: Mapping[str, Any], layout: Layout, gpus: int, gpus_per_node: int) -> RunConfig:
    micro = layout.micro_batch_size
    # not given, it is one micro-batch of every data-parallel rank
    whole = layout.global_batch_size or micro * max(1, gpus // (layout.tp * layout.pp * layout.cp))
    if layout.seq_len < 2:
        raise ConfigError("--seq-length is not given", next_step="Add --seq-length.")
    parallel: dict[str, Any] = {
        "tp": layout.tp,
        "pp": layout.pp,
        "cp": layout.cp,
        "ep": layout.ep,
        "etp": layout.etp,
        "zero": layout.zero,
        "stages_per_rank": layout.stages_per_rank,
        "pipeline_schedule": "interleaved_1f1b" if layout.stages_per_rank > 1 else "1f1b",
        "pipeline_layout": list(layout.pipeline_layout),
        "cp_method": "ulysses" if flags.text("cp-comm-type") == "a2a" else "ring",
        "recompute": layout.recompute,
        "reduce_dtype": "bf16" if flags.on("grad-reduce-in-bf16") else "fp32",
        "offload": "optimizer" if flags.on("optimizer-cpu-offload") else "none",
    }
    samples = flags.integer("train-samples", 0)
    train: dict[str, Any] = {
        "steps": flags.integer("train-iters", max(1, samples // whole)),
        "micro_batch_size": micro,
        # Megatron lets the check of the batch fail later than ours; the real one is in `conflicts`
        "global_batch_size": whole if whole % micro == 0 else -(-whole // micro) * micro,
        "seq_len": layout.seq_len,
        "precision": {"fp32": "fp32", "bf16": "bf16", "fp16": "bf16"}.get(layout.precision, "fp8"),
        "loss_kernel": "chunked",
    }
    tables = {
        "run": {"name": "from_megatron", **run_fields(flags)},
        "model": dict(fields),
        "train": train,
        "parallel": parallel,
        "optim": optim_fields(flags, train["steps"], whole),
        "cluster": {"gpus_per_node": gpus_per_node},
    }
    try:
        return resolve(tables).config
    except ConfigError as problem:
        besides = "; ".join(finding.subject for finding in contradictions(flags))
        raise ConfigError(
            f"these flags describe no model that can be built: {_in_flags(problem.subject)}",
            evidence=" ".join(filter(None, (_in_flags(problem.evidence), besides and f"Besides: {besides}."))),
            next_step=_in_flags(problem.next_step),
        ) from problem


_FLAG_OF = {
    "num_heads": "num-attention-heads",
    "num_kv_heads": "num-query-groups",
    "head_dim": "kv-channels",
    "hidden_size": "hidden-size",
    "ffn_size": "ffn-hidden-size",
    "num_layers": "num-layers",
    "vocab_size": "vocab-size",
    "max_seq_len": "max-position-embeddings",
    "num_experts": "num-experts",
    "top_k": "moe-router-topk",
    "rope_fraction": "rotary-percent",
    "rope_theta": "rotary-base",
    "sliding_window": "window-size",
    "q_lora_rank": "q-lora-rank",
    "kv_lora_rank": "kv-lora-rank",
    "qk_nope_head_dim": "qk-head-dim",
    "qk_rope_head_dim": "qk-pos-emb-head-dim",
    "v_head_dim": "v-head-dim",
    "mtp_layers": "mtp-num-layers",
    "seq_len": "seq-length",
    "global_batch_size": "global-batch-size",
    "micro_batch_size": "micro-batch-size",
    # these only with their section: as words they are everywhere
    "tp": "tensor-model-parallel-size",
    "pp": "pipeline-model-parallel-size",
    "cp": "context-parallel-size",
    "ep": "expert-model-parallel-size",
    "etp": "expert-tensor-parallel-size",
}


def _in_flags(text: str) -> str:
    """A message about a recipe with Megatron's flags in place of the recipe's keys."""
    written = {name if "_" in name else rf"parallel\.{name}": flag for name, flag in _FLAG_OF.items()}
    for name, flag in written.items():
        text = re.sub(rf"\b(?:(?:model|train|parallel)\.(?:moe\.)?)?{name}\b", f"--{flag}", text)
    return re.sub(r"(--[\w-]+) = ", r"\1 ", text)


def _workload(flags: Flags, config: RunConfig, layout: Layout) -> Workload:
    model = padded_model(config, flags, layout.tp)
    backend = flags.text("attention-backend", "auto")
    fused = flags.on("use-flash-attn") or backend in ("flash", "fused") or _has_engine(flags, backend)
    zero = layout.zero
    assert zero in (0, 1, 2, 3)
    return Workload(
        model=model,
        seq_len=layout.seq_len,
        micro_batch_size=layout.micro_batch_size,
        global_batch_size=config.train.global_batch_size,
        precision=layout.precision,
        tp=layout.tp,
        pp=layout.pp,
        cp=layout.cp,
        ep=layout.ep,
        etp=layout.etp,
        zero=zero,  # type: ignore[arg-type]
        stages_per_rank=layout.stages_per_rank,
        pipeline_layout=layout.pipeline_layout,
        cp_method=config.parallel.cp_method,
        sequence_parallel=layout.tp == 1 or flags.on("sequence-parallel"),
        recompute=layout.recompute,
        recompute_modules=flags.given.get("recompute-modules", ()),
        offload=config.parallel.offload,
        fused_attention=fused,
        chunked_loss=False,
        reduce_bf16=flags.on("grad-reduce-in-bf16"),
        accumulate_bf16=flags.text("main-grads-dtype") == "bf16",
        fused_weight_gradients=not flags.on("no-gradient-accumulation-fusion"),
        async_tp=flags.on("tp-comm-overlap"),
        dispatcher_permutes=flags.text("moe-token-dispatcher-type") == "flex",
        overlaps_experts=flags.on("overlap-moe-expert-parallel-comm"),
    )


def padded_model(config: RunConfig, flags: Flags, tp: int) -> ModelConfig:
    """The model with the vocabulary as Megatron pads it for so many tensor-parallel ranks."""
    return config.model.model_copy(update={"vocab_size": padded(config.model.vocab_size, flags, tp)})


def _has_engine(flags: Flags, backend: str) -> bool:
    """Transformer Engine, today's default, picks a fused kernel by itself; the local layers have none."""
    return backend == "auto" and flags.text("transformer-impl") in ("", "transformer_engine")
