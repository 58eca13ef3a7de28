"""LLaMA-Factory's arguments as a recipe, those of its Megatron path (MCoreAdapter) too.

Written for LLaMA-Factory 0.9 (its `hparams/` and `examples/`).
"""

from __future__ import annotations

from collections.abc import Mapping

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
from paceline.config.foreign_values import converted
from paceline.errors import ConfigError

_STAGES = {"pt": "pretrain", "sft": "sft", "dpo": "dpo", "kto": "kto", "rm": "reward"}
_ADAPTERS = AdapterWords(how="finetuning_type", alpha_per_rank=2.0)

_SIMPLE: Mapping[str, Simple] = {
    **trainer.SIMPLE,
    **trainer.MEGATRON_LAYOUT,
    "model_name_or_path": Simple(ours="model.init_from"),
    "cutoff_len": Simple(ours="train.seq_len", kind="whole"),
    "moe_aux_loss_coef": Simple(ours="model.moe.aux_loss_coef", kind="number"),
    "flash_attn": Simple(
        ours="train.attention_kernel",
        values={"auto": "auto", "fa2": "auto", "fa3": "auto", "sdpa": "sdpa", "disabled": "reference"},
    ),
    "dpo_label_smoothing": Simple(ours="task.label_smoothing", kind="number"),
    "kto_chosen_weight": Simple(ours="task.desirable_weight", kind="number"),
    "kto_rejected_weight": Simple(ours="task.undesirable_weight", kind="number"),
    "neftune_noise_alpha": Simple(ours="task.neftune_alpha", kind="number"),
    "ref_model": Simple(ours="task.reference"),
}

_PASSIVE_NAMES = """
media_dir split_special_tokens use_unsloth use_unsloth_gc use_reentrant_gc infer_backend infer_dtype
offload_folder use_kv_cache hf_hub_token ms_hub_token om_hub_token print_param_status use_v1_kernels
ignore_pad_token_for_loss eval_num_beams tool_format data_shared_file_system compute_accuracy predict_with_generate
include_effective_tokens_per_second use_swanlab swanlab_project swanlab_run_name swanlab_mode ray_run_name
ray_storage_path ray_num_workers resources_per_worker placement_strategy ray_init_kwargs export_dir export_size
export_device export_legacy_format export_hub_model_id image_max_pixels image_min_pixels video_max_pixels
video_min_pixels video_fps video_maxlen freeze_vision_tower freeze_multi_modal_projector quantization_device_map
use_mca upcast_layernorm upcast_lmhead_output create_new_adapter max_new_tokens temperature top_p top_k
sequence_parallel use_distributed_optimizer overlap_grad_reduce overlap_param_gather bias_activation_fusion
apply_rope_fusion moe_grouped_gemm moe_token_dispatcher_type mcore_moe_grouped_gemm double_quantization
mix_strategy_seed enable_thinking reserved_label_len
"""
_PASSIVE = trainer.PASSIVE | frozenset(_PASSIVE_NAMES.split())

