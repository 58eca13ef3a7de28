"""ms-swift's arguments as a recipe: `swift sft`, `swift pt`, `swift rlhf`, and Megatron-SWIFT's `megatron sft`.

Written for ms-swift 3.x and 4.x, by its command-line reference. Megatron-SWIFT takes names of Megatron-LM, which its
defaults follow; which of the two is meant says the command, or the names themselves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.config import foreign_trainer as trainer
from paceline.config.foreign import Draft, Simple, System, Without
from paceline.config.foreign_tuning import WITHOUT as TUNING_WITHOUT
from paceline.config.foreign_tuning import (
    AdapterWords,
    adapters,
    held_out,
    preference_loss,
    sources,
    template,
    unpacked,
)

_TASKS = {"dpo": "dpo", "kto": "kto", "orpo": "orpo", "rm": "reward"}
_ADAPTERS = AdapterWords(
    how="train_type",
    targets="target_modules",
    begin_with="adapters",
    bits="quant_bits",
    bits_method="quant_method",
    bits_type="bnb_4bit_quant_type",
)
_ALSO_CALLED = {
    "tuner_type": "train_type",
    "sft_type": "train_type",
    "lora_target_modules": "target_modules",
    "model_id_or_path": "model",
    "batch_size": "per_device_train_batch_size",
    "dtype": "torch_dtype",
    "max_epochs": "num_train_epochs",
    "train_iters": "max_steps",
    "lr": "learning_rate",
    "clip_grad": "max_grad_norm",
    "adam_eps": "adam_epsilon",
    "lr_decay_style": "lr_scheduler_type",
    "lr_warmup_iters": "warmup_steps",
    "lr_warmup_fraction": "warmup_ratio",
    "save": "output_dir",
    "save_interval": "save_steps",
    "eval_interval": "eval_steps",
    "log_interval": "logging_steps",
    "mcore_adapters": "adapters",
}
"""Names of older versions, and Megatron-SWIFT's for the same."""

_SIMPLE: Mapping[str, Simple] = {
    **trainer.SIMPLE,
    **trainer.MEGATRON_LAYOUT,
    "model": Simple(ours="model.init_from"),
    "max_length": Simple(ours="train.seq_len", kind="whole"),
    "attn_impl": Simple(
        ours="train.attention_kernel",
        values={
            **dict.fromkeys(("flash_attn", "flash_attention_2", "flash_attention_3", "flash"), "auto"),
            "sdpa": "sdpa",
            "eager": "reference",
        },
    ),
    "attention_backend": Simple(
        ours="train.attention_kernel",
        values={"flash": "auto", "fused": "auto", "auto": "auto", "unfused": "reference", "local": "reference"},
    ),
    "label_smoothing": Simple(ours="task.label_smoothing", kind="number"),
    "desirable_weight": Simple(ours="task.desirable_weight", kind="number"),
    "undesirable_weight": Simple(ours="task.undesirable_weight", kind="number"),
    "center_rewards_coefficient": Simple(ours="task.center_rewards", kind="number"),
    "neftune_noise_alpha": Simple(ours="task.neftune_alpha", kind="number"),
    "ref_model": Simple(ours="task.reference"),
    "min_lr": Simple(ours="optim.min_lr", kind="number"),
    "sequence_parallel_size": Simple(ours="parallel.cp", kind="whole"),
    "moe_aux_loss_coeff": Simple(ours="model.moe.aux_loss_coef", kind="number"),
    "moe_z_loss_coeff": Simple(ours="model.moe.z_loss_coef", kind="number"),
    "optimizer": Simple(ours="optim.name", values={"adam": "adamw", "muon": "muon"}),
    "wandb_project": Simple(ours="observe.wandb_project"),
}

