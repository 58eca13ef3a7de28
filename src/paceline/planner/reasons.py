"""Why is the first layout first, why are its neighbours not, what was refused, and what would help?

Every sentence has its numbers from predictions of both sides; nothing is a rule of thumb.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from paceline.config.asked import Asked, divisors
from paceline.config.data import ROW_TASKS
from paceline.config.layout import tensor
from paceline.config.run import RunConfig
from paceline.costs.hardware import common_hardware
from paceline.costs.profiles import PACELINE, Profile
from paceline.costs.step import MARGIN, PARTS, SAFE_SHARE, StepEstimate, predict
from paceline.costs.workload import Cluster, Workload
from paceline.planner.fit_answer import (
    LOWBIT,
    FitAnswer,
    adapter_findings,
    beyond,
    fit_answer,
    fp32_sums_findings,
)
from paceline.planner.helps import WORTHWHILE, helps
from paceline.planner.layout_text import layout_fields
from paceline.planner.layout_text import layout_text as layout_text
from paceline.planner.rank import ALIKE, Candidate, Ranking, rank
from paceline.planner.rough import Degrees
from paceline.report import units
from paceline.report.finding import Finding

PART_NAMES = {
    "gemm": "matrix products",
    "attention": "attention",
    "memory_bound": "memory-bound kernels",
    "launch": "kernel launches",
    "recompute": "recomputation",
    "tp_communication": "exposed tensor-parallel communication",
    "cp_communication": "exposed context-parallel communication",
    "ep_communication": "exposed expert-parallel communication",
    "pp_communication": "exposed pipeline communication",
    "dp_communication": "exposed data-parallel communication",
    "bubble": "the pipeline's idle time",
    "optimizer": "the optimizer",
    "offload": "offload: exposed copies over PCIe, and the update by the host",
    "overhead": "overhead of the framework",
}
"""As a sentence calls them."""

_NEIGHBOURS = 6
"""How many are told of the first one's, or as many as there are kinds of parallelism that differ."""
_AXES = ("tp", "pp", "cp", "ep", "zero", "copies")


@dataclass(frozen=True, kw_only=True)
class Reasons:
    """Sentences, each with numbers."""

    answer: tuple[str, ...]
    """What does not fit and why, and what does, where the optimizer's state had to leave the cards."""
    first: tuple[str, ...]
    """Where the time and the memory of the first go."""
    others: tuple[str, ...]
    """The nearest that differ in one thing, and what that costs."""
    rejected: tuple[str, ...]
    helps: tuple[Finding, ...]
    """Changes beyond the layout, with predicted gains."""


def reasons(ranking: Ranking, cluster: Cluster, profile: Profile = PACELINE) -> Reasons:
    """Of a ranking with a first layout, or of one where nothing fits."""
    best = ranking.fitting[0] if ranking.fitting else None
    if best and best.gpus != cluster.gpus:  # of fewer, which cost less
        cluster = replace(cluster, gpus=best.gpus, gpus_per_node=min(cluster.gpus_per_node, best.gpus))
    answer = fit_answer(ranking, best, cluster, profile)
    return Reasons(
        answer=answer.sentences,
        first=(*_first(best, cluster, profile), *_tied(ranking, best)) if best else (),
        others=tuple(_others(ranking, best)) if best else (),
        rejected=tuple(_rejected(ranking, cluster, best, profile)),
        helps=tuple(helps(ranking, best, cluster, profile, answer) if best else _would_fit(ranking, profile, answer)),
    )


# ---- the first


def not_counted(profile: Profile) -> str:
    """What an estimate of memory leaves out, and what is kept free for it."""
    return (
        f"Not in it: CUDA's context, libraries and NCCL's buffers (about {profile.context_gib:g} GiB are kept free for "
        f"them) and fragmentation ({MARGIN:.0%} are kept free)."
    )


