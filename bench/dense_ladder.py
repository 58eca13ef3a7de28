"""The table of docs/ladder.md from the numbers of `bench/dense.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dense_jobs import BESIDE, NAIVE, RUNGS, change_of
from dense_report import tflops

NOT_YET = "not measured yet"


def ladder_page(data: dict[str, Any]) -> list[str]:
    """Everything below the page's mark; rungs that have not run say so."""
    entries = data["entries"]
    lines = []
    if data.get("tiny"):
        lines += ["**A dry run of tiny models on CPUs: no figure below means anything.**", ""]
    if "versions" in data:
        lines += [
            f"{data['devices']}, torch {data['versions'].get('torch', '?')}. Command: `bench/dense.sh ladder`.",
            "",
        ]
    lines += [
        "| rung | change | tokens/s/GPU | TFLOP/s/GPU | of sustained GEMM | peak GiB | loss | bought |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |",
        *_rows(entries),
    ]
    first, last = (_bench(entries, name) for name in (NAIVE, RUNGS[-1]))
    if first and last:
        factor = last["tokens_per_second_per_gpu"] / first["tokens_per_second_per_gpu"]
        lines += ["", f"From the first rung to the last: **{factor:.2f}x** the tokens a second."]
    return lines


def _bench(entries: dict[str, Any], name: str) -> dict[str, Any] | None:
    found: dict[str, Any] | None = entries.get(f"ladder/{name}", {}).get("bench")
    return found


def _rows(entries: dict[str, Any]) -> Iterator[str]:
    below: dict[str, Any] | None = None
    for name in (*RUNGS, *BESIDE):
        recipe = f"recipes/ladder/{name}.toml"
        bench = _bench(entries, name)
        start = f"| [`{name}`](../{recipe}) | {change_of(recipe)} |"
        if name in BESIDE:
            below = _bench(entries, BESIDE[name])
        if bench is None:
            failed = entries.get(f"ladder/{name}", {}).get("failed")
            yield f"{start} {'failed: ' + failed[0] if failed else NOT_YET} | | | | | |"
        else:
            bought = _bought(bench, below)
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
