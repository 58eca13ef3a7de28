"""The table of docs/measured/dense.md: the fastest entry of each work beside its peer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

Entries: TypeAlias = dict[str, dict[str, Any]]

PEER_MACHINE = "measured on another machine of the kind"
NAIVE_PEER = 2600.0
"""Tokens/s/GPU of the usual first attempt at the 13B (Transformers, FSDP2, eager), measured on such a machine too."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """A row of the table: what Megatron-LM with Transformer Engine reaches, and what was aimed at."""

    title: str
    where: str = "2 GPUs"
    peer_name: str = "Megatron-LM + Transformer Engine"
    peer: tuple[float, float, float]
    """tokens/s/GPU, TFLOP/s/GPU, peak GiB"""
    peer_fraction: float | None = None
    """of the sustained GEMM rate of its own machine, in the run's precision"""
    target: str


WORKS = {
    "8b_bf16": Work(
        title="llama3_8b bf16, seq 8192, micro-batch 1, 4 accumulation steps",
        peer=(10_830, 557, 120),
        peer_fraction=0.84,
        target=">= 580 TFLOP/s, 0.875",
    ),
    "8b_fp8": Work(
        title="llama3_8b fp8, seq 8192, micro-batch 1, 4 accumulation steps",
        peer=(13_217, 680, 115),
        peer_fraction=0.535,
        target=">= 850 TFLOP/s, 0.67",
    ),
    "13b_bf16": Work(
        title="gpt_13b bf16, seq 2048",
        peer=(6_580, 523, 125),
        target=">= 570 TFLOP/s",
    ),
    "13b_fp8": Work(
        title="gpt_13b fp8, seq 2048",
        peer=(6_580, 523, 125),
        peer_name="Megatron-LM + Transformer Engine, bf16",
        target=">= 3.3 x naive",
    ),
    "13b_naive": Work(
        title="gpt_13b, the naive recipe (recipes/ladder/naive.toml)",
        peer=(NAIVE_PEER, 207, 102),
        peer_name="Transformers + FSDP2, eager attention",
        target=">= 2,500 tokens/s",
    ),
    "1b_bf16": Work(
        title="llama3_1b bf16, seq 8192",
        where="one GPU",
        peer=(52_220, 471, 64),
        target=">= 505 TFLOP/s",
    ),
}


def fastest(entries: Entries, work: str) -> tuple[str, dict[str, Any]] | None:
    """Key and bench record of the fastest entry that does this work."""
    found = [(key, entry["bench"]) for key, entry in entries.items() if entry.get("work") == work and "bench" in entry]
    return max(found, key=lambda item: item[1]["tokens_per_second_per_gpu"], default=None)


def cut_of(entry: dict[str, Any]) -> str:
    """What to add to the name of an entry whose model was cut: ", one GPU, 14 of 32 layers"."""
    return f", {entry['cut']}" if entry.get("cut") else ""


def table(entries: Entries) -> list[str]:
    rows = [(work, best) for work in WORKS if (best := fastest(entries, work))]
    if not rows:
        return ["Nothing measured yet."]
    lines = [
        "Medians of the steps after the warm-up. TFLOP/s are model FLOPs: causal attention, recomputation not counted; "
        "the sustained GEMM is of the same run and of the run's precision. fp32 masters and moments, clipping at 1.0. "
        f"Peers: {PEER_MACHINE}, so the share of the sustained GEMM decides, not the absolute figure.",
        "",
        "| work | system | tokens/s/GPU | TFLOP/s/GPU | of sustained GEMM | peak GiB | tokens/J | step s (spread) "
        "| gradients reduced in | loss | target |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- | ---: | --- |",
    ]
    for row, (key, bench) in rows:
        work, cut = WORKS[row], cut_of(entries[key])
        energy = bench.get("tokens_per_joule")
        lines.append(
            f"| {work.title}{cut or f', {work.where}'} | Paceline (`{key}`) "
            f"| {bench['tokens_per_second_per_gpu']:,.0f} "
            f"| {tflops(bench['tflops_per_gpu'])} "
            f"| {bench['fraction_of_gemm']:.3f} of {tflops(bench['sustained_gemm_tflops'])} "
            f"| {bench['peak_memory_gib']:.1f} | {'' if energy is None else f'{energy:.2f}'} "
            f"| {bench['step_seconds']:.3f} ({bench['step_seconds_min']:.3f} to {bench['step_seconds_max']:.3f}; "
            f"{bench['steps']} steps) | {bench['gradient_reduction']} | {loss_text(bench['loss'])} "
            f"| {work.target}{' (whole model)' if cut else ''} |"
        )
        tokens, rate, gib = work.peer
        fraction = "" if work.peer_fraction is None else f"{work.peer_fraction}"
        # tokens and memory of the whole model are not those of a part
        name, tokens_cell, gib_cell = (
            (f"{work.peer_name}, whole model on {work.where}", "", "")
            if cut
            else (work.peer_name, f"{tokens:,.0f}", f"{gib:.0f}")
        )
        lines.append(f"| | {name} | {tokens_cell} | {rate:.0f} | {fraction} | {gib_cell} | | | | | |")
    return [*lines, *against_naive(entries)]


def against_naive(entries: Entries) -> list[str]:
    naive, candidates = fastest(entries, "13b_naive"), [fastest(entries, work) for work in ("13b_bf16", "13b_fp8")]
    best = max(
        (each for each in candidates if each), key=lambda each: each[1]["tokens_per_second_per_gpu"], default=None
    )
    if naive is None or best is None:
        return []
    slow, fast = (each[1]["tokens_per_second_per_gpu"] for each in (naive, best))
    cut = cut_of(entries[naive[0]])
    # the first attempt of others had all layers
    base = slow if cut else max(slow, NAIVE_PEER)
    beside = "" if cut else f"; the naive recipe reaches {slow:,.0f}, the usual first attempt {NAIVE_PEER:,.0f}"
    return [
        "",
        f"gpt_13b{cut}, best precision against naive: {fast:,.0f} / {base:,.0f} tokens/s/GPU = **{fast / base:.2f}x** "
        f"(`{best[0]}`{beside}). The rungs between them: [ladder.md](../ladder.md).",
    ]


def loss_text(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"


def tflops(value: float) -> str:
    """Whole TFLOP/s of a GPU; of a tiny model on a CPU what there is."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"
