"""LLaMA-Factory's and ms-swift's words become fields of ours, and no key is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.config.foreign import System, Translation, translate
from paceline.config.foreign_llamafactory import LLAMAFACTORY
from paceline.config.foreign_read import read_arguments_file, read_words
from paceline.config.foreign_swift import MS_SWIFT
from paceline.config.load import field_names, validate
from paceline.config.run import RunConfig
from paceline.errors import ConfigError

SYSTEMS = (LLAMAFACTORY, MS_SWIFT)

LORA_SFT = {
    "model_name_or_path": "meta-llama/Meta-Llama-3-8B-Instruct",
    "trust_remote_code": True,
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_rank": 8,
    "lora_target": "all",
    "dataset": "identity,alpaca_en_demo",
    "template": "llama3",
    "cutoff_len": 2048,
    "overwrite_cache": True,
    "preprocessing_num_workers": 16,
    "dataloader_num_workers": 4,
    "output_dir": "saves/llama3-8b/lora/sft",
    "logging_steps": 10,
    "save_steps": 500,
    "plot_loss": True,
    "overwrite_output_dir": True,
    "save_only_model": False,
    "report_to": "none",
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "learning_rate": "1.0e-4",
    "num_train_epochs": 3.0,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "bf16": True,
    "ddp_timeout": 180000000,
    "resume_from_checkpoint": None,
}
"""The keys of LLaMA-Factory's usual LoRA recipe."""


def ids(translation: Translation, *severities: str) -> list[str]:
    return [one.id.removeprefix("config.from-") for one in translation.findings if one.severity in severities]


def subjects(translation: Translation, severity: str = "error") -> list[str]:
    return [one.subject for one in translation.findings if one.severity == severity]


def checked(translation: Translation) -> RunConfig:
    tables = translation.tables()
    tables.get("model", {}).pop("init_from", None)
    return validate(tables)


def llamafactory(**given: Any) -> Translation:
    return translate(LLAMAFACTORY, given, processes=1)


def swift(*words: str, processes: int = 1) -> Translation:
    return translate(MS_SWIFT, read_words(words), processes=processes)


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
def test_a_key_is_in_one_table_and_its_target_is_a_field(system: System) -> None:
    known = set(field_names(RunConfig))
    assert [simple.ours for simple in system.simple.values() if simple.ours not in known] == []
    read = {name for names, _ in system.rules for name in names}
    tables = {"simple": system.simple.keys(), "without": system.without.keys(), "passive": system.passive}
    twice = [(a, b, tables[a] & tables[b]) for a in tables for b in tables if a < b and tables[a] & tables[b]]
    assert twice == []
    assert system.also_called.keys() & (read | system.simple.keys() | system.passive | system.without.keys()) == set()
    assert set(system.also_called.values()) <= system.known


def test_the_usual_lora_run_of_llamafactory() -> None:
    rows = {"data/dataset_info.json#identity": 91, "data/dataset_info.json#alpaca_en_demo": 1000}
    found = translate(LLAMAFACTORY, LORA_SFT, processes=8, count_rows=rows.get)
    assert ids(found, "error", "warning") == []
    config = checked(found)
    assert found.fields["model.init_from"] == "meta-llama/Meta-Llama-3-8B-Instruct"
    assert (config.task.kind, config.run.dir) == ("sft", "saves/llama3-8b/lora/sft")
    assert (config.lora.rank, config.lora.alpha, config.lora.targets) == (8, 16.0, ("all-linear",))
    assert (config.train.micro_batch_size, config.train.global_batch_size) == (1, 64)
    assert config.train.steps == 54  # 3 x ceil(1091 / 64)
    assert {source.path: source.weight for source in config.data.train} == rows
    assert (config.data.template, config.data.mask, config.data.packing) == ("llama3", "assistant", "none")
    assert (config.train.seq_len, config.data.too_long) == (2048, "truncate")
    assert (config.optim.lr, config.optim.schedule, config.optim.warmup_steps) == (1e-4, "cosine", 6)
    # what was not given is as it is there, not as it is here
    assert (config.optim.betas, config.optim.weight_decay, config.run.seed) == ((0.9, 0.999), 0.0, 42)
    assert config.parallel.recompute == "full" and config.checkpoint.interval == 500
    assert found.origins["optim.weight_decay"].is_default and not found.origins["optim.lr"].is_default
    assert ids(found, "note") == ["passive"] and "ddp_timeout" in found.findings[-1].subject


