"""What both systems' words for adapters, quantization, preference losses and data become.

Each system's file says under which of its keys these are found.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.config.foreign import Draft, Without
from paceline.config.foreign_values import is_nothing
from paceline.errors import ConfigError

PROJECTIONS: Mapping[str, str] = {
    **{name: name for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")},
    "q_a_proj": "q_down_proj",
    "q_b_proj": "q_up_proj",
    "kv_a_proj_with_mqa": "kv_down_proj",
    "kv_b_proj": "kv_up_proj",
    "linear_proj": "o_proj",
    "linear_fc2": "down_proj",
}
"""Their names of linears, of Transformers' modules and of Megatron's, -> ours."""
_JOINED: Mapping[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_fc1": ("gate_proj", "up_proj"),
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "c_attn": ("q_proj", "k_proj", "v_proj"),
    "c_fc": ("up_proj",),
}
"""Several of ours in one matrix of theirs."""

_OFF: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("pref_ftx", "rpo_alpha", "loraplus_lr_ratio", "lorap_lr_ratio"), (0, 0.0)),
    "ld_alpha": (1, 1.0),
}
_ONLY_WITH: Mapping[str, tuple[str, str]] = {
    **{f"galore_{name}": ("use_galore", "true") for name in ("rank", "target", "update_interval", "scale")},
    "llamapro_num_new_blocks": ("use_llama_pro", "true"),
}

WITHOUT: Mapping[str, Without] = {
    name: Without(reason=reason, severity="error", off=_OFF.get(name, ()), only_with=_ONLY_WITH.get(name))
    for names, reason in (
        ("use_galore galore_rank galore_target galore_update_interval galore_scale", "Gradients are not projected."),
        ("use_apollo use_badam", "There are AdamW, AdamW with 8-bit moments and Muon."),
        ("use_adam_mini", "There are AdamW, AdamW with 8-bit moments and Muon."),
        ("pissa_init init_lora_weights_pissa", "Adapters begin at zero: PiSSA changes the frozen weights too."),
        ("loraplus_lr_ratio lorap_lr_ratio", "Both matrices of a pair learn at one rate."),
        ("additional_target modules_to_save", "Only linears of blocks learn beside the frozen model."),
        ("use_llama_pro llamapro_num_new_blocks", "Blocks are not inserted."),
        ("use_dft_loss use_eaft_loss use_asft_loss", "Tokens are not weighted by their probability."),
        ("pref_ftx rpo_alpha", "A pair's loss has no supervised part added (orpo has)."),
        ("ld_alpha", "Answers of different lengths are not weighted (LD-DPO)."),
    )
    for name in names.split()
}


@dataclass(frozen=True, kw_only=True)
class AdapterWords:
    """Keys of a system that speak of adapters."""

    how: str
    """``full``, ``lora``, ..."""
    rank: str = "lora_rank"
    alpha: str = "lora_alpha"
    dropout: str = "lora_dropout"
    targets: str = "lora_target"
    begin_with: str = "adapter_name_or_path"
    bits: str = "quantization_bit"
    bits_method: str = "quantization_method"
    bits_type: str = "quantization_type"
    everything: tuple[str, ...] = ("all", "all-linear", "all_linear")
    alpha_per_rank: float = 0.0
    """Default of alpha in multiples of the rank; 0 = a fixed default."""

    @property
    def names(self) -> frozenset[str]:
        own = (self.how, self.rank, self.alpha, self.dropout, self.targets, self.begin_with)
        return frozenset((*own, self.bits, self.bits_method, self.bits_type, "use_dora", "use_rslora"))


def adapters(draft: Draft, words: AdapterWords) -> None:
    """Fields of `[lora]`; findings where full training is asked for with a part of LoRA, or another kind of tuner."""
    how = draft.value(words.how, "text", "lora").lower()
    own = [name for name in (words.rank, words.alpha, words.dropout, words.targets) if draft.has(name)]
    if how in ("full",):
        if own:
            draft.find(
                "contradiction",
                "warning",
                f"{words.how}: full with {', '.join(own)}",
                "All weights are trained: there are no adapters that these could be about.",
                f"Leave {'them' if len(own) > 1 else 'it'} out, or set {words.how}: lora.",
            )
        if draft.has(words.bits):
            draft.find(
                "contradiction",
                "error",
                f"{words.how}: full with {words.bits}: {draft.given[words.bits]}",
                "Weights in so few bits cannot be trained: only adapters beside them can.",
                f"Set {words.how}: lora, or leave {words.bits} out.",
            )
        draft.put("lora.rank", 0, words.how)
        return
    if how == "qlora":
        draft.put("lora.base", "nf4", words.how)
    elif how != "lora":
        draft.find(
            "value",
            "error",
            f"{words.how}: {how} has no counterpart",
            "There are full training and low-rank adapters (LoRA, DoRA, QLoRA).",
            f"Set {words.how}: lora or full.",
        )
        return
    rank = draft.value(words.rank, "whole", 8)
    draft.put("lora.rank", rank, words.how, words.rank)
    alpha = draft.value(words.alpha, "number", words.alpha_per_rank * rank or 16.0)
    told = draft.has(words.alpha) or words.alpha in draft.system.defaults
    draft.put("lora.alpha", alpha, words.alpha, said="" if told else f"{words.alpha} (the default there)")
    draft.put("lora.dropout", draft.value(words.dropout, "number", 0.0), words.dropout)
    for name, ours in (("use_dora", "lora.dora"), ("use_rslora", "lora.use_rslora")):
        if draft.value(name, "truth", False):
            draft.put(ours, True, name)
    if draft.has(words.begin_with):
        first, *more = draft.value(words.begin_with, "names")
        draft.put("lora.init_adapter", first, words.begin_with)
        if more:
            draft.find(
                "value",
                "error",
                f"{words.begin_with} names {1 + len(more)} adapters",
                "A run begins with one.",
                "Merge the others into the model first: paceline convert MODEL MERGED --adapter PATH.",
            )
    _targets(draft, words)
    _bits(draft, words)
    draft.put("checkpoint.export", "peft", said="an adapter is what such a run leaves there")


def _targets(draft: Draft, words: AdapterWords) -> None:
    asked = draft.value(words.targets, "names", ("all",))
    if any(name.lower() in words.everything for name in asked):
        draft.put("lora.targets", ("all-linear",), words.targets)
        return
    found: dict[str, None] = {}
    unknown = []
    for name in asked:
        last = name.rpartition(".")[2]
        ours = _JOINED.get(last) or ((PROJECTIONS[last],) if last in PROJECTIONS else ())
        found |= dict.fromkeys(ours)
        unknown += [] if ours else [name]
    if unknown:
        draft.find(
            "value",
            "error",
            f"{words.targets}: {', '.join(unknown)} is no linear of a block that is known here",
            f"Known are {', '.join(PROJECTIONS)}.",
            "Name these, or all.",
        )
    if found:
        draft.put("lora.targets", tuple(found), words.targets)


def _bits(draft: Draft, words: AdapterWords) -> None:
    if not draft.has(words.bits):
        return
    bits = draft.value(words.bits, "whole")
    method = str(draft.given.get(words.bits_method, "bnb")).lower()
    kind = str(draft.given.get(words.bits_type, "nf4")).lower()
    if bits == 4 and method in ("bnb", "bitsandbytes") and kind == "nf4":
        draft.put("lora.base", "nf4", words.bits)
        return
    draft.find(
        "value",
        "error",
        f"{words.bits}: {bits} by {method} ({kind}) has no counterpart",
        "The frozen weights are kept in bf16, in fp8, or in 4 bits as NF4.",
        f'Set {words.bits}: 4, or leave it out; `lora.base = "fp8"` halves them.',
    )


# ---- data

TEMPLATES: Mapping[str, str] = {
    **{name: name for name in ("chatml", "llama3", "mistral", "gemma", "zephyr", "alpaca", "vicuna", "qwen")},
    "llama3_1": "llama3",
    "llama3_2": "llama3",
    "qwen2_5": "qwen",
}
"""Their names of chat templates -> `data.template`. Any other is that of a model, whose tokenizer has it."""


def template(draft: Draft, key: str) -> None:
    """A template of ours where there is one of that name, otherwise the tokenizer's own."""
    name = draft.value(key, "text")
    if is_nothing(name):
        return
    if name in TEMPLATES:
        draft.put("data.template", TEMPLATES[name], key)
        return
    built_in = list(dict.fromkeys(TEMPLATES.values()))
    near = difflib.get_close_matches(name, TEMPLATES, n=1, cutoff=0.5)
    nearest = f" (the nearest: {TEMPLATES[near[0]]})" if near else ""
    draft.find(
        "template",
        "warning",
        f"{key}: {name} becomes the tokenizer's own chat template",
        f"Built in are {', '.join(built_in)}{nearest}; instruct models bring theirs in tokenizer_config.json.",
        "A model without one: set data.template to one of these, or to a Jinja file.",
    )