def _first(best: Candidate, cluster: Cluster, profile: Profile) -> Iterator[str]:
    estimate = best.estimate
    parts = sorted(estimate.parts.items(), key=lambda item: -item[1])
    shares = [
        f"{units.percent(value / estimate.seconds)} {PART_NAMES.get(name, name)}"
        for name, value in parts
        if value / estimate.seconds >= 0.005
    ]
    yield f"Of {units.duration(estimate.seconds)} a step: {', '.join(shares)}."
    fullest = max(range(len(estimate.stages)), key=lambda index: estimate.stages[index].total)
    stage, room = estimate.stages[fullest], cluster.gpu.memory_bytes
    where = f" on pipeline rank {fullest} of {len(estimate.stages)}" if len(estimate.stages) > 1 else ""
    kinds = ("states", "gathered", "activations", "logits", "framework")
    sizes = [f"{kind} {units.size(value)}" for kind in kinds if (value := getattr(stage, kind)) >= 2**20]
    yield f"{units.size(stage.total)} of {units.size(room)}{where}: {', '.join(sizes)}."
    yield not_counted(profile)
    yield from _seen(best.config)
    if estimate.tight:
        share = units.percent(stage.total / room)
        yield f"{share} of the card is tight: only up to {SAFE_SHARE:.0%} has no run been seen to run out of it."
    if best.config.parallel.offload != "none":
        ranks = min(best.gpus, cluster.gpus_per_node)
        yield (
            f"Offloaded states take {units.size(best.host_bytes)} of host memory a rank, "
            f"{units.size(ranks * best.host_bytes)} on every node, pinned."
        )
        yield (
            f"Of the step, {units.duration(estimate.parts['offload'])} are copies over PCIe that nothing hides and the "
            f"host's update, at an assumed {cluster.host_gb_per_s:g} GB/s of memory traffic a node, which was never "
            "measured here. Measure a few steps (--set train.steps=10)."
        )


def _seen(config: RunConfig) -> Iterator[str]:
    """What attention is counted over, where documents share rows and do not see each other."""
    data, whole = config.data, config.train.seq_len
    if data.document_tokens:
        yield f"Attention is counted within documents of {data.document_tokens:,.0f} tokens (data.document_tokens)."
    elif data.reset_at_document_ends or (config.task.kind in ROW_TASKS and data.packing == "pack"):
        yield (
            f"Attention is counted over whole rows of {whole:,} tokens, which is too much where shorter documents "
            "share them: `paceline train --dry-run` says what data.document_tokens is."
        )


def _tied(ranking: Ranking, best: Candidate) -> Iterator[str]:
    """Who was faster by less than predictions can tell."""
    fastest = max(ranking.fitting, key=lambda one: one.estimate.tokens_per_second_per_gpu)
    gain = fastest.estimate.tokens_per_second_per_gpu / best.estimate.tokens_per_second_per_gpu - 1
    if ranking.objective != "memory" and gain >= 5e-4:
        yield (
            f"It is the plainest, then the lightest, of those within {ALIKE:.0%} of the fastest, which no prediction "
            f"can tell apart; the fastest ({layout_text(fastest.config, than=best.config)}): {gain:+.1%} tokens/s."
        )


# ---- its neighbours


def _others(ranking: Ranking, best: Candidate) -> Iterator[str]:
    wanted = layout_fields(best.config)
    nearest: dict[tuple[str, ...], Candidate] = {}
    for candidate in ranking.fitting[1:]:
        if candidate.gpus != best.gpus:
            continue
        fields = layout_fields(candidate.config)
        for name, value in fields.items():
            if value != wanted[name]:
                nearest.setdefault((name, str(value)), candidate)
    found: dict[int, Candidate] = {}
    for name in wanted:  # of every kind of parallelism the fastest, then whatever is fastest
        ones = [candidate for (field, _), candidate in nearest.items() if field == name]
        if ones and name in _AXES:
            fastest = min(ones, key=lambda one: one.estimate.seconds)
            found[id(fastest)] = fastest
    for (name, _), candidate in sorted(nearest.items(), key=lambda item: item[1].estimate.seconds):
        if name != "offload" and len(found) < _NEIGHBOURS:
            found.setdefault(id(candidate), candidate)
    for candidate in sorted(found.values(), key=lambda one: one.estimate.seconds):
        yield f"{layout_text(candidate.config, than=best.config)}: {_compared(best.estimate, candidate.estimate)}."