def test_every_key_is_told_somewhere() -> None:
    given = {**LORA_SFT, "packng": True, "lora_rnk": 4, "max_samples": 100, "never_heard_of": [1, 2]}
    found = translate(LLAMAFACTORY, given, count_rows=lambda fields: 10)
    told = " ".join([*(origin.said for origin in found.origins.values()), *(one.subject for one in found.findings)])
    silent = [key for key in given if key not in told]
    # those ask for nothing, or stand behind another field
    assert silent == []
    unknown = {one.subject.split(":")[0]: one.next_step for one in found.findings if one.id == "config.from-unknown"}
    assert unknown.keys() == {"packng", "lora_rnk", "never_heard_of"}
    assert unknown["packng"] == "Did you mean packing?" and unknown["lora_rnk"] == "Did you mean lora_rank?"


@pytest.mark.parametrize(
    ("given", "ours", "value"),
    [
        ({"stage": "pt"}, "task.kind", "pretrain"),
        ({"stage": "rm"}, "task.kind", "reward"),
        ({"stage": "rm"}, "model.head", "score"),
        ({"stage": "kto", "pref_beta": 0.2}, "task.beta", 0.2),
        ({"stage": "dpo", "pref_loss": "ipo"}, "task.dpo_loss", "ipo"),
        ({"stage": "dpo", "pref_loss": "orpo"}, "task.kind", "orpo"),
        ({"stage": "dpo", "ref_model": "base"}, "task.reference", "base"),
        ({"stage": "dpo", "dpo_label_smoothing": 0.1}, "task.label_smoothing", 0.1),
        ({"lora_target": "q_proj,v_proj"}, "lora.targets", ("q_proj", "v_proj")),
        ({"lora_target": "q_a_proj,kv_b_proj"}, "lora.targets", ("q_down_proj", "kv_up_proj")),
        ({"lora_rank": 16}, "lora.alpha", 32.0),
        ({"quantization_bit": 4}, "lora.base", "nf4"),
        ({"use_dora": True}, "lora.dora", True),
        ({"adapter_name_or_path": "saves/a"}, "lora.init_adapter", "saves/a"),
        ({"deepspeed": "examples/deepspeed/ds_z3_config.json"}, "parallel.zero", 3),
        ({"deepspeed": "ds_z3_offload_config.json"}, "parallel.offload", "parameters"),
        ({"deepspeed": "ds_z2_offload_config.json"}, "parallel.offload", "optimizer"),
        ({"deepspeed": {"zero_optimization": {"stage": 2}}}, "parallel.zero", 2),
        ({"fsdp": "full_shard auto_wrap"}, "parallel.zero", 3),
        ({"fsdp": True}, "parallel.zero", 3),
        ({"fsdp": ["shard_grad_op", "auto_wrap"]}, "parallel.zero", 2),
        ({"fsdp": "no_shard"}, "parallel.zero", 0),
        ({"bf16": False, "fp16": True}, "train.precision", "bf16"),
        ({"bf16": True, "fp8": True}, "train.precision", "fp8"),
        ({"optim": "paged_adamw_8bit"}, "optim.name", "adamw8bit"),
        ({"use_muon": True}, "optim.name", "muon"),
        ({"flash_attn": "disabled"}, "train.attention_kernel", "reference"),
        ({"recompute_granularity": "selective"}, "parallel.recompute", "selective"),
        ({"tensor_model_parallel_size": 2}, "parallel.tp", 2),
        ({"max_steps": 77}, "train.steps", 77),
        ({"max_steps": 200, "warmup_steps": 0.1}, "optim.warmup_steps", 20),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
            "optim.min_lr",
            5e-6,
        ),
        ({"neftune_noise_alpha": 5}, "task.neftune_alpha", 5.0),
        ({"dataset": "mine", "dataset_dir": "my"}, "data.train", "my/dataset_info.json#mine"),
        ({"train_on_prompt": True}, "data.mask", "all"),
        ({"mask_history": True}, "data.mask", "last"),
        ({"neat_packing": True}, "data.packing", "pack"),
        ({"stage": "pt"}, "data.packing", "pack"),
        ({"template": "qwen2_5"}, "data.template", "qwen"),
        ({"val_size": 0.1}, "data.split", "90,10,0"),
        (
            {"dataset": "a,b", "mix_strategy": "interleave_over", "interleave_probs": "0.3,0.7"},
            "data.train",
            [
                {"path": "data/dataset_info.json#a", "weight": 0.3},
                {"path": "data/dataset_info.json#b", "weight": 0.7},
            ],
        ),
        ({"eval_strategy": "steps", "eval_steps": 50}, "train.eval_interval", 50),
        ({"max_steps": 100, "save_steps": 0.25}, "checkpoint.interval", 25),
        ({"max_steps": 100, "logging_steps": 0.1}, "observe.log_interval", 10),
        ({"logging_steps": 5, "logging_strategy": "steps"}, "observe.log_interval", 5),
        ({"lora_target": "ALL"}, "lora.targets", ("all-linear",)),
    ],
)
def test_words_of_llamafactory(given: dict[str, Any], ours: str, value: Any) -> None:
    found = llamafactory(**{"bf16": True, "max_steps": 10, **given})
    assert found.fields[ours] == pytest.approx(value) if isinstance(value, float) else found.fields[ours] == value
    assert subjects(found) == []
    checked(found)


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        ({"zero_optimization": {"stage": "auto"}}, {}),
        ({"zero_optimization": {"stage": 5}}, {}),
        ({"zero_optimization": [3]}, {}),
        ({"zero_optimization": True}, {"parallel.zero": 1}),
        ({"zero_optimization": False}, {"parallel.zero": 0}),
        (
            {"zero_optimization": {"stage": "2", "offload_optimizer": "cpu"}},
            {"parallel.zero": 2, "parallel.offload": "optimizer"},
        ),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}}, {"parallel.zero": 2}),
    ],
)
def test_what_deepspeeds_files_say(config: dict[str, Any], fields: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "plain.json").write_text(json.dumps(config))
    for asked in (config, "plain.json"):
        found = translate(LLAMAFACTORY, {"deepspeed": asked, "max_steps": 1}, folder=tmp_path)
        sharded = {key: value for key, value in found.fields.items() if key in ("parallel.zero", "parallel.offload")}
        assert sharded == fields and ("deepspeed" in ids(found, "warning")) == (not fields)


