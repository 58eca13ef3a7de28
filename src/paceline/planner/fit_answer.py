"""Does it fit, where it does not with the optimizer's state on the cards? The plain answer, before any table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.config.run import RunConfig
from paceline.costs.profiles import Profile
from paceline.costs.state_bytes import StateBytes
from paceline.costs.step import room_of
from paceline.costs.workload import Cluster, Workload
from paceline.errors import to_install
from paceline.planner.layout_text import layout_text
from paceline.planner.rank import Candidate, Ranking, rank
from paceline.report import units
from paceline.report.finding import Finding

LOWBIT = f"(needs torchao: {to_install('lowbit')})"
"""What 8-bit moments are installed with."""

_RANK = 16
"""Of the adapters that are proposed: a usual one."""

_OPTIMIZERS = {"adamw": "AdamW", "adamw8bit": "8-bit AdamW", "muon": "Muon"}


@dataclass(frozen=True, kw_only=True)
class FitAnswer:
    """What does not fit and why, and what does."""

    sentences: tuple[str, ...]
    eight_bit: Candidate | None
    """The best layout that needs no host memory, with moments of 8 bits."""
    adapters: Candidate | None = None
    """The best layout with adapters beside frozen weights, with which fine-tuning may do."""
    fp32_sums: Candidate | None = None
    """The best layout with gradients summed in fp32, where nothing fits with bf16 sums."""


def fit_answer(ranking: Ranking, best: Candidate | None, cluster: Cluster, profile: Profile) -> FitAnswer:
    """Without sentences where a layout fits with the optimizer's state on the cards."""
    if best is None:
        fp32_sums = _with_fp32_sums(ranking, cluster, profile)
        way = (
            f"What fits: gradients summed in fp32, all on the cards (the note below): {_numbers(fp32_sums)}."
            if fp32_sums
            else ""
        )
        return FitAnswer(
            sentences=(*_nothing_fits(ranking, cluster, profile), *([way] if way else [])),
            eight_bit=None,
            adapters=_with_adapters(ranking.space.config, cluster, profile),
            fp32_sums=fp32_sums,
        )
    if best.config.parallel.offload == "none":
        return FitAnswer(sentences=(), eight_bit=None)
    eight_bit = _without_host(best.config, cluster, profile)
    if ranking.least_on_cards is None:  # the recipe itself asks for host memory
        return FitAnswer(sentences=(), eight_bit=eight_bit)
    ways = [f"{_optimizer(best.config)}'s state in host memory (parallel.offload, the layouts below): {_numbers(best)}"]
    if eight_bit is not None:
        ways.append(f"8-bit moments, all on the cards (optim.name=adamw8bit, the note below): {_numbers(eight_bit)}")
    return FitAnswer(
        sentences=(
            f"Nothing fits with {_optimizer(best.config)}'s state on the cards: {_states(best.config, cluster)}",
            f"The lightest layout with it there needs {units.size(ranking.least_on_cards)} a card at least, "
            f"{beyond(cluster, profile)}.",
            *(f"What fits: {way}." for way in ways),
        ),
        eight_bit=eight_bit,
        adapters=_with_adapters(best.config, cluster, profile),
    )


def _nothing_fits(ranking: Ranking, cluster: Cluster, profile: Profile) -> Iterator[str]:
    config = ranking.space.config
    needed = [
        *(least for _, least in ranking.space.too_large),
        *(one.estimate.memory_bytes for one in ranking.too_large),
    ]
    if needed:
        host = ", not with the optimizer's state in host memory either" if config.parallel.offload != "none" else ""
        yield f"Nothing fits{host}: {_states(config, cluster)}"
        yield f"The lightest layout needs {units.size(min(needed))} a card at least, {beyond(cluster, profile)}."


def beyond(cluster: Cluster, profile: Profile) -> str:
    """``more than the 21.28 GiB of 23.64 GiB that a layout may fill``."""
    room = units.size(room_of(cluster, profile))
    return f"more than the {room} of {units.size(cluster.gpu.memory_bytes)} that a layout may fill"


def eight_bit_findings(answer: FitAnswer) -> Iterator[Finding]:
    """The layout with 8-bit moments, and how to ask for it."""
    best = answer.eight_bit
    if best is not None:
        yield Finding(
            id="planner.eight-bit",
            severity="note",
            subject=f"8-bit moments fit without host memory: {layout_text(best.config)}, {_numbers(best)}, predicted",
            evidence="Moments of AdamW in 8 bits with a scale for every 256: about 2 bytes a parameter in place of 8.",
            next_step=f"--set optim.name=adamw8bit {LOWBIT}",
        )