def _compared(best: StepEstimate, other: StepEstimate) -> str:
    speed = other.tokens_per_second_per_gpu / best.tokens_per_second_per_gpu - 1
    memory = (other.memory_bytes - best.memory_bytes) / 2**30
    more = {name: other.parts[name] - best.parts[name] for name in PARTS if name in other.parts and name in best.parts}
    name = max(more, key=lambda key: more[key])
    why = ""
    if speed < -WORTHWHILE / 2 and more[name] > 0:
        why = f", {units.duration(more[name])} more for {PART_NAMES.get(name, name)}"
    slower = "as fast" if abs(speed) < 5e-4 else f"{speed:+.1%} tokens/s"
    return f"{slower}{why}, {memory:+.1f} GiB"


# ---- refused


def _rejected(ranking: Ranking, cluster: Cluster, best: Candidate | None, profile: Profile) -> Iterator[str]:
    room, limit = cluster.gpu.memory_bytes, beyond(cluster, profile)
    speed = best.estimate.tokens_per_second_per_gpu if best else 0.0
    faster: dict[tuple[Any, ...], Candidate] = {}
    for candidate in ranking.too_large:
        if candidate.gpus != cluster.gpus or candidate.estimate.tokens_per_second_per_gpu <= (1 + WORTHWHILE) * speed:
            continue
        fields = layout_fields(candidate.config)
        key = tuple(fields[name] for name in ("tp", "pp", "cp", "ep", "zero", "copies"))
        if key not in faster or candidate.estimate.memory_bytes < faster[key].estimate.memory_bytes:
            faster[key] = candidate
    for candidate in sorted(faster.values(), key=lambda found: found.estimate.memory_bytes)[:3]:
        gain = f"{candidate.estimate.tokens_per_second_per_gpu / speed - 1:+.1%} tokens/s, but " if speed else ""
        size = units.size(candidate.estimate.memory_bytes)
        yield f"{layout_text(candidate.config)}: {gain}{size} on the fullest card, {limit}."
    if ranking.fitting and all(one.config.parallel.zero < 2 for one in ranking.fitting):
        sharded = [one for one in ranking.too_large if one.config.parallel.zero >= 2]
        if sharded:
            lightest = min(sharded, key=lambda one: one.estimate.memory_bytes)
            yield (
                f"Sharded gradients and parameters (zero 2 and 3): the lightest, {layout_text(lightest.config)}, needs "
                f"{units.size(lightest.estimate.memory_bytes)}, {limit}."
            )
    space = ranking.space
    if space.too_large:
        of, least = space.too_large[0]
        yield (
            f"{len(space.too_large)} combinations of degrees cannot fit even with everything recomputed; the nearest, "
            f"{_degrees_text(of)}, needs {units.size(least)} of {units.size(room)} at least."
        )
    if space.batch_misfits:
        yield (
            f"{space.batch_misfits} combinations of degrees have data-parallel ranks that do not divide "
            f"train.global_batch_size = {space.config.train.global_batch_size}."
        )
    if space.far_behind:
        yield f"{space.far_behind} combinations of degrees were left out, far behind by a closed-form guess."
    asked = Asked.of(space.config, cluster.gpus)
    for tp in [degree for degree in divisors(cluster.gpus) if degree > 1]:
        if tp > cluster.domain:
            yield f"tp {tp} and more: wider than the {cluster.domain} GPUs that share a node's links."
            break
        other = asked.with_parallel(space.config.parallel.model_copy(update={"tp": tp, "cp": 1, "pp": 1}))
        for finding in tensor(other):
            yield f"tp {tp}: {finding.subject}."
            break


def _degrees_text(of: Degrees) -> str:
    degrees = {"tp": of.tp, "pp": of.pp, "cp": of.cp, "ep": of.ep, "copies": of.dp_replicate}
    return ", ".join([*(f"{name} {value}" for name, value in degrees.items() if value > 1), f"zero {of.zero}"])