def test_a_constant_rate_has_no_warm_up_there() -> None:
    for given in ({"warmup_steps": 100}, {"warmup_ratio": 0.1}):
        found = llamafactory(lr_scheduler_type="constant", max_steps=200, **given)
        assert found.fields["optim.warmup_steps"] == 0 and "warmup" in ids(found, "warning")
    found = llamafactory(lr_scheduler_type="constant_with_warmup", warmup_steps=100, max_steps=200)
    assert found.fields["optim.warmup_steps"] == 100 and ids(found, "warning") == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size: 0 is below 1"),
        ({"gradient_accumulation_steps": -1}, "gradient_accumulation_steps: -1 is below 1"),
        ({"lr_scheduler_kwargs": {"min_lr": "abc"}}, "lr_scheduler_kwargs: min_lr: abc is no number"),
        ({"lr_scheduler_kwargs": "{min_lr"}, "lr_scheduler_kwargs: {min_lr is no JSON"),
        ({"max_steps": "1e400"}, "max_steps: 1e400 is no whole number"),
        ({"learning_rate": "nan"}, "learning_rate: nan is no number"),
        ({"warmup_ratio": 1.5}, "warmup_ratio: 1.5 is no share of the steps"),
        ({"max_steps": -1, "num_train_epochs": 0}, "num_train_epochs: 0 is not above 0"),
        ({"max_steps": 0, "num_train_epochs": -1}, "num_train_epochs: -1 is not above 0"),
        ({"lr_scheduler_kwargs": "[1]"}, "lr_scheduler_kwargs: [1] is no table"),
    ],
)
def test_a_value_that_no_run_can_have_is_refused(given: dict[str, Any], message: str) -> None:
    for system in SYSTEMS:
        with pytest.raises(ConfigError) as caught:
            translate(system, {"max_steps": 10, **given})
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("system", "given", "message"),
    [
        (LLAMAFACTORY, {"val_size": 200}, "val_size: 200 leaves nothing to train on: there are 101 rows"),
        (LLAMAFACTORY, {"val_size": 101}, "val_size: 101 leaves nothing to train on: there are 101 rows"),
        (LLAMAFACTORY, {"val_size": -0.1}, "val_size: -0.1 is negative"),
        (LLAMAFACTORY, {"val_size": 1.5}, "val_size: 1.5 is no share, and no whole number of rows"),
        (MS_SWIFT, {"split_dataset_ratio": -0.1}, "split_dataset_ratio: -0.1 is negative"),
        (MS_SWIFT, {"split_dataset_ratio": 1.5}, "split_dataset_ratio: 1.5 leaves nothing to train on"),
        (
            LLAMAFACTORY,
            {"dataset": "a,b", "mix_strategy": "interleave_over", "interleave_probs": "0.5,x"},
            "interleave_probs: x is no number",
        ),
        (LLAMAFACTORY, {"dataset": "a,b", "interleave_probs": "1,0"}, "interleave_probs: 0 is not above 0"),
    ],
)
def test_shares_that_are_none_are_refused(system: System, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        translate(system, {"max_steps": 10, "dataset": "a", **given}, count_rows=lambda path: 101)
    assert message in str(caught.value) and caught.value.next_step


@pytest.mark.parametrize(("size", "rows", "steps"), [(1, 2, 1), (0.1, 3, 2), (100, 101, 1), (0.9, 10, 1)])
def test_steps_of_tiny_data_with_a_part_held_out(size: float, rows: int, steps: int) -> None:
    given = {"dataset": "a", "val_size": size, "num_train_epochs": 1, "per_device_train_batch_size": 1}
    found = translate(LLAMAFACTORY, given, count_rows=lambda path: rows)
    assert found.fields["train.steps"] == steps


def test_without_checkpointing_nothing_is_recomputed() -> None:
    assert "parallel.recompute" not in llamafactory(disable_gradient_checkpointing=True).fields
    assert "parallel.recompute" not in llamafactory(gradient_checkpointing=False).fields


def test_a_batch_counts_the_processes_that_read_different_data() -> None:
    given = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "tensor_model_parallel_size": 2}
    assert translate(LLAMAFACTORY, given, processes=8).fields["train.global_batch_size"] == 24
    alone = translate(LLAMAFACTORY, {"per_device_train_batch_size": 2}, processes=1)
    assert alone.fields["train.global_batch_size"] == 2 and "one-process" in ids(alone, "note")