_PASSIVE_NAMES = """
model_type task_type device_map max_memory local_repo_path tools_prompt agent_template norm_bbox padding_side
template_backend load_from_cache_file dataset_num_proc dataset_shuffle val_dataset_shuffle download_mode columns
model_name model_author custom_dataset_info use_hf hub_token custom_register_path external_plugins
ignore_args_error use_swift_lora lazy_tokenize add_version create_checkpoint_symlink check_model logprobs stream
freeze_vit freeze_aligner freeze_llm vit_gradient_checkpointing max_pixels lora_dtype bnb_4bit_compute_dtype
bnb_4bit_use_double_quant bnb_4bit_quant_storage packing_cache padding_free metric resume_only_model save_vllm
gradient_checkpointing_kwargs swanlab_project swanlab_exp_name swanlab_mode swanlab_token acc_strategy
zero_hpz_partition_size merge_lora max_new_tokens temperature top_k top_p repetition_penalty num_beams
model_kwargs load_args load_data_args max_model_len eval_limit eval_dataset eval_dataset_args
eval_generation_config use_dist_ckpt finetune no_save_optim no_save_rng no_load_optim no_load_rng save_safetensors
load_safetensors distributed_backend distributed_timeout_minutes num_workers dist_ckpt_save_pre_mcore_014
cross_entropy_loss_fusion cross_entropy_fusion_impl gradient_accumulation_fusion use_flash_attn async_save
ckpt_format use_persistent_ckpt_worker log_throughput tensorboard_dir tensorboard_log_interval wandb_exp_name
wandb_save_dir moe_permute_fusion moe_grouped_gemm moe_shared_expert_overlap moe_token_dispatcher_type
moe_router_dtype use_distributed_optimizer overlap_grad_reduce overlap_param_gather sequence_parallel
use_precision_aware_optimizer manual_gc manual_gc_interval train_dataloader_shuffle dataloader_type
use_cpu_initialization no_gradient_accumulation_fusion no_bias_swiglu_fusion no_bias_dropout_fusion no_rope_fusion
no_masked_softmax_fusion no_initialization enable_channel_loss seq_length eval_iters truncation_side
log_validation_ppl_to_tensorboard
"""
_PASSIVE = trainer.PASSIVE | frozenset(_PASSIVE_NAMES.split())

_WITHOUT: Mapping[str, Without] = {
    **trainer.WITHOUT,
    **TUNING_WITHOUT,
    "rope_scaling": Without(reason="RoPE is scaled as the model's config.json says.", severity="error"),
    "streaming": Without(reason="Data are read from files as they are needed; rows are counted before."),
    "shuffle_buffer_size": Without(reason="The order is of all rows, not of a buffer."),
    "interleave_prob": Without(reason="Weights of data sources are their counterpart: data.train = [{path, weight}]."),
    "stopping_strategy": Without(reason="A run ends at train.steps."),
    "system": Without(reason="Each row says its own system prompt, or the template does."),
    "new_special_tokens": Without(reason="Tokens are not added to a vocabulary.", severity="error"),
    "freeze_parameters": Without(reason="All weights are trained, or adapters.", severity="error"),
    "freeze_parameters_ratio": Without(reason="All weights are trained, or adapters.", severity="error", off=(0, 0.0)),
    "freeze_parameters_regex": Without(reason="All weights are trained, or adapters.", severity="error"),
    "trainable_parameters": Without(reason="All weights are trained, or adapters.", severity="error"),
    "target_regex": Without(reason="Linears are named by their kind: target_modules.", severity="error"),
    "target_parameters": Without(reason="Routed experts are frozen beside adapters.", severity="error"),
    "lora_bias": Without(reason="Biases are frozen beside adapters.", severity="error"),
    "init_weights": Without(reason="Adapters begin at zero.", severity="error", off=(True, "true", "gaussian")),
    "ref_adapters": Without(reason="Merge them into the reference first.", severity="error"),
    "ref_load": Without(reason="task.reference names a Hugging Face folder, a run or a checkpoint.", severity="error"),
    "simpo_gamma": Without(reason="There is no SimPO.", severity="error", only_with=("rlhf_type", "simpo")),
    "cpo_alpha": Without(reason="There is no CPO.", severity="error", only_with=("rlhf_type", "cpo")),
    "reward_model": Without(reason="There is no PPO.", severity="error"),
    "reward_funcs": Without(reason="There is no GRPO.", severity="error"),
    "num_labels": Without(reason="There are no classifiers.", severity="error"),
    "hqq_axis": Without(reason="Weights are kept in NF4, fp8 or bf16.", severity="error"),
    "load": Without(reason="Convert it first: paceline convert MEGATRON_FOLDER MODEL --to hf.", severity="error"),
    "num_layers_per_virtual_pipeline_stage": Without(
        reason="parallel.stages_per_rank with parallel.pipeline_schedule = 'interleaved_1f1b' is its counterpart."
    ),
    "decoder_first_pipeline_num_layers": Without(reason="parallel.pipeline_layout names the layers of each stage."),
    "decoder_last_pipeline_num_layers": Without(reason="parallel.pipeline_layout names the layers of each stage."),
    "optimizer_cpu_offload": Without(reason="parallel.offload = 'optimizer' is its counterpart."),
    "recompute_method": Without(reason="parallel.recompute may be a list with one mode for each layer."),
    "recompute_num_layers": Without(reason="parallel.recompute may be a list with one mode for each layer.", off=(1,)),
    "recompute_modules": Without(reason="`selective` recomputes attention."),
    "packing_length": Without(reason="Rows are packed to train.seq_len."),
    "loss_weights": Without(reason="A pair has one loss.", severity="error"),
}


def _is_megatron(draft: Draft) -> bool:
    """By the command, or by names that Megatron-SWIFT alone has."""
    command = str(draft.given.get("command", ""))
    return command.startswith("megatron") or (not command and any(map(draft.has, _MEGATRON_ALONE)))


