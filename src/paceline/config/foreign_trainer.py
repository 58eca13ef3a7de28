"""Arguments of Transformers' Trainer (4.40 to 5.x), which LLaMA-Factory and ms-swift both stand on.

Batches, the optimizer, checkpoints and DeepSpeed's configuration; lengths of training and the schedule are in
`foreign_duration.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.config.foreign import Draft, Simple, Without
from paceline.config.foreign_duration import accumulation, duration, length, positive, schedule
from paceline.config.foreign_tuning import training_rows
from paceline.config.foreign_values import is_nothing

MEGATRON_LAYOUT: Mapping[str, Simple] = {
    "tensor_model_parallel_size": Simple(ours="parallel.tp", kind="whole"),
    "pipeline_model_parallel_size": Simple(ours="parallel.pp", kind="whole"),
    "context_parallel_size": Simple(ours="parallel.cp", kind="whole"),
    "expert_model_parallel_size": Simple(ours="parallel.ep", kind="whole"),
    "expert_tensor_parallel_size": Simple(ours="parallel.etp", kind="whole"),
}
"""What both programs call degrees where they train by Megatron Core."""

SIMPLE: Mapping[str, Simple] = {
    "output_dir": Simple(ours="run.dir"),
    "run_name": Simple(ours="run.name"),
    "seed": Simple(ours="run.seed", kind="whole"),
    "full_determinism": Simple(ours="run.deterministic", kind="truth"),
    "learning_rate": Simple(ours="optim.lr", kind="number"),
    "weight_decay": Simple(ours="optim.weight_decay", kind="number"),
    "adam_epsilon": Simple(ours="optim.eps", kind="number"),
    "max_grad_norm": Simple(ours="optim.grad_clip", kind="number"),
    "save_total_limit": Simple(ours="checkpoint.keep", kind="whole"),
    "torch_compile": Simple(ours="parallel.compile", kind="truth"),
    "optim": Simple(
        ours="optim.name",
        values={
            **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), "adamw"),
            **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit"), "adamw8bit"),
            "muon": "muon",
        },
    ),
}

_PASSIVE_NAMES = """
do_train do_predict overwrite_output_dir overwrite_cache logging_first_step logging_dir logging_strategy log_level
log_level_replica log_on_each_node logging_nan_inf_filter disable_tqdm plot_loss remove_unused_columns
dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
preprocessing_num_workers preprocessing_batch_size ddp_timeout ddp_find_unused_parameters ddp_bucket_cap_mb
ddp_broadcast_buffers ddp_backend save_safetensors save_on_each_node save_only_model push_to_hub hub_model_id
hub_strategy hub_token hub_private_repo gradient_checkpointing_kwargs skip_memory_metrics include_tokens_per_second
include_num_input_tokens_seen include_for_metrics local_rank tf32 data_seed per_device_eval_batch_size
eval_accumulation_steps eval_on_start eval_delay bf16_full_eval fp16_full_eval eval_do_concat_batches
average_tokens_across_devices use_liger_kernel enable_liger_kernel report_to use_cpu no_cuda debug
prediction_loss_only accelerator_config ignore_data_skip
torch_compile_backend torch_compile_mode batch_eval_metrics save_strategy eval_strategy evaluation_strategy
trust_remote_code use_fast_tokenizer cache_dir model_revision low_cpu_mem_usage resume_from_checkpoint ray_scope
"""
PASSIVE = frozenset(_PASSIVE_NAMES.split())

WITHOUT: Mapping[str, Without] = {
    "load_best_model_at_end": Without(reason="The newest checkpoints are kept; checkpoint.keep_every keeps more."),
    "metric_for_best_model": Without(reason="The newest checkpoints are kept; checkpoint.keep_every keeps more."),
    "greater_is_better": Without(reason="The newest checkpoints are kept; checkpoint.keep_every keeps more."),
    "label_smoothing_factor": Without(
        reason="The cross-entropy has no label smoothing.", severity="error", off=(0, 0.0)
    ),
    "auto_find_batch_size": Without(
        reason="The batch is what is asked for; `paceline train RECIPE --dry-run` says whether it fits."
    ),
    "optim_args": Without(reason="Options of the optimizer are fields of [optim].", severity="error"),
    "optim_target_modules": Without(reason="All matrices are updated by one optimizer.", severity="error"),
    "torch_empty_cache_steps": Without(reason="The allocator is left alone."),
    "include_inputs_for_metrics": Without(reason="Evaluation tells the loss."),
}


def batch(draft: Draft) -> None:
    """Sequences of a step: those of a device, times accumulation, times the processes that read different data."""
    per_device = positive(draft, "per_device_train_batch_size")
    passes = accumulation(draft)
    degrees = max(1, math.prod(draft.fields.get(f"parallel.{axis}", 1) for axis in ("tp", "pp", "cp")))
    readers = max(1, draft.processes // degrees)
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    draft.put("train.micro_batch_size", per_device, names[0])
    whole = per_device * passes * readers
    draft.put("train.global_batch_size", whole, *names, said=f"= {per_device} x {passes} x {readers} readers")
    if draft.processes == 1:
        draft.find(
            "one-process",
            "note",
            f"train.global_batch_size = {whole} is that of one process",
            "The other program multiplies by the number of processes it is started in.",
            "Say in how many it would run: --nproc N.",
        )


def moments(draft: Draft) -> None:
    """The two betas are one field of ours."""
    betas = (draft.value("adam_beta1", "number", 0.9), draft.value("adam_beta2", "number", 0.999))
    draft.put("optim.betas", betas, "adam_beta1", "adam_beta2")


def intervals(draft: Draft) -> None:
    """When to save, to evaluate and to log: in steps, or as a share of them; epochs are told."""
    for name, unit, ours in (
        ("save_steps", "save_strategy", "checkpoint.interval"),
        ("eval_steps", "eval_strategy", "train.eval_interval"),
        ("logging_steps", "logging_strategy", "observe.log_interval"),
    ):
        strategy = str(draft.given.get(unit, draft.given.get(unit.replace("eval", "evaluation"), "steps")))
        if strategy == "no":
            continue
        if strategy == "epoch":
            draft.find(
                "value",
                "warning",
                f"{unit}: epoch has no counterpart",
                "A run counts steps.",
                f"Set {ours} to the steps of an epoch.",
            )
        elif draft.has(name):
            value = draft.value(name, "number")
            if value <= 0:
                draft.find(
                    "value",
                    "error",
                    f"{name}: {value:g} is not above 0",
                    "It is a number of steps, or a share of them.",
                    f"Give such a number, or {unit}: no.",
                )
                continue
            if value < 1:
                total = draft.fields.get("train.steps")
                if total is None:
                    draft.find(
                        "interval",
                        "warning",
                        f"{name}: {value:g} is a share of steps that are not known yet",
                        "A recipe counts steps.",
                        f"Set {ours} to {value:g} x train.steps.",
                    )
                value = 0 if total is None else max(1, round(value * total))
            if value:
                draft.put(ours, int(value), name)


def precision(draft: Draft) -> None:
    """bf16 unless nothing is asked for; fp16 is told."""
    if draft.value("bf16", "truth", False) or draft.value("pure_bf16", "truth", False):
        draft.put("train.precision", "bf16", "bf16", "pure_bf16")
        if draft.value("fp16", "truth", False):
            draft.find("both", "error", "bf16 and fp16 are both true", "A run computes in one.", "Leave fp16 out.")
    elif draft.value("fp16", "truth", False):
        draft.put("train.precision", "bf16", "fp16")
        draft.find(
            "fp16",
            "warning",
            "fp16: true becomes bf16",
            "Losses are not scaled here; bf16 has the range of fp32.",
            "Cards before Ampere have no bf16: set train.precision = 'fp32' there.",
        )
    else:
        draft.put("train.precision", "fp32", said="neither bf16 nor fp16 is asked for")
    if draft.has("pure_bf16"):
        draft.find(
            "masters",
            "note",
            "pure_bf16: true keeps weights in bf16 alone; here masters and moments of what is trained are in fp32",
            "14 bytes more for each weight that is trained, and no update is lost to rounding.",
            "`paceline plan` tells the memory; optim.name = 'adamw8bit' takes 6 bytes less.",
        )


_FSDP_OFF = ("false", "no", "0")


def sharding(draft: Draft) -> None:
    """DeepSpeed's stage and offload, from its file or the name of one, and FSDP's words."""
    asked, fsdp = draft.given.get("deepspeed"), draft.given.get("fsdp")
    if not is_nothing(asked) and not is_nothing(fsdp):
        draft.find("both", "error", "deepspeed and fsdp are both given", "One of them shards.", "Leave one out.")
    if not is_nothing(fsdp):
        words = str(fsdp).lower()  # true and fsdp2 shard everything, as full_shard does
        zero = 2 if "shard_grad_op" in words else 0 if words in _FSDP_OFF or "no_shard" in words else 3
        draft.put("parallel.zero", zero, "fsdp")
        if "offload" in words and zero == 3:
            draft.put("parallel.offload", "parameters", "fsdp")
    if is_nothing(asked):
        return
    found = _deepspeed(asked, draft.folder)
    if found is None:
        draft.find(
            "deepspeed",
            "warning",
            f"deepspeed: {asked} says no stage",
            "It is no file here whose zero_optimization has a stage of 0 to 3, and its name says none.",
            "Set parallel.zero to its stage: 0 to 3.",
        )
        return
    zero, offload = found
    draft.put("parallel.zero", zero, "deepspeed")
    if offload != "none":
        draft.put("parallel.offload", offload, "deepspeed")


def _deepspeed(asked: Any, folder: Path) -> tuple[int, str] | None:
    """(stage, offload) of a table, a file, or of a name such as ``zero3_offload`` or ``ds_z2_config.json``."""
    config = asked if isinstance(asked, Mapping) else _read(folder / str(asked)) or _read(Path(str(asked)))
    if config is not None:
        zero = config.get("zero_optimization") or {}
        if zero is True:  # an old spelling of stage 1
            return 1, "none"
        if not isinstance(zero, Mapping) or str(zero.get("stage", 0)) not in ("0", "1", "2", "3"):
            return None
        stage = int(zero.get("stage", 0))
        held = {name: _is_offloaded(zero.get(f"offload_{name}")) for name in ("param", "optimizer")}
        return stage, "parameters" if held["param"] and stage == 3 else "optimizer" if held["optimizer"] else "none"
    words = Path(str(asked)).stem.lower()
    stage = next((int(digit) for digit in "0123" if f"zero{digit}" in words or f"z{digit}" in words), -1)
    if stage < 0:
        return None
    return stage, "none" if "offload" not in words else "parameters" if stage == 3 else "optimizer"


def _is_offloaded(asked: Any) -> bool:
    """A table with a device, or the device alone."""
    return (asked.get("device") if isinstance(asked, Mapping) else asked) not in (None, False, "none", "")


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


RULES: tuple[tuple[frozenset[str], Callable[[Draft], None]], ...] = (
    (frozenset(("per_device_train_batch_size", "gradient_accumulation_steps")), batch),
    (frozenset(("num_train_epochs", "max_steps", "warmup_ratio")), duration),
    (
        frozenset(("num_train_epochs", "max_steps", "dataloader_drop_last")),
        lambda draft: length(draft, training_rows(draft)),
    ),
    (frozenset(("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_ratio", "warmup_steps")), schedule),
    (frozenset(("adam_beta1", "adam_beta2")), moments),
    (frozenset(("save_steps", "eval_steps", "logging_steps", "do_eval")), intervals),
    (frozenset(("bf16", "fp16", "pure_bf16")), precision),
)
"""In this order, after the rules that set `parallel` and `data`; `sharding` is one of those."""