@pytest.mark.parametrize(
    ("given", "subject"),
    [
        ({"finetuning_type": "full", "quantization_bit": 4}, "finetuning_type: full with quantization_bit: 4"),
        ({"finetuning_type": "freeze"}, "finetuning_type: freeze has no counterpart"),
        ({"finetuning_type": "oft"}, "finetuning_type: oft has no counterpart"),
        ({"stage": "ppo"}, "stage: ppo has no counterpart"),
        ({"stage": "dpo", "pref_loss": "simpo"}, "pref_loss: simpo has no counterpart"),
        ({"bf16": True, "fp16": True}, "bf16 and fp16 are both true"),
        ({"warmup_steps": 10, "warmup_ratio": 0.1}, "warmup_steps: 10 and warmup_ratio: 0.1 are both given"),
        ({"deepspeed": "z3.json", "fsdp": "full_shard"}, "deepspeed and fsdp are both given"),
        ({"use_galore": True}, "use_galore: true has no counterpart"),
        ({"pissa_init": True}, "pissa_init: true has no counterpart"),
        ({"quantization_bit": 8}, "quantization_bit: 8 by bnb (nf4) has no counterpart"),
        ({"lora_target": "q_proj,embed_tokens"}, "lora_target: embed_tokens is no linear of a block"),
        ({"adapter_name_or_path": "a,b"}, "adapter_name_or_path names 2 adapters"),
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type: polynomial has no counterpart"),
        ({"optim": "lion_8bit"}, "optim: lion_8bit has no counterpart"),
        ({"train_from_scratch": True}, "train_from_scratch: true has no counterpart"),
        ({"pref_ftx": 0.1}, "pref_ftx: 0.1 has no counterpart"),
        ({"use_galore": True, "galore_rank": 8}, "galore_rank: 8 has no counterpart"),
        ({"stage": "dpo", "pref_loss": "simpo", "simpo_gamma": 0.5}, "simpo_gamma: 0.5 has no counterpart"),
        ({"learning-rate": 1, "learning_rate": 2}, "learning-rate: 1 and learning_rate: 2 are both given"),
        ({"save_steps": 0}, "save_steps: 0 is not above 0"),
        ({"train_on_prompt": True, "mask_history": True}, "train_on_prompt and mask_history are both true"),
        ({"packing": False, "neat_packing": True}, "neat_packing: true with packing: false"),
        ({"val_size": 0.1, "eval_dataset": "b"}, "val_size and eval_dataset are both given"),
        ({"dataset": "a,b", "mix_strategy": "interleave_over"}, "mix_strategy and interleave_probs do not fit"),
    ],
)
def test_what_cannot_be_is_an_error(given: dict[str, Any], subject: str) -> None:
    found = llamafactory(max_steps=10, **given)
    assert [text for text in subjects(found) if text.startswith(subject)], subjects(found)