_WITHOUT: Mapping[str, Without] = {
    **trainer.WITHOUT,
    **TUNING_WITHOUT,
    "adapter_folder": Without(reason="Give the adapter's own folder as adapter_name_or_path."),
    "resize_vocab": Without(reason="Tokens are not added to a vocabulary.", severity="error"),
    "add_tokens": Without(reason="Tokens are not added to a vocabulary.", severity="error"),
    "add_special_tokens": Without(reason="Tokens are not added to a vocabulary.", severity="error"),
    "new_special_tokens": Without(reason="Tokens are not added to a vocabulary.", severity="error"),
    "rope_scaling": Without(reason="RoPE is scaled as the model's config.json says.", severity="error"),
    "shift_attn": Without(reason="Attention is exact (S2-Attn is not).", severity="error"),
    "mixture_of_depths": Without(reason="All tokens pass all layers.", severity="error"),
    "train_from_scratch": Without(reason="Leave model.init_from out and give the shape in [model].", severity="error"),
    "streaming": Without(reason="Data are read from files as they are needed; rows are counted before."),
    "buffer_size": Without(reason="The order is of all rows, not of a buffer."),
    "max_samples": Without(reason="All rows are read; cut the file, or set train.steps."),
    "eval_on_each_dataset": Without(reason="data.valid gives one loss."),
    "tokenized_path": Without(reason="Rows are tokenised from the data files."),
    "default_system": Without(reason="Each row says its own system prompt, or the template does."),
    "disable_shuffling": Without(reason="Rows are shuffled by run.seed.", severity="error"),
    "early_stopping_steps": Without(reason="A run ends at train.steps."),
    "freeze_trainable_layers": Without(reason="All weights are trained, or adapters.", severity="error"),
    "freeze_trainable_modules": Without(reason="All weights are trained, or adapters.", severity="error"),
    "ref_model_adapters": Without(reason="Merge them into the reference first.", severity="error"),
    "ref_model_quantization_bit": Without(reason="The reference is read in the precision of training."),
    "simpo_gamma": Without(reason="There is no SimPO.", severity="error", only_with=("pref_loss", "simpo")),
    "pref_bco_weight": Without(reason="There is no BCO.", severity="error", off=(0, 0.0)),
    "reward_model": Without(reason="There is no PPO.", severity="error"),
    "virtual_pipeline_model_parallel_size": Without(
        reason="parallel.stages_per_rank with parallel.pipeline_schedule = 'interleaved_1f1b' is its counterpart.",
        off=(1,),
    ),
}


def _task(draft: Draft) -> None:
    stage = draft.value("stage", "text", "sft")
    if stage not in _STAGES:
        draft.find(
            "value",
            "error",
            f"stage: {stage} has no counterpart",
            f"There are {', '.join(_STAGES)}.",
            "Choose one of these.",
        )
        return
    draft.put("task.kind", _STAGES[stage], "stage")
    if stage == "rm":
        draft.put("model.head", "score", "stage")
    if stage == "dpo":
        preference_loss(draft, "pref_loss")
    elif draft.has("pref_loss"):
        draft.find(
            "contradiction",
            "warning",
            f"stage: {stage} with pref_loss: {draft.given['pref_loss']}",
            "Only the stage dpo has a choice of losses.",
            "Leave pref_loss out, or set stage: dpo.",
        )
    if draft.fields["task.kind"] in ("dpo", "orpo", "kto"):
        draft.put("task.beta", draft.value("pref_beta", "number", 0.1), "pref_beta")


def _recompute(draft: Draft) -> None:
    granularity = draft.given.get("recompute_granularity")
    if granularity in ("full", "selective"):
        draft.put("parallel.recompute", granularity, "recompute_granularity")
    elif not draft.value("disable_gradient_checkpointing", "truth", False):
        asked = draft.value("gradient_checkpointing", "truth", True)
        if asked:
            said = "" if draft.has("gradient_checkpointing") else "on unless disable_gradient_checkpointing"
            draft.put("parallel.recompute", "full", "gradient_checkpointing", said=said)


def _low_precision(draft: Draft) -> None:
    if draft.value("fp8", "truth", False):
        draft.put("train.precision", "fp8", "fp8")


def _muon(draft: Draft) -> None:
    if draft.value("use_muon", "truth", False):
        draft.put("optim.name", "muon", "use_muon")


def _data(draft: Draft) -> None:
    folder = draft.value("dataset_dir", "text", "data")
    for key, ours in (("dataset", "data.train"), ("eval_dataset", "data.valid")):
        names = draft.value(key, "names", ())
        if names:
            sources(draft, ours, [f"{folder}/dataset_info.json#{name}" for name in names], key, "dataset_dir")
    if draft.has("interleave_probs") or draft.value("mix_strategy", "text", "concat") != "concat":
        _weights(draft)
    held_out(draft, "val_size")
    if draft.has("val_size") and draft.has("eval_dataset"):
        draft.find("both", "error", "val_size and eval_dataset are both given", "One of them.", "Leave one out.")