# ---- where nothing fits


def _would_fit(ranking: Ranking, profile: Profile, answer: FitAnswer) -> Iterator[Finding]:
    """What it takes, where nothing fits: more GPUs, larger cards, less to hold."""
    config, cluster = ranking.space.config, ranking.space.cluster
    smallest = min(ranking.too_large, key=lambda found: found.estimate.memory_bytes, default=None)
    if smallest is not None:
        needed = smallest.estimate.memory_bytes
        yield Finding(
            id="planner.nearest",
            severity="note",
            subject=f"the smallest needs {units.size(needed)} of {units.size(cluster.gpu.memory_bytes)}: "
            f"{layout_text(smallest.config)}",
            evidence=_largest(smallest.estimate),
            next_step="Larger cards: "
            + (", ".join(card.name for card in common_hardware() if card.memory_bytes > needed) or "none of the table")
            + ".",
        )
    for name, changes, step in _lighter(config):
        if smallest is None:
            break
        work = replace(Workload.of(smallest.config), **changes)
        after = predict(work, cluster, profile)
        if after.memory_bytes < 0.97 * smallest.estimate.memory_bytes:
            yield Finding(
                id="planner.lighter",
                severity="note",
                subject=f"{name}: {units.size(after.memory_bytes)}" + (" (fits)" if after.fits else ""),
                evidence="The smallest layout with that one change, predicted.",
                next_step=step,
            )
    yield from fp32_sums_findings(answer)
    yield from adapter_findings(answer)
    yield from _more_gpus(config, cluster, profile)


def _lighter(config: RunConfig) -> Iterator[tuple[str, dict[str, Any], str]]:
    if config.optim.name == "adamw":
        yield "8-bit moments", {"optimizer": "adamw8bit", "offload": "none"}, f"--set optim.name=adamw8bit {LOWBIT}"
    if config.train.loss_kernel == "plain":
        yield "the chunked loss", {"chunked_loss": True}, "--set train.loss_kernel=chunked"
    shorter = config.train.seq_len // 2
    if shorter >= 512:
        yield f"sequences of {shorter}", {"seq_len": shorter}, f"--set train.seq_len={shorter}"
    if config.parallel.offload != "parameters" and config.lora.base == "bf16":  # others have no FSDP
        step = "--set parallel.zero=3 --set parallel.offload=parameters (slow: over PCIe in every pass)"
        yield "parameters in host memory", {"zero": 3, "offload": "parameters"}, step


def _more_gpus(config: RunConfig, cluster: Cluster, profile: Profile) -> Iterator[Finding]:
    gpus = cluster.gpus
    for _ in range(6):
        gpus *= 2
        if config.train.global_batch_size % 2 and config.train.global_batch_size < gpus:
            break
        larger = replace(
            cluster, gpus=gpus, gpus_per_node=min(8, gpus) if cluster.nodes == 1 else cluster.gpus_per_node
        )
        found = rank(config, larger, profile=profile, keep=8, probe=60, offload=False)
        if found.fitting:
            best = found.fitting[0]
            yield Finding(
                id="planner.more-gpus",
                severity="note",
                subject=f"on {gpus} GPUs it fits: {layout_text(best.config)}, {units.size(best.estimate.memory_bytes)}",
                evidence=f"{units.count(best.tokens_per_second)} tokens/s, predicted.",
                next_step=f"--gpus {gpus}",
            )
            return


def _largest(estimate: StepEstimate) -> str:
    stage = max(estimate.stages, key=lambda found: found.total)
    sizes: dict[str, float] = {
        "states": stage.states,
        "gathered weights and gradients": stage.gathered,
        "activations": stage.activations,
        "logits": stage.logits,
        "the framework": stage.framework,
    }
    order: Callable[[str], float] = sizes.__getitem__
    name = max(sizes, key=order)
    return f"The largest part is {name}, {units.size(sizes[name])}."
