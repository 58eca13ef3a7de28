"""Does `[lora]` fit the model and what is to be written? Pairs of options are in `exclusions.py`."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from paceline.config.asked import error
from paceline.config.model import ModelConfig, MoESpec
from paceline.config.run import RunConfig
from paceline.report.finding import Finding


def adapter_errors(config: RunConfig) -> Iterator[Finding]:
    """What refuses a recipe with adapters, or one that asks for theirs without any."""
    export, lora = config.checkpoint.export, config.lora
    if not lora.on:
        if export == "peft":
            yield error(
                "config.lora-export",
                "checkpoint.export = 'peft' without adapters",
                "lora.rank = 0: all weights are trained, and PEFT's format holds adapters alone.",
                "Set lora.rank, for example 16, or checkpoint.export = 'hf'.",
            )
        return
    if export == "hf":
        yield error(
            "config.lora-export",
            "checkpoint.export = 'hf' with adapters",
            "A training run writes what it trains; merged weights are made of its checkpoint.",
            "Set checkpoint.export = 'peft', and merge afterwards: paceline convert RUN NEW-FOLDER.",
        )
    known = linear_names(config.model)
    absent = [target for target in lora.targets if target not in ("all-linear", *known)]
    if absent:
        near = difflib.get_close_matches(absent[0], known, n=1)
        yield error(
            "config.lora-targets",
            f"lora.targets names {', '.join(absent)}, which the model does not have outside of routed experts",
            f"It has {', '.join(known)}.",
            f'Set lora.targets = {[near[0] if near else known[0]]}, or "all-linear".',
        )


def linear_names(model: ModelConfig) -> tuple[str, ...]:
    """Linears of the model's blocks that can have adapters, in the order of their use."""
    found: dict[str, None] = {}
    for block in model.blocks():
        attention = block.attention
        if attention.kind == "mla":
            found |= dict.fromkeys(("q_down_proj", "q_up_proj") if attention.q_lora_rank else ("q_proj",))
            found |= dict.fromkeys(("kv_down_proj", "kv_up_proj", "o_proj"))
        else:
            found |= dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"))
        feed_forward = block.feed_forward
        dense = feed_forward.shared if isinstance(feed_forward, MoESpec) else feed_forward
        if dense is not None:
            found |= dict.fromkeys(("gate_proj", "up_proj", "down_proj") if dense.gated else ("up_proj", "down_proj"))
    return tuple(found)


def adapter_notes(config: RunConfig) -> Iterator[Finding]:
    """What a person should know before adapters are trained."""
    if not config.lora.on:
        return
    if not config.model.init_from:
        yield Finding(
            id="config.lora-base",
            severity="warning",
            subject=f"lora.rank = {config.lora.rank} beside weights that nobody trained",
            evidence="model.init_from is empty: the frozen weights are random, and stay so.",
            next_step="Set model.init_from to a Hugging Face folder or a run.",
        )
    if config.lora.init_adapter and config.task.reads_reference and config.task.reference == "initial":
        yield Finding(
            id="config.lora-reference",
            severity="note",
            subject="The reference model is the base without lora.init_adapter: not what the run begins with",
            evidence="The adapter is switched off for it, so the first loss is not that of two equal models.",
            next_step="For a reference with the adapter in it: merge it (paceline convert MODEL NEW --to hf --adapter "
            "ADAPTER), set model.init_from = NEW and leave lora.init_adapter out.",
        )
    if config.model.is_moe and "all-linear" in config.lora.targets:
        yield Finding(
            id="config.lora-experts",
            severity="note",
            subject="lora.targets = 'all-linear' leaves routed experts and routers frozen",
            evidence="Their matrices are stacked and multiplied together; adapters are beside single linears.",
            next_step="Train attention and shared experts, or all weights (lora.rank = 0).",
        )