def test_full_training_with_words_of_lora_is_told() -> None:
    found = llamafactory(finetuning_type="full", lora_rank=8, max_steps=1)
    assert "finetuning_type: full with lora_rank" in subjects(found, "warning")
    assert found.fields["lora.rank"] == 0 and "lora.alpha" not in found.fields


def test_epochs_of_packed_rows_are_bounded_not_guessed() -> None:
    given = {"neat_packing": True, "dataset": "a", "num_train_epochs": 2, "gradient_accumulation_steps": 5}
    found = translate(LLAMAFACTORY, {**given, "per_device_train_batch_size": 1}, count_rows=lambda path: 100)
    assert found.fields["train.steps"] == 40 and found.fields["data.epochs"] == 2.0
    assert "packed-epochs" in ids(found, "error")
    checked(found)


def test_epochs_of_rows_that_are_not_here_are_told() -> None:
    found = llamafactory(dataset="a", num_train_epochs=2)
    assert "train.steps" not in found.fields and "epochs" in ids(found, "warning")


def test_a_template_that_is_not_built_in_is_the_tokenizers_own() -> None:
    found = llamafactory(template="deepseek3", max_steps=1)
    assert "data.template" not in found.fields and "template" in ids(found, "warning")
    told = next(one.evidence for one in found.findings if "template" in one.subject)
    assert "chatml, llama3, mistral, gemma, zephyr, alpaca, vicuna, qwen;" in told
    found = llamafactory(template="llama3x", max_steps=1)
    told = next(one.evidence for one in found.findings if "template" in one.subject)
    assert "(the nearest: llama3)" in told


def test_keys_that_ask_for_nothing_are_not_told() -> None:
    found = llamafactory(use_galore=False, rope_scaling=None, deepspeed=None, neftune_noise_alpha=None, max_steps=1)
    assert ids(found, "error", "warning") == []


