"""ms-swift's arguments as a recipe: `swift sft`, `swift pt`, `swift rlhf`, and Megatron-SWIFT's `megatron sft`.

Written for ms-swift 3.x and 4.x, by its command-line reference. Megatron-SWIFT takes names of Megatron-LM, which its
defaults follow; which of the two is meant says the command, or the names themselves.
"""

from __future__ import annotations

import re
from dataclasses import replace

from paceline.config import foreign_trainer as trainer
from paceline.config.foreign import Draft, System
from paceline.config.foreign_swift_keys import (
    ALSO_CALLED,
    DEFAULTS,
    MEGATRON_ALONE,
    MEGATRON_DEFAULTS,
    PASSIVE,
    SIMPLE,
    WITHOUT,
)
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


def _is_megatron(draft: Draft) -> bool:
    """By the command, or by names that Megatron-SWIFT alone has."""
    command = str(draft.given.get("command", ""))
    return command.startswith("megatron") or (not command and any(map(draft.has, MEGATRON_ALONE)))


def _megatron(draft: Draft) -> None:
    """Megatron-SWIFT's defaults, where they are others. Megatron's constant rate warms up, Transformers' does not."""
    if not _is_megatron(draft):
        return
    draft.system = replace(draft.system, defaults={**draft.system.defaults, **MEGATRON_DEFAULTS})
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
    recipe = draft.value("fp8_recipe", "text", "delayed")
    if fp8 and recipe in ("tensorwise", "rowwise", "delayed"):
        said = "" if draft.has("fp8_recipe") else "fp8_recipe: delayed (the default there)"
        draft.put("train.fp8_scaling", recipe, "fp8_recipe", said=said)
        if recipe == "delayed":
            draft.put(
                "train.fp8_cast_kernel", "triton", said="scales of earlier steps save time with this kernel alone"
            )
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
    held_out(draft, "split_dataset_ratio", by_rows=False)


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

MS_SWIFT = System(
    name="ms-swift",
    title="ms-swift 3 and 4",
    simple=SIMPLE,
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
    defaults=DEFAULTS,
    passive=PASSIVE,
    without=WITHOUT,
    also_called=ALSO_CALLED,
)