def _megatron(draft: Draft) -> None:
    """Megatron-SWIFT's defaults, where they are others. Megatron's constant rate warms up, Transformers' does not."""
    if not _is_megatron(draft):
        return
    draft.system = replace(draft.system, defaults={**draft.system.defaults, **_MEGATRON_DEFAULTS})
    if draft.given.get("lr_scheduler_type") == "constant":
        draft.given = {**draft.given, "lr_scheduler_type": "constant_with_warmup"}


def _task(draft: Draft) -> None:
    kind = draft.value("rlhf_type", "text")
    command = str(draft.given.get("command", ""))
    if kind is None:
        draft.put("task.kind", "pretrain" if command.endswith("pt") else "sft", said=command or "no rlhf_type")
        if command.endswith("rlhf"):
            draft.find(
                "value", "error", "rlhf without rlhf_type", "It says which loss.", "Give rlhf_type: dpo, kto, orpo, rm."
            )
    elif kind not in _TASKS:
        draft.find(
            "value",
            "error",
            f"rlhf_type: {kind} has no counterpart",
            f"There are {', '.join(_TASKS)}.",
            "Choose one of these.",
        )
        return
    else:
        draft.put("task.kind", _TASKS[kind], "rlhf_type")
    if kind == "rm":
        draft.put("model.head", "score", "rlhf_type")
    if kind == "dpo":
        preference_loss(draft, "loss_type")
    if draft.fields["task.kind"] in ("dpo", "orpo", "kto"):
        draft.put("task.beta", draft.value("beta", "number", 0.1), "beta")


_PRECISIONS = {
    **dict.fromkeys(("bfloat16", "bf16", "auto"), "bf16"),
    **dict.fromkeys(("float16", "fp16"), "fp16"),
    **dict.fromkeys(("float32", "fp32"), "fp32"),
}


def _precision(draft: Draft) -> None:
    dtype = draft.value("torch_dtype", "text", "bfloat16")
    fp8 = draft.value("fp8_format", "text")
    if dtype not in _PRECISIONS:
        draft.find(
            "value",
            "error",
            f"torch_dtype: {dtype} has no counterpart",
            f"There are {', '.join(_PRECISIONS)}.",
            "Choose one of these.",
        )
        return
    name = _PRECISIONS[dtype]
    # as the Trainer's own words, which may be given too
    known = draft.given.get("bf16") is not None or draft.given.get("fp16") is not None
    if not known:
        draft.given = {**draft.given, name: True} if name != "fp32" else draft.given
    trainer.precision(draft)
    if not known:
        said = "" if draft.has("torch_dtype") else "torch_dtype (the default there)"
        draft.put("train.precision", draft.fields["train.precision"], "torch_dtype", said=said)
    if fp8:
        draft.put("train.precision", "fp8", "fp8_format")
    recipe = draft.value("fp8_recipe", "text", "tensorwise")
    if fp8 and recipe in ("tensorwise", "rowwise", "delayed"):
        draft.put("train.fp8_scaling", recipe, "fp8_recipe")
    elif fp8:
        draft.find(
            "value",
            "warning",
            f"fp8_recipe: {recipe} has no counterpart",
            "Scales are of a tensor or of a row.",
            "Choose tensorwise, rowwise or delayed.",
        )


def _recompute(draft: Draft) -> None:
    granularity = draft.value("recompute_granularity", "text")
    if granularity in ("full", "selective"):
        draft.put("parallel.recompute", granularity, "recompute_granularity")
    elif not _is_megatron(draft) and draft.value("gradient_checkpointing", "truth", True):
        said = "" if draft.has("gradient_checkpointing") else "on unless gradient_checkpointing: false"
        draft.put("parallel.recompute", "full", "gradient_checkpointing", said=said)


def _data(draft: Draft) -> None:
    for key, ours in (("dataset", "data.train"), ("val_dataset", "data.valid")):
        if not draft.has(key):
            continue
        given = draft.given[key]
        items = [str(one) for one in given] if isinstance(given, list | tuple) else str(given).split()
        paths = []
        for item in items:
            path, _, count = item.rpartition("#") if re.search(r"#\d+$", item) else (item, "", "")
            paths.append(path)
            if count:
                draft.find(
                    "sampled",
                    "warning",
                    f"{key}: {item} takes {count} rows",
                    "All rows are read here.",
                    "Cut the file, or give sources weights: data.train = [{path, weight}].",
                )
        sources(draft, ours, paths, key)
    held_out(draft, "split_dataset_ratio")


_MASKS = {"default": "assistant", "last_round": "last", "all": "all"}
_LONG = {"delete": "drop", "left": "truncate", "right": "truncate", "raise": "refuse"}


