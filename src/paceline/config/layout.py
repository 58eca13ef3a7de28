"""Do the degrees of `[parallel]` fit the sizes of the model, the sequence and the batch?

Every rule is a sentence about one axis; pipeline stages have a file of their own (`schedules.py`), pairs of options a
table (`exclusions.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from paceline.config.asked import Asked, divisors, error, listed
from paceline.config.exclusions import exclusions
from paceline.config.schedules import pipeline
from paceline.report.finding import Finding


def layout_errors(asked: Asked) -> Iterator[Finding]:
    """Everything that forbids this layout; the degrees make the world size."""
    yield from tensor(asked)
    yield from sequence(asked)
    yield from heads_over_context(asked)
    yield from experts(asked)
    yield from pipeline(asked)
    yield from exclusions(asked.config, of_layout=True)


def batch(asked: Asked) -> Iterator[Finding]:
    """The global batch is made of whole micro-batches on every data-parallel rank."""
    train, dp = asked.config.train, asked.parallel.dp_degree(asked.world_size)
    micro, whole = train.micro_batch_size, train.global_batch_size
    portion = micro * dp
    if whole % portion:
        nearest = _batches(whole, portion)
        smaller = [size for size in divisors(micro) if whole % (size * dp) == 0]
        yield error(
            "config.batch",
            f"train.global_batch_size = {whole} is not a multiple of micro_batch_size {micro} x {dp} "
            f"data-parallel ranks = {portion}",
            "Every rank computes the same number of micro-batches in a step.",
            f"The nearest global batch size{'s are' if len(nearest) > 1 else ' is'} "
            f"{' and '.join(map(str, nearest))}."
            + (f" Or set train.micro_batch_size = {smaller[-1]}." if smaller else ""),
        )


def nearest_batch(asked: Asked) -> int:
    """The global batch size next to the recipe's that `batch` admits; the larger one of two."""
    whole, portion = asked.config.train.global_batch_size, asked.config.train.micro_batch_size
    portion *= asked.parallel.dp_degree(asked.world_size)
    return min(reversed(_batches(whole, portion)), key=lambda value: abs(value - whole))


def _batches(whole: int, portion: int) -> list[int]:
    below = whole // portion * portion
    return [value for value in (below, below + portion) if value]


# ---- tensor parallel


def tensor(asked: Asked) -> Iterator[Finding]:
    tp, model = asked.parallel.tp, asked.model
    if tp == 1:
        return
    if model.num_heads % tp:
        yield error(
            "config.tp-heads",
            f"parallel.tp = {tp} does not divide model.num_heads = {model.num_heads}",
            f"Each tensor-parallel rank computes whole heads. {_head_choices(asked)}",
            _largest_tp(asked),
        )
    elif not _kv_fit(asked, tp):
        yield error(
            "config.tp-kv-heads",
            f"neither of parallel.tp = {tp} and model.num_kv_heads = {model.kv_heads} divides the other",
            f"Each rank needs whole KV heads, or each KV head a whole run of ranks. {_head_choices(asked)}",
            _largest_tp(asked),
        )
    for width in asked.dense_widths:
        if width.size % tp:
            yield error(
                "config.tp-width",
                f"parallel.tp = {tp} does not divide {width.key} = {width.size}",
                "Each tensor-parallel rank computes an equal part of the width.",
                _largest_tp(asked),
            )
    if model.vocab_size < tp:
        yield error(
            "config.tp-vocabulary",
            f"parallel.tp = {tp} is more than model.vocab_size = {model.vocab_size}",
            "Each tensor-parallel rank holds rows of the embedding; they need not be equally many.",
            _largest_tp(asked),
        )


def _kv_fit(asked: Asked, tp: int) -> bool:
    """Latent attention has no KV heads to share: every query head makes its own."""
    kv = asked.model.kv_heads
    return asked.model.attention == "mla" or kv % tp == 0 or tp % kv == 0


def _head_choices(asked: Asked) -> str:
    model, kv = asked.model, asked.model.kv_heads
    degrees = divisors(model.num_heads)
    if model.attention == "mla":
        return f"tp = {listed(degrees)} divide the heads."
    whole = [tp for tp in degrees if kv % tp == 0]
    text = f"tp = {listed(whole)} give each rank whole KV heads (model.num_kv_heads = {kv})"
    copied = [tp for tp in degrees if tp % kv == 0 and tp > kv]
    if copied:
        text += f"; with tp = {listed(copied)} each KV head is on {listed([tp // kv for tp in copied])} ranks"
    neither = [tp for tp in degrees if not _kv_fit(asked, tp)]
    if neither:
        text += f"; tp = {listed(neither)} divide the query heads only and are refused"
    return text + "."


def tensor_degrees(asked: Asked) -> list[int]:
    """Every tp that heads, widths, vocabulary and sequence allow."""
    return [
        tp
        for tp in divisors(asked.model.num_heads)
        if _kv_fit(asked, tp)
        and tp <= asked.model.vocab_size
        and asked.config.train.seq_len % tp == 0
        and all(width.size % tp == 0 for width in asked.dense_widths)
    ]


def _largest_tp(asked: Asked) -> str:
    """Of the degrees that fit the model those that also divide the ranks, with the other axes as they are."""
    others = asked.parallel.model_ranks // asked.parallel.tp * asked.parallel.dp_replicate
    below = [tp for tp in tensor_degrees(asked) if tp < asked.parallel.tp and asked.world_size % (others * tp) == 0]
    if not below or below[-1] == 1:
        return "No smaller one but parallel.tp = 1 fits the model and the ranks."
    return (
        f"The next smaller that fits is parallel.tp = {below[-1]}. Pipeline stages (parallel.pp) and data parallelism "
        "(parallel.dp_shard) can take the other ranks."
    )