def sources(draft: Draft, ours: str, paths: Sequence[str], *names: str) -> None:
    """`data.train` and its like. Theirs are put one behind the other: each has the share of its rows."""
    if len(paths) == 1:
        draft.put(ours, paths[0], *names)
        return
    rows = [draft.count_rows(path) for path in paths]
    if all(rows):
        weighted = [{"path": path, "weight": float(count or 0)} for path, count in zip(paths, rows, strict=True)]
        draft.put(ours, weighted, *names, said="weights are numbers of rows")
        return
    draft.put(ours, list(paths), *names)
    draft.find(
        "weights",
        "warning",
        f"{ours} names {len(paths)} sources of equal weight",
        "Theirs count by their rows, which cannot be counted from here.",
        f"Give each its weight: {ours} = [{{path, weight}}, ...].",
    )


def unpacked(draft: Draft) -> str:
    """`data.packing` where rows are padded to the longest of a batch there: `buckets` does so, but blends no sources by
    weights; `none` does."""
    found = draft.fields.get("data.train")
    weighted = isinstance(found, list) and any(not isinstance(one, str) for one in found)
    return "none" if weighted else "buckets"


def row_count(draft: Draft) -> int | None:
    """Rows of `data.train`; None where they cannot be counted."""
    found = draft.fields.get("data.train")
    if found is None:
        return None
    paths = [found] if isinstance(found, str) else [one if isinstance(one, str) else one["path"] for one in found]
    counts = [draft.count_rows(path) for path in paths]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def training_rows(draft: Draft) -> int | None:
    """Rows of `data.train` without those that `data.split` holds out; None where they cannot be counted."""
    rows, split = row_count(draft), str(draft.fields.get("data.split", ""))
    if rows is None or not split:
        return rows
    share = float(split.split(",")[1]) / 100
    # a row that is begun is held out; beside what rounding of shares leaves
    return max(1, rows - math.ceil(rows * share - 1e-3))