def test_keys_of_what_is_off_are_told_in_a_note() -> None:
    off = {"pref_ftx": 0, "galore_rank": 16, "simpo_gamma": 0.5, "pref_bco_weight": 0.0, "loraplus_lr_ratio": "0.0"}
    found = llamafactory(max_steps=1, **off)
    assert ids(found, "error", "warning") == []
    assert found.findings[-1].subject.endswith(": galore_rank, simpo_gamma")
    assert ids(swift("--max_steps", "1", "--max_length", "8", "--simpo_gamma", "1", "--cpo_alpha", "1"), "error") == []


def test_shares_of_steps_that_are_not_known_are_told() -> None:
    found = llamafactory(logging_steps=0.1, save_steps=0.5)
    assert ids(found, "warning").count("interval") == 2 and "observe.log_interval" not in found.fields


def test_two_names_of_one_key_are_told_where_they_differ() -> None:
    assert "lr: 1 and learning_rate: 2 are both given" in subjects(swift("--lr", "1", "--learning_rate", "2"))
    assert subjects(swift("--lr", "2", "--learning_rate", "2")) == []


def test_a_type_that_no_weights_are_trained_in() -> None:
    assert "torch_dtype: int8 has no counterpart" in subjects(swift("--torch_dtype", "int8"))


def test_a_value_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="lora_rank: many is no whole number"):
        llamafactory(lora_rank="many")
    with pytest.raises(ConfigError, match="bf16: perhaps is no true or false"):
        llamafactory(bf16="perhaps")


# ---- ms-swift


def test_a_command_line_of_swift() -> None:
    found = swift(
        *("--model", "Qwen/Qwen2.5-7B-Instruct", "--train_type", "lora", "--dataset", "a.jsonl", "b.jsonl#500"),
        *("--torch_dtype", "bfloat16", "--num_train_epochs", "1", "--per_device_train_batch_size", "1"),
        *("--learning_rate", "1e-4", "--lora_rank", "8", "--lora_alpha", "32", "--target_modules", "all-linear"),
        *("--gradient_accumulation_steps", "16", "--eval_steps", "50", "--save_steps", "50", "--max_length", "2048"),
        *("--save_total_limit", "2", "--logging_steps", "5", "--output_dir", "output", "--warmup_ratio", "0.05"),
        *("--dataloader_num_workers", "4", "--model_author", "swift", "--max_steps", "40", "--packing", "true"),
        processes=2,
    )
    assert subjects(found) == [], found.findings
    config = checked(found)
    assert config.train.global_batch_size == 32 and config.lora.dropout == 0.05
    assert (config.optim.betas, config.optim.weight_decay, config.optim.warmup_steps) == ((0.9, 0.95), 0.1, 2)
    assert config.train.precision == "bf16" and config.train.steps == 40
    assert any("b.jsonl#500 takes 500 rows" in text for text in subjects(found, "warning"))


def test_swift_fills_a_batch_of_sixteen_by_itself() -> None:
    assert swift("--per_device_train_batch_size", "2", processes=4).fields["train.global_batch_size"] == 16


def test_a_learning_rate_that_depends_on_the_tuner() -> None:
    assert swift("--train_type", "full").fields["optim.lr"] == 1e-5
    assert swift("--train_type", "lora").fields["optim.lr"] == 1e-4


def test_megatron_swift() -> None:
    found = swift(
        *("--model", "Qwen3-30B-A3B", "--tuner_type", "full", "--tensor_model_parallel_size", "2"),
        *("--expert_model_parallel_size", "4", "--sequence_parallel", "true", "--micro_batch_size", "2"),
        *("--global_batch_size", "16", "--recompute_granularity", "full", "--lr", "1e-5", "--min_lr", "1e-6"),
        *("--lr_warmup_fraction", "0.05", "--train_iters", "200", "--save", "out", "--save_interval", "100"),
        *(
            "--max_length",
            "4096",
            "--cross_entropy_loss_fusion",
            "true",
            "--moe_aux_loss_coeff",
            "1e-3",
            "--recompute_num_layers",
            "1",
        ),
        processes=8,
    )
    assert subjects(found) == [] and ids(found, "warning") == []
    config = checked(found)
    assert (config.parallel.tp, config.parallel.ep, config.parallel.recompute) == (2, 4, "full")
    assert (config.train.micro_batch_size, config.train.global_batch_size, config.train.steps) == (2, 16, 200)
    assert (config.optim.lr, config.optim.min_lr, config.optim.warmup_steps) == (1e-5, 1e-6, 10)
    assert not config.lora.on and config.model.moe.aux_loss_coef == 1e-3