def _rows(draft: Draft) -> None:
    """What of a row is learned, and how rows fill sequences."""
    mask = draft.value("loss_scale", "text", "default")
    if mask in _MASKS:
        draft.put("data.mask", _MASKS[mask], "loss_scale")
    else:
        draft.find(
            "value",
            "error",
            f"loss_scale: {mask} has no counterpart",
            f"Tokens count alike or not at all: {', '.join(_MASKS)}.",
            "Choose one of these.",
        )
    packed = draft.value("packing", "truth", False)
    said = "" if packed or draft.has("packing") else "rows are padded to the longest of a batch there"
    draft.put("data.packing", "pack" if packed else unpacked(draft), "packing", said=said)
    long = draft.value("truncation_strategy", "text", "delete")
    if long in _LONG:
        draft.put("data.too_long", _LONG[long], "truncation_strategy")
    else:
        draft.find(
            "value",
            "error",
            f"truncation_strategy: {long} has no counterpart",
            f"There are {', '.join(_LONG)}.",
            "Choose one of these.",
        )
    if draft.has("strict"):
        draft.put("data.bad_rows", "refuse" if draft.value("strict", "truth") else "skip", "strict")
    template(draft, "template")


def _longest(draft: Draft) -> None:
    """Rows may be as long as the model's sequences, where nothing is said."""
    if draft.has("max_length"):
        return
    tokens = draft.longest(str(draft.fields.get("model.init_from", "")))
    if tokens is not None:
        draft.put("train.seq_len", tokens, said="max_length: the model's (the default there)")
        return
    draft.find(
        "length",
        "warning",
        "max_length is not given: there it is the model's own",
        "The model is not here, so its longest sequence is not known.",
        "Set train.seq_len.",
    )


def _batch(draft: Draft) -> None:
    """Megatron-SWIFT gives both sizes; `swift` those of a device and of accumulation."""
    if not _is_megatron(draft):
        trainer.batch(draft)
        return
    draft.put("train.micro_batch_size", trainer.positive(draft, "micro_batch_size"), "micro_batch_size")
    draft.put("train.global_batch_size", trainer.positive(draft, "global_batch_size", 16), "global_batch_size")


def _learning_rate(draft: Draft) -> None:
    """The default is another for adapters."""
    if not draft.has("learning_rate"):
        rate = 1e-4 if draft.fields.get("lora.rank") else 1e-5
        draft.put("optim.lr", rate, said="its default " + ("with adapters" if rate == 1e-4 else "for full training"))


def _keys(*names: str) -> frozenset[str]:
    return frozenset(names)


_AFTER_DATA = [(names, rule) for names, rule in trainer.RULES if rule not in (trainer.batch, trainer.precision)]

_DEFAULTS: Mapping[str, Any] = {
    "weight_decay": 0.1,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "lr_scheduler_type": "cosine",
    "per_device_train_batch_size": 1,
    "num_train_epochs": 3.0,
    "seed": 42,
    "loss_scale": "default",
    "truncation_strategy": "delete",
    "train_type": "lora",
    "lora_rank": 8,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "target_modules": "all-linear",
}
_MEGATRON_DEFAULTS: Mapping[str, Any] = {
    "train_type": "full",
    "recompute_granularity": "selective",
    "micro_batch_size": 1,
    "global_batch_size": 16,
}
_MEGATRON_ALONE = ("micro_batch_size", "global_batch_size")

MS_SWIFT = System(
    name="ms-swift",
    title="ms-swift 3 and 4",
    simple=_SIMPLE,
    rules=(
        (_keys("command"), _megatron),
        (_keys("rlhf_type", "loss_type", "beta"), _task),
        (_ADAPTERS.names, lambda draft: adapters(draft, _ADAPTERS)),
        (_keys("max_length"), _longest),
        (_keys("dataset", "val_dataset", "split_dataset_ratio"), _data),
        (
            _keys("loss_scale", "packing", "truncation_strategy", "strict", "template", "group_by_length"),
            _rows,
        ),
        (_keys("deepspeed", "fsdp", "fsdp_config"), trainer.sharding),
        (_keys("gradient_checkpointing", "recompute_granularity"), _recompute),
        (
            _keys(
                *("per_device_train_batch_size", "gradient_accumulation_steps"),
                *("micro_batch_size", "global_batch_size"),
            ),
            _batch,
        ),
        (_keys("learning_rate"), _learning_rate),
        *_AFTER_DATA,
        (_keys("torch_dtype", "bf16", "fp16", "pure_bf16", "fp8_format", "fp8_recipe"), _precision),
    ),
    defaults=_DEFAULTS,
    passive=_PASSIVE,
    without=_WITHOUT,
    also_called=_ALSO_CALLED,
)