def adapter_findings(answer: FitAnswer) -> Iterator[Finding]:
    """The layout with adapters, and how to ask for it."""
    best = answer.adapters
    if best is not None:
        lora = best.config.lora
        base = " --set lora.base=nf4" if lora.base == "nf4" else ""
        yield Finding(
            id="planner.adapters",
            severity="note",
            subject=f"fine-tuning only: {'QLoRA' if base else 'LoRA'} of rank {lora.rank} fits: "
            f"{layout_text(best.config)}, {_numbers(best)}, predicted",
            evidence="Weights that somebody has trained stay as they are"
            + (", in 4 bits," if base else "")
            + " and small matrices beside them learn; a model that nobody has trained learns nothing so.",
            next_step=f"--set lora.rank={lora.rank}{base}",
        )


def fp32_sums_findings(answer: FitAnswer) -> Iterator[Finding]:
    """The layout with gradients summed in fp32, and why they take less."""
    best = answer.fp32_sums
    if best is not None:
        yield Finding(
            id="planner.fp32-sums",
            severity="note",
            subject=f"gradients summed in fp32 fit: {layout_text(best.config)}, {_numbers(best)}, predicted",
            evidence="Sums in bf16 take 2 bytes a parameter in place of 4, but the update reads them from a copy in "
            "fp32: 4 bytes more, shared among data-parallel ranks only (where there is one: 6 in place of 4).",
            next_step="--set parallel.accumulate_dtype=fp32",
        )


def _with_fp32_sums(ranking: Ranking, cluster: Cluster, profile: Profile) -> Candidate | None:
    """Sums in bf16 are heavier than in fp32 where few ranks share the copy of them."""
    config = ranking.space.config
    if config.parallel.accumulate_dtype != "bf16" or config.optim.reads_any_gradient:
        return None
    parallel = config.parallel.model_copy(update={"accumulate_dtype": "fp32"})
    other, only = config.model_copy(update={"parallel": parallel}), ranking.space.only
    found = rank(other, cluster, profile=profile, keep=8, probe=60, offload=False, only=only).fitting
    return found[0] if found else None


def _with_adapters(config: RunConfig, cluster: Cluster, profile: Profile) -> Candidate | None:
    """Of LoRA and QLoRA the first that fits, where all weights were to learn; QLoRA where it was to be LoRA."""
    asked = config.lora
    if asked.on and (asked.base != "bf16" or asked.dora):
        return None
    parallel = config.parallel.model_copy(update={"offload": "none"})
    for base in ("nf4",) if asked.on else ("bf16", "nf4"):
        lora = asked.model_copy(update={"rank": asked.rank or _RANK, "base": base})
        other = config.model_copy(update={"lora": lora, "parallel": parallel})
        found = rank(other, cluster, profile=profile, keep=8, probe=60, offload=False).fitting
        if found:
            return found[0]
    return None


def _without_host(config: RunConfig, cluster: Cluster, profile: Profile) -> Candidate | None:
    plain = config.parallel.model_copy(update={"offload": "none"})
    optim = config.optim.model_copy(update={"name": "adamw8bit"})
    other = config.model_copy(update={"parallel": plain, "optim": optim})
    return next(iter(rank(other, cluster, profile=profile, keep=8, probe=60, offload=False).fitting), None)


def _states(config: RunConfig, cluster: Cluster) -> str:
    """Weights, gradients and optimizer's state, sharded as far as any engine can."""
    states = StateBytes.of(Workload.of(config))
    total, there = states.total, cluster.gpus * cluster.gpu.memory_bytes
    learned = f"{states.each_learned:g} bytes each at least (weights, gradients, masters, moments)"
    text = f"{units.count(states.learned)} parameters take {learned}"
    if states.frozen:
        text = f"{units.count(states.frozen)} frozen parameters take {states.each_frozen:.3g} bytes each, and "
        text += f"{units.count(states.learned)} of adapters {learned}"
    text += f", {units.size(total)}; {cluster.gpus} cards have {units.size(there)} for programs"
    return text + ("." if total > there else ", which activations, logits and what is not sharded must share.")


def _numbers(found: Candidate) -> str:
    tight = " ! (tight)" if found.estimate.tight else ""
    return f"{found.estimate.memory_gib:.1f} GiB{tight}, {units.count(found.tokens_per_second)} tokens/s"


def _optimizer(config: RunConfig) -> str:
    return _OPTIMIZERS[config.optim.name]
