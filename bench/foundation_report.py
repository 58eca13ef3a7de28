"""Writes docs/measured/foundation.{json,md} from the folder that bench/foundation.sh filled."""

from __future__ import annotations

import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

PEERS = {
    "bench_1b": ("Llama-1B, seq 8192, one GPU", 52_220, 471, 64, 0.714),
    "bench_8b": ("Llama-3-8B, seq 8192, two GPUs", 10_830, 557, 120, 0.844),
}
"""Megatron-LM + Transformer Engine on the same work: tokens/s/GPU, TFLOP/s/GPU, peak GiB, part of sustained GEMM."""
MEGATRON = "Megatron-LM + Transformer Engine (another machine of the kind)"


def main() -> None:
    folder = Path(sys.argv[1])
    target = Path(os.environ.get("MEASURED", "docs/measured"))
    target.mkdir(parents=True, exist_ok=True)
    result = collect(folder)
    (target / "foundation.json").write_text(json.dumps(result, indent=2) + "\n")
    (target / "foundation.md").write_text("\n".join(page(result)) + "\n")
    print("\n".join(page(result)))


def collect(folder: Path) -> dict[str, Any]:
    """Everything that is there; parts that did not run are left out."""
    found: dict[str, Any] = {"command": "bench/foundation.sh", "seconds": {}}
    for done in sorted(folder.glob("*.done")):
        found["seconds"][done.stem] = int(done.read_text())
    for name in PEERS:
        if (folder / f"{name}.jsonl").is_file():
            found[name] = json.loads((folder / f"{name}.jsonl").read_text().splitlines()[-1])
            train = folder / f"run-{name.replace('bench', 'train')}" / "metrics.jsonl"
            if train.is_file():
                found[name]["train_step_seconds"] = train_step(train)
    if (folder / "profile_8b.json").is_file():
        found["profile_8b"] = json.loads((folder / "profile_8b.json").read_text())
    for name, run in (("demo", Path("runs/demo-gpu")), ("demo_one", folder / "run-demo-one")):
        if (run / "summary.json").is_file():
            found[name] = json.loads((run / "summary.json").read_text())
    if (folder / "data_16.done").is_file():
        lines = (folder / "data_16.log").read_text().splitlines()
        found["data_16"] = json.loads(next(line for line in reversed(lines) if line.startswith("{")))
    return found


def train_step(metrics: Path) -> float:
    """Seconds of a step in `paceline train`: the median of the logged windows after the first."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return statistics.median(line["step_seconds"] for line in lines[1:])


def page(result: dict[str, Any]) -> list[str]:
    benches = [result[name] for name in PEERS if name in result]
    lines = ["# The foundation, measured", ""]
    if benches:
        versions = ", ".join(f"{name} {version}" for name, version in benches[-1]["versions"].items())
        lines += [f"{benches[-1]['devices']}; {versions}. Command: `{result['command']}`.", ""]
    lines += [
        "| work | system | tokens/s/GPU | TFLOP/s/GPU (causal) | of sustained GEMM | peak GiB |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for name, (title, tokens, tflops, gib, fraction) in PEERS.items():
        if name not in result:
            continue
        ours = result[name]
        lines.append(
            f"| {title} | Paceline | {ours['tokens_per_second_per_gpu']:,.0f} | {ours['tflops_per_gpu']:.0f} | "
            f"{ours['fraction_of_gemm']:.3f} of {ours['sustained_gemm_tflops']:.0f} | {ours['peak_memory_gib']:.1f} |"
        )
        lines.append(f"| | {MEGATRON} | {tokens:,} | {tflops} | {fraction} | {gib} |")
    lines += ["", "| recipe | bench, median step | spread | `paceline train` on a dataset | difference |"]
    lines += ["| --- | ---: | ---: | ---: | ---: |"]
    for name in PEERS:
        if name in result and "train_step_seconds" in result[name]:
            ours, train = result[name], result[name]["train_step_seconds"]
            lines.append(
                f"| {name.removeprefix('bench_')} | {ours['step_seconds']:.4f} s | {ours['step_seconds_min']:.4f} to "
                f"{ours['step_seconds_max']:.4f} | {train:.4f} s | {train / ours['step_seconds'] - 1:+.2%} |"
            )
    if "profile_8b" in result:
        profile = result["profile_8b"]
        lines += ["", "## Where the 8B step goes", "", "| kind | ms | of the step |", "| --- | ---: | ---: |"]
        rows = {**profile["by_kind_ms"]}
        rows |= {name.removesuffix("_ms").replace("_", " "): profile[name] for name in _TOTALS}
        lines += [f"| {kind} | {ms:.0f} | {ms / profile['wall_ms']:.1%} |" for kind, ms in rows.items()]
    lines += demos(result)
    if "data_16" in result:
        lines += ["", "`data build` on 16 cores:", "", "```json", json.dumps(result["data_16"], indent=1), "```"]
    return lines


def demos(result: dict[str, Any]) -> list[str]:
    """A sentence for each demo that ran."""
    lines = []
    for name, title in (("demo", "all GPUs"), ("demo_one", "one GPU")):
        if name not in result:
            continue
        demo = result[name]
        ours, base = (demo["evaluation"][key] for key in ("bits_per_byte", "unigram_bits_per_byte"))
        lines += [
            "",
            f"Demo on {title} ({demo['devices']}): {demo['parameters'] / 1e6:.0f} M parameters, loss "
            f"{demo['loss_first']:.2f} to {demo['loss_last']:.2f}, held-out {ours:.3f} bits per byte "
            f"(unigram {base:.3f}, ratio {ours / base:.3f}), {demo['tokens_per_second']:,.0f} tokens/s, "
            f"{result['seconds'].get(name, '?')} s in all.",
        ]
    return lines


_TOTALS = ("exposed_communication_ms", "idle_ms", "wall_ms")


if __name__ == "__main__":
    main()
