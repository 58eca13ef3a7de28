"""The keys of ms-swift and Megatron-SWIFT: what each is called here, means by default, or has no counterpart for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.config import foreign_trainer as trainer
from paceline.config.foreign import Simple, Without
from paceline.config.foreign_tuning import WITHOUT as TUNING_WITHOUT

ALSO_CALLED = {
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

SIMPLE: Mapping[str, Simple] = {
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
PASSIVE = trainer.PASSIVE | frozenset(_PASSIVE_NAMES.split())

WITHOUT: Mapping[str, Without] = {
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

DEFAULTS: Mapping[str, Any] = {
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
MEGATRON_DEFAULTS: Mapping[str, Any] = {
    "train_type": "full",
    "recompute_granularity": "selective",
    "micro_batch_size": 1,
    "global_batch_size": 16,
}
MEGATRON_ALONE = ("micro_batch_size", "global_batch_size")