def held_out(draft: Draft, key: str, *, by_rows: bool = True) -> None:
    """A share of the rows (or a number of them) for evaluation.

    Raises:
        ConfigError: it is negative, no whole number of rows, or all of the rows and more.
    """
    size = draft.value(key, "number", 0.0)
    if not size:
        return
    rows = row_count(draft)
    _check_held_out(key, size, rows, by_rows=by_rows)
    if size >= 1 and not rows:
        draft.find(
            "held-out",
            "warning",
            f"{key}: {size:g} rows are no share yet",
            "A recipe cuts by shares, and the rows cannot be counted from here.",
            'Set data.split, "95,5,0" for one row in twenty.',
        )
        return
    share = 100 * (size / rows if size >= 1 and rows else size)
    draft.put("data.split", f"{100 - share:g},{share:g},0", key)


def _check_held_out(key: str, size: float, rows: int | None, *, by_rows: bool) -> None:
    if size < 0:
        why = "is negative"
    elif size >= 1 and not by_rows:
        why = "leaves nothing to train on: it is a share of the rows"
    elif size > 1 and size != int(size):
        why = "is no share, and no whole number of rows"
    elif size >= 1 and rows is not None and size >= rows:
        why = f"leaves nothing to train on: there are {rows:,} rows"
    else:
        return
    most = f", or a whole number of rows{'' if rows is None else f' below {rows:,}'}" if by_rows else ""
    raise ConfigError(f"{key}: {size:g} {why}", next_step=f"Give a share from 0 to below 1, such as 0.05{most}.")


# ---- losses

LOSSES = {"sigmoid": "sigmoid", "ipo": "ipo", "hinge": "hinge"}
"""Their names of DPO's losses -> `task.dpo_loss`."""


def preference_loss(draft: Draft, key: str) -> None:
    """`task.dpo_loss`, or another task where the loss is one of its own; of dpo alone."""
    name = draft.value(key, "text", "sigmoid")
    if name in LOSSES:
        draft.put("task.dpo_loss", LOSSES[name], key)
    elif name == "orpo":
        draft.put("task.kind", "orpo", key)
    elif name == "kto_pair":
        draft.find(
            "value",
            "error",
            f"{key}: kto_pair has no counterpart",
            "KTO learns from single answers with a label.",
            "Take the rows apart, and set the stage to kto.",
        )
    else:
        draft.find(
            "value",
            "error",
            f"{key}: {name} has no counterpart",
            f"There are {', '.join(LOSSES)} and orpo.",
            "Choose one of these.",
        )