# ---- the sequence over tp and cp


def sequence(asked: Asked) -> Iterator[Finding]:
    """Tensor parallelism always cuts the sequence too; context parallelism cuts it first."""
    parallel, seq_len = asked.parallel, asked.config.train.seq_len
    tp, cp = parallel.tp, parallel.cp
    unit = sequence_unit(asked)
    if seq_len % unit == 0:
        return
    reasons = []
    if cp > 1 and parallel.cp_method == "ring":
        reasons.append(f"ring attention gives each rank two of 2 * cp = {2 * cp} equal pieces")
    elif cp > 1:
        reasons.append(f"each of cp = {cp} ranks has an equal part")
    if tp > 1:
        reasons.append(f"tensor parallelism cuts {'that' if cp > 1 else 'the sequence'} into tp = {tp} equal parts")
    because = " and ".join(reasons)
    below = seq_len // unit * unit
    nearest = [value for value in (below, below + unit) if 0 < value <= asked.model.max_seq_len]
    degrees = " and ".join(f"parallel.{name} = {value}" for name, value in (("cp", cp), ("tp", tp)) if value > 1)
    yield error(
        "config.sequence-parts",
        f"train.seq_len = {seq_len} is not a multiple of {unit} (for {degrees})",
        f"{because[0].upper()}{because[1:]}.",
        f"The nearest length{'s are' if len(nearest) > 1 else ' is'} {' and '.join(map(str, nearest))}."
        if nearest
        else f"No length up to model.max_seq_len = {asked.model.max_seq_len} is; take smaller degrees.",
    )


def sequence_unit(asked: Asked) -> int:
    """`train.seq_len` must be a multiple of this."""
    parallel = asked.parallel
    if parallel.cp == 1:
        return parallel.tp
    pieces = 2 if parallel.cp_method == "ring" else 1
    return parallel.cp * math.lcm(pieces, parallel.tp)


def heads_over_context(asked: Asked) -> Iterator[Finding]:
    """All-to-all attention: between the exchanges each rank has all tokens of some heads."""
    parallel, heads = asked.parallel, asked.model.num_heads
    if parallel.cp == 1 or parallel.cp_method != "ulysses" or heads % parallel.tp:
        return
    local = heads // parallel.tp
    if local % parallel.cp:
        others = parallel.tp * parallel.pp * parallel.dp_replicate
        fit = [cp for cp in divisors(local) if cp < parallel.cp and asked.world_size % (others * cp) == 0]
        yield error(
            "config.ulysses-heads",
            f"parallel.cp = {parallel.cp} with parallel.cp_method = 'ulysses' does not divide the {local} heads of a "
            "rank",
            f"model.num_heads = {heads} over parallel.tp = {parallel.tp}; all-to-all deals heads out over cp.",
            "Set parallel.cp_method = 'ring', which does not cut heads"
            + (f", or parallel.cp = {fit[-1]}." if fit else "."),
        )


# ---- experts


def experts(asked: Asked) -> Iterator[Finding]:
    parallel, model = asked.parallel, asked.model
    if asked.expert_width is None:
        for axis in ("ep", "etp"):
            if (degree := getattr(parallel, axis)) > 1:
                yield error(
                    f"config.{axis}-dense",
                    f"parallel.{axis} = {degree} without experts (model.num_experts = 0)",
                    "It spreads experts, and this model has none.",
                    f"Set parallel.{axis} = 1; parallel.tp cuts a dense MLP.",
                )
        return
    product, ranks = parallel.ep * parallel.etp, asked.ranks_of_stage
    if ranks % product:
        yield error(
            "config.expert-ranks",
            f"parallel.ep * parallel.etp = {parallel.ep} * {parallel.etp} = {product} does not divide the "
            f"{ranks} rank{'s' * (ranks > 1)} of a pipeline stage",
            f"Experts are spread over all ranks that work on the same layers: {asked.world_size} / pp {parallel.pp}.",
            f"Their product may be {listed(divisors(ranks))}."
            if ranks > 1
            else "Set both to 1, or take fewer pipeline stages.",
        )
    if model.num_experts % parallel.ep:
        yield error(
            "config.ep-experts",
            f"parallel.ep = {parallel.ep} does not divide model.num_experts = {model.num_experts}",
            "Each rank holds the same number of whole experts.",
            _expert_degrees("ep", model.num_experts, ranks // math.gcd(ranks, parallel.etp)),
        )
    if asked.expert_width.size % parallel.etp:
        yield error(
            "config.etp-width",
            f"parallel.etp = {parallel.etp} does not divide {asked.expert_width.key} = {asked.expert_width.size}",
            "Each rank computes an equal part of an expert's width.",
            _expert_degrees("etp", asked.expert_width.size, ranks // math.gcd(ranks, parallel.ep)),
        )


def _expert_degrees(axis: str, units: int, ranks: int) -> str:
    """What divides both the experts, or their width, and the ranks that the other expert axis leaves."""
    fit = divisors(math.gcd(units, ranks))
    if fit == [1]:
        return f"On this many ranks only parallel.{axis} = 1 does."
    return f"parallel.{axis} may be {listed(fit)} on this many ranks."
