"""The tables of docs/ladder.md from the numbers of `bench/dense.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dense_jobs import BESIDE, NAIVE, RUNGS, change_of
from dense_one_gpu import cuts
from dense_table import cut_of, tflops

NOT_YET = "not measured yet"
HIDDEN_ON_ONE_GPU = {
    "5_reduction": "one GPU sends nothing, so what changes is a dtype",
    "6_micro_batch": "one GPU has no gathers to save: only the optimizer, and larger products",
    "7_gathered": "the same: what it saves here is the optimizer and the sums of gradients",
}
"""Rungs whose change needs a second GPU to show, whole or in part."""


def ladder_page(data: dict[str, Any]) -> list[str]:
    """The table of two GPUs; rungs that have not run say so."""
    return [*_head(data, "bench/dense.sh ladder"), *_table(data["entries"], (*RUNGS, *BESIDE), {})]


def one_gpu_ladder_page(data: dict[str, Any]) -> list[str]:
    """The section of one GPU: the same rungs but those that cut matrices, and which of them cannot show there."""
    cut = cuts()["gpt_13b"]
    return [
        f"## On one GPU, {cut}",
        "",
        f"The same rungs on one GPU: {cut} at full width, half the global batch. Head, loss and optimizer take a "
        "larger share of a step than in the whole model, so neither speeds nor what a rung bought are those of two "
        "GPUs. Nothing is sharded, gathered or sent; rungs that are about it cannot show what they are for:",
        "",
        *(f"- `{name}`: {why}." for name, why in HIDDEN_ON_ONE_GPU.items()),
        *(f"- `{name}` is left out: it needs two GPUs." for name in BESIDE),
        "",
        *_head(data, "bench/dense.sh ladder --one-gpu"),
        *_table(data["entries"], RUNGS, HIDDEN_ON_ONE_GPU),
    ]


def _head(data: dict[str, Any], command: str) -> list[str]:
    lines = []
    if data.get("tiny"):
        lines += ["**A dry run of tiny models on CPUs: no figure below means anything.**", ""]
    if "versions" in data:
        lines += [f"{data['devices']}, torch {data['versions'].get('torch', '?')}. Command: `{command}`.", ""]
    return lines


def _table(entries: dict[str, Any], names: Sequence[str], hidden: Mapping[str, str]) -> list[str]:
    lines = [
        "| rung | change | tokens/s/GPU | TFLOP/s/GPU | of sustained GEMM | peak GiB | loss | bought |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |",
        *_rows(entries, names, hidden),
    ]
    first, last = (_bench(entries, name) for name in (NAIVE, RUNGS[-1]))
    if first and last:
        factor = last["tokens_per_second_per_gpu"] / first["tokens_per_second_per_gpu"]
        cut = cut_of(entries[f"ladder/{NAIVE}"])
        lines += ["", f"From the first rung to the last: **{factor:.2f}x** the tokens a second{cut}."]
    return lines


def _bench(entries: dict[str, Any], name: str) -> dict[str, Any] | None:
    found: dict[str, Any] | None = entries.get(f"ladder/{name}", {}).get("bench")
    return found


def _rows(entries: dict[str, Any], names: Sequence[str], hidden: Mapping[str, str]) -> Iterator[str]:
    below: dict[str, Any] | None = None
    for name in names:
        recipe = f"recipes/ladder/{name}.toml"
        bench = _bench(entries, name)
        entry = entries.get(f"ladder/{name}", {})
        start = f"| [`{name}`](../{recipe}){cut_of(entry)} | {change_of(recipe)} |"
        if name in BESIDE:
            below = _bench(entries, BESIDE[name])
        if bench is None:
            failed = entry.get("failed")
            yield f"{start} {'failed: ' + failed[0] if failed else NOT_YET} | | | | | |"
        else:
            bought = _bought(bench, below)
            bought += f" ({hidden[name]})" if bought and name in hidden else ""
            loss = "" if bench["loss"] is None else f"{bench['loss']:.3f}"
            yield (
                f"{start} {bench['tokens_per_second_per_gpu']:,.0f} | {tflops(bench['tflops_per_gpu'])} "
                f"| {bench['fraction_of_gemm']:.3f} | {bench['peak_memory_gib']:.1f} | {loss} | {bought} |"
            )
        below = bench


def _bought(bench: dict[str, Any], below: dict[str, Any] | None) -> str:
    if below is None:
        return ""
    speed = bench["tokens_per_second_per_gpu"] / below["tokens_per_second_per_gpu"] - 1
    memory = bench["peak_memory_gib"] - below["peak_memory_gib"]
    return f"{speed:+.1%} speed, {memory:+.1f} GiB"
