"""Arguments of Transformers' Trainer (4.40 to 5.x), which LLaMA-Factory and ms-swift both stand on.

Batches, lengths of training, the optimizer, the schedule, checkpoints and DeepSpeed's configuration.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.config.foreign import Draft, Kind, Simple, Without, converted, is_nothing, tables_of
from paceline.config.foreign_tuning import training_rows
from paceline.errors import ConfigError

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

_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "warmup_stable_decay": "wsd",
}


def positive(draft: Draft, name: str, default: int = 1) -> int:
    """A number of 1 or more.

    Raises:
        ConfigError: it is none.
    """
    value = int(draft.value(name, "whole", default))
    if value < 1:
        raise ConfigError(f"{name}: {value} is below 1", next_step=f"Give {name} a number of 1 or more.")
    return value


def batch(draft: Draft) -> None:
    """Sequences of a step: those of a device, times accumulation, times the processes that read different data."""
    per_device = positive(draft, "per_device_train_batch_size")
    accumulation = _accumulation(draft)
    degrees = max(1, math.prod(draft.fields.get(f"parallel.{axis}", 1) for axis in ("tp", "pp", "cp")))
    readers = max(1, draft.processes // degrees)
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    draft.put("train.micro_batch_size", per_device, names[0])
    whole = per_device * accumulation * readers
    draft.put("train.global_batch_size", whole, *names, said=f"= {per_device} x {accumulation} x {readers} readers")
    if draft.processes == 1:
        draft.find(
            "one-process",
            "note",
            f"train.global_batch_size = {whole} is that of one process",
            "The other program multiplies by the number of processes it is started in.",
            "Say in how many it would run: --nproc N.",
        )


def _accumulation(draft: Draft) -> int:
    """Batches of a device in a step."""
    name = "gradient_accumulation_steps"
    if name in draft.system.defaults or draft.has(name):
        return positive(draft, name)
    # ms-swift: so many that a step has 16 sequences or more
    return max(1, math.ceil(16 / (positive(draft, "per_device_train_batch_size") * draft.processes)))


def length(draft: Draft, rows: int | None = None) -> None:
    """Steps: given, or epochs times the updates of one, the last of which may be of fewer rows there.

    Source: Transformers' Trainer, ``num_update_steps_per_epoch``: with a = batch of one pass of all processes and
    b = accumulation, ceil(ceil(rows / a) / b) = ceil(rows / (a b)); with ``dataloader_drop_last`` a pass that is not
    full is left out: ceil(floor(rows / a) / b).
    """
    steps = draft.value("max_steps", "whole", -1)
    if steps > 0:
        draft.put("train.steps", steps, "max_steps")
        return
    epochs = draft.value("num_train_epochs", "number", 3.0)
    whole = draft.fields["train.global_batch_size"]
    packed = draft.fields.get("data.packing") == "pack"
    sequences = draft.count_packed(tables_of(draft.fields)) if packed else rows
    if sequences is None:
        # a run that would read the rows more often is refused with the number of steps that fits
        draft.put("data.epochs", epochs, "num_train_epochs")
    if rows is None:
        draft.find(
            "epochs",
            "warning",
            f"num_train_epochs: {epochs:g} is not a number of steps yet",
            "The rows of the data cannot be counted from here, and a recipe counts steps.",
            f"Set train.steps to rows x {epochs:g} / {whole} (fewer where rows are packed).",
        )
        return
    counted = rows if sequences is None else sequences
    what = "rows" if sequences is None or not packed else "packed sequences"
    names = ["num_train_epochs"]
    if draft.value("dataloader_drop_last", "truth", False):
        one_pass = max(1, whole // _accumulation(draft))
        kept = counted // one_pass * one_pass
        what, counted = f"of {counted:,} {what}, in whole batches of {one_pass}", kept
        names.append("dataloader_drop_last")
    of_epoch = max(1, math.ceil(counted / whole))
    steps = max(1, math.ceil(epochs * of_epoch))
    said = f"= {epochs:g} x {of_epoch:,} ({counted:,} {what} / {whole}, rounded up)"
    draft.put("train.steps", steps, *names, said=said)
    if sequences is None:
        draft.find(
            "packed-epochs",
            "error",
            f"train.steps = {steps} counts rows as they come, but they are packed",
            "Packed, several rows make one sequence, so that fewer steps read them all; how many cannot be counted "
            "without the rows and the model's tokenizer here.",
            f"With both here, `paceline train RECIPE --dry-run` tells the steps of {epochs:g} epochs: set these.",
        )


def schedule(draft: Draft) -> None:
    """The course of the learning rate. Needs `length`."""
    name = draft.value("lr_scheduler_type", "text", "linear")
    if name not in _SCHEDULES:
        draft.find(
            "value",
            "error",
            f"lr_scheduler_type: {name} has no counterpart",
            f"There are {', '.join(_SCHEDULES)}.",
            "Choose one of these.",
        )
        return
    draft.put("optim.schedule", _SCHEDULES[name], "lr_scheduler_type")
    if name != "constant":
        _warm_up(draft)
    elif draft.value("warmup_steps", "number", 0.0) or draft.value("warmup_ratio", "number", 0.0):
        draft.put("optim.warmup_steps", 0, said="lr_scheduler_type: constant has no warm-up there")
        draft.find(
            "warmup",
            "warning",
            "lr_scheduler_type: constant passes over the warm-up that is asked for",
            "Transformers' constant rate begins at its full height, and so does this recipe: optim.warmup_steps = 0.",
            "Set lr_scheduler_type: constant_with_warmup if it should rise.",
        )
    options = _schedule_options(draft)
    lr = draft.fields.get("optim.lr")
    if "min_lr" in options:
        draft.put("optim.min_lr", options["min_lr"], "lr_scheduler_kwargs")
    elif "min_lr_rate" in options and lr is not None:
        draft.put("optim.min_lr", options["min_lr_rate"] * lr, "lr_scheduler_kwargs")
    if "num_decay_steps" in options:
        draft.put("optim.decay_steps", options["num_decay_steps"], "lr_scheduler_kwargs")


def _schedule_options(draft: Draft) -> dict[str, Any]:
    """`lr_scheduler_kwargs`: a table, or JSON text of one, as a command line has it.

    Raises:
        ConfigError: it is neither, or a value is no number.
    """
    name = "lr_scheduler_kwargs"
    found = draft.given.get(name)
    if is_nothing(found):
        return {}
    try:
        options = found if isinstance(found, Mapping) else json.loads(str(found))
    except ValueError as error:
        raise ConfigError(
            f"{name}: {found} is no JSON", evidence=str(error), next_step=f"""Write {name}: '{{"min_lr": 1e-6}}'."""
        ) from error
    if not isinstance(options, Mapping):
        raise ConfigError(f"{name}: {found} is no table", next_step=f"""Write {name}: '{{"min_lr": 1e-6}}'.""")
    kinds: dict[str, Kind] = {"min_lr": "number", "min_lr_rate": "number", "num_decay_steps": "whole"}
    return {key: converted(f"{name}: {key}", options[key], kind) for key, kind in kinds.items() if key in options}


def duration(draft: Draft) -> None:
    """That a run has a length, where it is given in epochs, and a warm-up no more than it.

    Raises:
        ConfigError: it has none.
    """
    if draft.value("max_steps", "whole", -1) <= 0 and (epochs := draft.value("num_train_epochs", "number", 3.0)) <= 0:
        raise ConfigError(
            f"num_train_epochs: {epochs:g} is not above 0", next_step="Give it a number above 0, or give max_steps."
        )
    ratio = draft.value("warmup_ratio", "number", 0.0)
    if not 0 <= ratio <= 1:
        raise ConfigError(
            f"warmup_ratio: {ratio:g} is no share of the steps",
            next_step="Give a number from 0 to 1, or a number of steps as warmup_steps.",
        )


def _warm_up(draft: Draft) -> None:
    steps = draft.value("warmup_steps", "number", 0.0)
    ratio = draft.value("warmup_ratio", "number", 0.0)
    if 0 < steps < 1:  # Transformers 5: a number below 1 is a share
        steps, ratio = 0.0, steps
    if steps and ratio:
        draft.find(
            "both",
            "error",
            f"warmup_steps: {steps:g} and warmup_ratio: {ratio:g} are both given",
            "Transformers takes warmup_steps and passes over the ratio.",
            "Leave one out.",
        )
    if steps:
        draft.put("optim.warmup_steps", int(steps), "warmup_steps")
    elif ratio:
        total = draft.fields.get("train.steps")
        if total is None:
            draft.find(
                "warmup",
                "warning",
                f"warmup_ratio: {ratio:g} is not a number of steps yet",
                "The number of steps is not known.",
                f"Set optim.warmup_steps to {ratio:g} x train.steps.",
            )
        else:
            name = "warmup_ratio" if draft.has("warmup_ratio") else "warmup_steps"
            draft.put("optim.warmup_steps", math.ceil(ratio * total), name, said=f"of {total} steps")


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