def _weights(draft: Draft) -> None:
    """Sources that are drawn from by given shares.

    Raises:
        ConfigError: a share is no number above 0.
    """
    shares, found = draft.value("interleave_probs", "names", ()), draft.fields.get("data.train")
    if not isinstance(found, list) or len(found) != len(shares):
        draft.find(
            "contradiction",
            "error",
            "mix_strategy and interleave_probs do not fit the datasets",
            f"{len(shares)} shares for {len(found) if isinstance(found, list) else 1} of them.",
            "Give one share for each.",
        )
        return
    paths = [one if isinstance(one, str) else one["path"] for one in found]
    weights = [converted("interleave_probs", share, "number") for share in shares]
    if min(weights) <= 0:
        raise ConfigError(
            f"interleave_probs: {min(weights):g} is not above 0",
            next_step="Give every dataset a share above 0, or leave it out of dataset.",
        )
    weighted = [{"path": path, "weight": weight} for path, weight in zip(paths, weights, strict=True)]
    draft.put("data.train", weighted, "dataset", "interleave_probs")


def _rows(draft: Draft) -> None:
    """What of a row is learned, and how rows fill sequences."""
    prompt, history = draft.value("train_on_prompt", "truth", False), draft.value("mask_history", "truth", False)
    if prompt and history:
        draft.find(
            "contradiction",
            "error",
            "train_on_prompt and mask_history are both true",
            "Everything is learned, or the last answer alone.",
            "Leave one out.",
        )
    elif prompt or history:
        draft.put("data.mask", "all" if prompt else "last", "train_on_prompt" if prompt else "mask_history")
    neat, packed = draft.value("neat_packing", "truth", False), draft.value("packing", "truth")
    if packed is None:
        packed = neat or draft.fields.get("task.kind") == "pretrain"
    if draft.given.get("packing") is not None and not packed and neat:
        draft.find(
            "contradiction", "error", "neat_packing: true with packing: false", "It is a packing.", "Leave one out."
        )
    draft.put(
        "data.packing",
        "pack" if packed else unpacked(draft),
        *("packing", "neat_packing"),
        said="" if packed or draft.has("packing") else "rows are padded to the longest of a batch there",
    )
    if packed and not neat and draft.fields.get("task.kind") != "pretrain":
        draft.find(
            "packing",
            "note",
            "packing: true without neat_packing lets examples see those before them there, and never here",
            "Attention stops and positions begin again at each example.",
            "Nothing to do; losses differ a little.",
        )
    draft.put("data.too_long", "truncate", "cutoff_len", said="longer rows are cut there")
    template(draft, "template")


LLAMAFACTORY = System(
    name="llamafactory",
    title="LLaMA-Factory 0.9",
    simple=_SIMPLE,
    rules=(
        (frozenset(("stage", "pref_loss", "pref_beta")), _task),
        (_ADAPTERS.names, lambda draft: adapters(draft, _ADAPTERS)),
        (
            frozenset(("dataset", "dataset_dir", "eval_dataset", "mix_strategy", "interleave_probs", "val_size")),
            _data,
        ),
        (
            frozenset(("train_on_prompt", "mask_history", "packing", "neat_packing", "group_by_length", "template")),
            _rows,
        ),
        (frozenset(("deepspeed", "fsdp", "fsdp_config")), trainer.sharding),
        (
            frozenset(("disable_gradient_checkpointing", "gradient_checkpointing", "recompute_granularity")),
            _recompute,
        ),
        *trainer.RULES,
        (frozenset(("fp8", "fp8_backend", "fp8_enable_fsdp_float8_all_gather")), _low_precision),
        (frozenset(("use_muon",)), _muon),
    ),
    defaults={
        "cutoff_len": 2048,
        "learning_rate": 5e-5,
        "weight_decay": 0.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "lr_scheduler_type": "linear",
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "num_train_epochs": 3.0,
        "seed": 42,
        "lora_rank": 8,
        "lora_dropout": 0.0,
        "lora_target": "all",
        "finetuning_type": "lora",
    },
    passive=_PASSIVE,
    without=_WITHOUT,
)