@pytest.mark.parametrize("command", ["megatron sft", "megatron pt"])
def test_megatron_swift_trains_all_weights_unless_told(command: str) -> None:
    def given(**more: Any) -> Translation:
        return translate(MS_SWIFT, {"command": command, "train_iters": 9, **more}, processes=8)

    found = given(lr_decay_style="constant", lr_warmup_iters=3)
    assert (found.fields["lora.rank"], found.fields["optim.lr"]) == (0, 1e-5)
    assert (found.fields["parallel.recompute"], found.fields["optim.warmup_steps"]) == ("selective", 3)
    assert (found.fields["train.micro_batch_size"], found.fields["train.global_batch_size"]) == (1, 16)
    assert found.fields["task.kind"] == ("pretrain" if command.endswith("pt") else "sft")
    assert found.origins["lora.rank"].is_default and checked(found)
    assert found.origins["train.micro_batch_size"].is_default
    adapted = given(train_type="lora")
    assert (adapted.fields["lora.rank"], adapted.fields["optim.lr"]) == (8, 1e-4)
    assert swift("--max_steps", "9").fields["lora.rank"] == 8


@pytest.mark.parametrize(
    ("words", "ours", "value"),
    [
        (("--rlhf_type", "dpo", "--beta", "0.3"), "task.beta", 0.3),
        (("--rlhf_type", "dpo", "--loss_type", "hinge"), "task.dpo_loss", "hinge"),
        (("--rlhf_type", "rm", "--center_rewards_coefficient", "0.01"), "task.center_rewards", 0.01),
        (("--rlhf_type", "rm"), "model.head", "score"),
        (("--rlhf_type", "kto", "--desirable_weight", "1.5"), "task.desirable_weight", 1.5),
        (("--target_modules", "linear_qkv", "linear_proj"), "lora.targets", ("q_proj", "k_proj", "v_proj", "o_proj")),
        (("--quant_bits", "4", "--quant_method", "bnb"), "lora.base", "nf4"),
        (("--deepspeed", "zero3"), "parallel.zero", 3),
        (("--fsdp", "fsdp2"), "parallel.zero", 3),
        (("--fsdp", "full_shard", "auto_wrap"), "parallel.zero", 3),
        (("--fsdp", "false"), "parallel.zero", 0),
        (
            ("--lr_scheduler_type", "cosine_with_min_lr", "--lr_scheduler_kwargs", '{"min_lr": 1e-6}'),
            "optim.min_lr",
            1e-6,
        ),
        (("--deepspeed", "zero2_offload"), "parallel.offload", "optimizer"),
        (("--attn_impl", "eager"), "train.attention_kernel", "reference"),
        (("--torch_dtype", "float32"), "train.precision", "fp32"),
        (("--fp8_format", "hybrid", "--fp8_recipe", "tensorwise"), "train.fp8_scaling", "tensorwise"),
        (("--fp8_format", "hybrid", "--fp8_recipe", "delayed"), "train.fp8_scaling", "delayed"),
        (("--fp8_format", "hybrid"), "train.fp8_scaling", "delayed"),
        (("--fp8_format", "hybrid"), "train.fp8_cast_kernel", "triton"),
        (("--model_id_or_path", "x"), "model.init_from", "x"),
        (("--loss_scale", "last_round"), "data.mask", "last"),
        (("--packing", "true"), "data.packing", "pack"),
        (("--lora_target_modules", "ALL"), "lora.targets", ("all-linear",)),
        (("--torch_dtype", "fp32"), "train.precision", "fp32"),
        (("--truncation_strategy", "left"), "data.too_long", "truncate"),
        (("--strict", "true"), "data.bad_rows", "refuse"),
        (("--split_dataset_ratio", "0.05"), "data.split", "95,5,0"),
    ],
)
def test_words_of_swift(words: tuple[str, ...], ours: str, value: Any) -> None:
    found = swift("--max_steps", "10", *words)
    assert found.fields[ours] == value and subjects(found) == []
    checked(found)


def test_rows_are_as_long_as_the_models_sequences_where_nothing_is_said() -> None:
    given = {"model": "m", "max_steps": 1}
    assert translate(MS_SWIFT, given, longest={"m": 512}.get).fields["train.seq_len"] == 512
    assert translate(MS_SWIFT, {**given, "max_length": 64}, longest={"m": 512}.get).fields["train.seq_len"] == 64
    assert "length" in ids(translate(MS_SWIFT, given), "warning")


def test_grpo_is_told() -> None:
    assert "rlhf_type: grpo has no counterpart" in subjects(swift("--rlhf_type", "grpo"))


# ---- files


def test_files_and_words_are_read(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(
        "### model\nlearning_rate: 1e-4  # text, for YAML\nbf16: true\nlr_scheduler_kwargs: {min_lr: 0.1}\n"
    )
    assert read_arguments_file(file) == {
        "learning_rate": "1e-4",
        "bf16": True,
        "lr_scheduler_kwargs": {"min_lr": 0.1},
    }
    (tmp_path / "x.json").write_text(json.dumps({"stage": "sft"}))
    assert read_arguments_file(tmp_path / "x.json") == {"stage": "sft"}
    assert read_words(["sft", "--a-b", "1", "--c=2", "--d", "e", "f", "--switch"]) == {
        "a_b": "1",
        "c": "2",
        "d": ["e", "f"],
        "switch": True,
    }


def test_yaml_merges_are_read_and_may_be_given_again(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("a: &a {x: 1, y: 2}\nb: &b {<<: *a, y: 3}\nc: {<<: *b, y: 4}\n<<: *b\ny: 5\n")
    assert read_arguments_file(tmp_path / "x.yaml") == {
        **{"x": 1, "y": 5, "a": {"x": 1, "y": 2}},
        **{"b": {"x": 1, "y": 3}, "c": {"x": 1, "y": 4}},
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bf16: true\nstage: sft\nbf16: false\n", "bf16 is given twice, in lines 1 and 3"),
        ("a: [1,\n", "is not valid YAML"),
        ("? [a, b]\n: 1\n", "the key in line 1 is no word"),
        ("base: &a {x: 1}\nb: {<<: *a, y: 1, y: 2}\n", "y is given twice, in lines 2 and 2"),
        ("- 1\n- 2\n", "is no table of keys"),
        ("a: !!python/object/apply:os.system [ls]\n", "is not valid YAML"),
    ],
)
def test_bad_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_arguments_file(file)
    assert message in str(caught.value)


def test_a_file_that_is_not_there_and_a_flag_given_twice(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_arguments_file(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="--lr is given twice: 1 and 2"):
        read_words(["--lr", "1", "--lr", "2"])


@pytest.mark.parametrize(("drop", "steps"), [(None, 12), (False, 12), (True, 9)])
def test_a_pass_that_is_not_full_is_left_out_where_asked(drop: bool | None, steps: int) -> None:
    """103 rows by 4 processes with 2 each: 12 whole passes of 8, and one of 7; a step takes 4 passes."""
    given: dict[str, Any] = {"dataset": "a", "num_train_epochs": 3, "per_device_train_batch_size": 2}
    given |= {"gradient_accumulation_steps": 4} | ({} if drop is None else {"dataloader_drop_last": drop})
    for system, name in ((LLAMAFACTORY, "model_name_or_path"), (MS_SWIFT, "model")):
        found = translate(system, {**given, name: "m"}, processes=4, count_rows=lambda path: 103)
        assert found.fields["train.global_batch_size"] == 32 and found.fields["train.steps"] == steps
        assert ("whole batches of 8" in found.origins["train.steps"].said) == bool(drop)
        assert not [one for one in found.findings if "drop_last" in one.subject]
