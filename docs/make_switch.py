"""Writes docs/switch.md and its pictures from docs/measured/switch.json, the results of bench/switch.sh.

python docs/make_switch.py
python docs/make_switch.py RESULTS.json PAGE.md   # pictures go to `pictures/` beside the page
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.report.chart import STYLE, Point, scatter

DOCS = Path(__file__).parent
EXPERTS = {"dense": 1, "experts2": 2, "experts4": 4, "experts8": 8}
"""Feed-forward networks that a token may go to, by what was compared."""
FULL = "experts8"
"""What router and capacities are held against: an fp32 router, capacity 1.25."""
CAPACITIES = {"capacity1": 1.0, FULL: 1.25, "capacity2": 2.0}
VARIANTS = {
    **{name: "dense" if name == "dense" else f"{number} experts" for name, number in EXPERTS.items()},
    "bf16_router": "the router in bf16",
    "capacity1": "capacity 1.0",
    "capacity2": "capacity 2.0",
}
SEEDS = 3
POINT_STEPS = 10
"""Steps of a point of a curve in the results."""
SIZES = {
    "small": "4 layers of width 128, 400 steps of 2,048 tokens (0.8M, a quarter of the text)",
    "large": "4 layers of width 256, 1,500 steps of 8,192 tokens (12.3M, the text 3.7 times)",
}

HEAD = """\
# Experts at equal FLOPs a token

<!-- Written by docs/make_switch.py from docs/measured/switch.json. Run bench/switch.sh, then that, to renew it. -->

Does a mixture of experts learn more from the same text with the same arithmetic? The Switch Transformer
([arXiv:2101.03961](https://arxiv.org/abs/2101.03961)) says so for models a hundred times larger. This page asks it of
Paceline on a small scale, with its three practical questions: how many experts, what precision of the router, how much
capacity. Whatever came out stands here.

```bash
bench/switch.sh small               # on a core of a CPU, 3 to 5 minutes a run
bench/switch.sh large --at-once 4   # on a GPU
```

**What is the same everywhere.** The recipe [`recipes/moe/switch_mini.toml`](../recipes/moe/switch_mini.toml): a decoder
whose every second layer has experts, one of which takes a token (top-1), so that a token costs as many FLOPs as in the
dense model with one network in their place; the routers are below 1 % on top. Text of the demo (Python's standard
library, 3.4M tokens), bf16, AdamW, balance loss 0.01, router z-loss 0.001, jitter 0.01 in training. Capacity is judged
within each sequence of 256 tokens, in evaluation with a factor of 2.0. *Held-out loss*: nats a token over 88 thousand
tokens of files that were not trained on, after the last step; *training loss*: mean of the last tenth of steps;
*dropped*: share of assignments beyond the capacity in training, last half of the steps. Up to three seeds a row, which
decide weights, order of the text and noise; means are of the seeds that all rows of a table have.
"""


@dataclass(frozen=True, kw_only=True)
class Size:
    """The runs of one size: by variant, by seed."""

    name: str
    runs: Mapping[str, Mapping[int, Mapping[str, Any]]]

    @classmethod
    def of(cls, name: str, entries: Mapping[str, Any]) -> Size:
        runs: dict[str, dict[int, Any]] = {}
        for key, entry in entries.items():
            if key.startswith(f"{name}/") and "run" in entry:
                runs.setdefault(entry["variant"], {})[entry["seed"]] = entry["run"]
        return cls(name=name, runs=runs)

    def losses(self, variant: str) -> list[float]:
        return [run["valid_loss"] for _, run in sorted(self.runs.get(variant, {}).items())]

    def mean(self, variant: str, among: Collection[str] = ()) -> float:
        return self.of_runs(variant, "valid_loss", among)

    def against(self, variant: str, other: str) -> list[float]:
        """Differences of the held-out losses, of the seeds that both have."""
        mine, theirs = self.runs.get(variant, {}), self.runs.get(other, {})
        return [mine[seed]["valid_loss"] - theirs[seed]["valid_loss"] for seed in sorted(mine.keys() & theirs.keys())]

    def of_runs(self, variant: str, figure: str, among: Collection[str] = ()) -> float:
        """Mean of the seeds that all of ``among`` have, where there are any."""
        seeds = set.intersection(*(set(self.runs[name]) for name in (variant, *among)))
        chosen = seeds or set(self.runs[variant])
        return mean([run[figure] for seed, run in self.runs[variant].items() if seed in chosen])

    def spread(self) -> float:
        """How far the seeds of one model lie apart at most."""
        return max(max(self.losses(variant)) - min(self.losses(variant)) for variant in self.runs)


def main() -> None:
    source, target = DOCS / "measured" / "switch.json", DOCS / "switch.md"
    if len(sys.argv) == 3:
        source, target = map(Path, sys.argv[1:])
    data = json.loads(source.read_text(encoding="utf-8"))
    pictures = target.parent / "pictures"
    pictures.mkdir(exist_ok=True)
    target.write_text("\n".join(page(data, pictures)) + "\n", encoding="utf-8")


def page(data: Mapping[str, Any], pictures: Path) -> list[str]:
    lines = [HEAD]
    if data.get("tiny"):
        lines += ["**A dry run of tiny models: no figure below means anything.**", ""]
    for name in SIZES:
        size = Size.of(name, data["entries"])
        if size.runs:
            lines += section(size, str(data.get("devices", "unknown devices")), pictures)
        else:
            lines += [f"**Not run yet**: the size `{name}`, {SIZES[name]}.", ""]
    return lines


def section(size: Size, devices: str, pictures: Path) -> list[str]:
    here = [variant for variant in EXPERTS if variant in size.runs]
    first = next(iter(size.runs[next(iter(size.runs))].values()))
    lines = [f"## {size.name.capitalize()}: {SIZES[size.name]}", ""]
    threads = ", a run at a time with one thread" if size.name == "small" else ""
    lines += [
        f"On {devices}{threads}. A model that knows only how often each token occurs would have "
        f"{first['unigram_loss']:.3f}."
    ]
    if here:
        lines += ["", "### How many experts", "", *experts_table(size, here), "", *verdict(size)]
        for kind, drawing in (("experts", by_experts(size, here)), ("curves", by_step(size, here))):
            name = f"switch_{size.name}_{kind}.svg"
            (pictures / name).write_text(drawing + "\n", encoding="utf-8")
            title = {"experts": "held-out loss by number of experts", "curves": "training loss by step"}[kind]
            lines += ["", f"![{title}](pictures/{name})"]
    if size.against("bf16_router", FULL):
        lines += ["", "### The router's precision", "", *router(size)]
    if sum(variant in size.runs for variant in CAPACITIES) > 1:
        lines += ["", "### Capacity", "", *capacity(size)]
    return [*lines, *not_run(size), ""]


def not_run(size: Size) -> list[str]:
    """What is still to come, of a bench that runs seed by seed."""
    left = [
        f"{title} ({SEEDS - number} of {SEEDS} seeds)"
        for variant, title in VARIANTS.items()
        if (number := len(size.runs.get(variant, {}))) < SEEDS
    ]
    return ["", f"**Not run yet**: {', '.join(left)}."] if left else []


# ---- how many experts


def experts_table(size: Size, here: Sequence[str]) -> Iterator[str]:
    yield "| model | parameters | held-out loss, mean | each seed | against dense, by seed | training loss | dropped |"
    yield "| --- | ---: | ---: | --- | --- | ---: | ---: |"
    for variant in here:
        title = VARIANTS[variant]
        each = ", ".join(f"{loss:.4f}" for loss in size.losses(variant))
        beside = "" if variant == "dense" else signed(size.against(variant, "dense"))
        drop = "" if variant == "dense" else f"{size.of_runs(variant, 'drop_share', here):.1%}"
        yield (
            f"| {title} | {size.of_runs(variant, 'parameters') / 1e6:.2f}M | **{size.mean(variant, here):.4f}** "
            f"| {each} | {beside} | {size.of_runs(variant, 'train_loss', here):.4f} | {drop} |"
        )


def verdict(size: Size) -> list[str]:
    """Whether 8 <= 4 <= 2 <= dense, of means and seed by seed; "" while one of them is missing."""
    if not EXPERTS.keys() <= size.runs.keys():
        return ["The order is judged once all four are there."]
    steps = list(zip(list(EXPERTS)[1:], EXPERTS, strict=False))
    ordered = all(size.mean(more, EXPERTS) <= size.mean(fewer, EXPERTS) for more, fewer in steps)
    seeds = sorted(set.intersection(*(set(size.runs[variant]) for variant in EXPERTS)))
    losses = {seed: [size.runs[variant][seed]["valid_loss"] for variant in EXPERTS] for seed in seeds}
    falling = sum(each == sorted(each, reverse=True) for each in losses.values())
    said = [
        f"The order 8 <= 4 <= 2 <= dense **{'holds' if ordered else 'does not hold'}** for the means, and in {falling} "
        f"of {len(seeds)} seeds for themselves."
    ]
    for more, fewer in steps:
        each = size.against(more, fewer)
        said.append(
            f"{VARIANTS[more]} against {VARIANTS[fewer]}: {mean(each):+.4f} in the mean, lower in "
            f"{sum(value < 0 for value in each)} of {len(each)} seeds."
        )
    spread = size.spread()
    said.append(f"The seeds of one model lie up to {spread:.4f} apart.")
    if any(abs(mean(size.against(more, fewer))) < spread for more, fewer in steps):
        said.append("Neighbours in the order differ by less than that: runs of this size do not settle it.")
    return [" ".join(said)]


def by_experts(size: Size, here: Sequence[str]) -> str:
    points = [
        Point(x=EXPERTS[variant], y=run["valid_loss"], label=f"{variant}, seed {seed}", series=index)
        for index, variant in enumerate(here)
        for seed, run in size.runs[variant].items()
    ]
    line = [(float(EXPERTS[variant]), size.mean(variant, here)) for variant in here]
    drawn = scatter(
        points, x_title="networks that a token may go to (1 = dense)", y_title="held-out loss, nats a token",
        title=f"held-out loss by number of experts, {size.name}", line=line,
    )  # fmt: skip
    return standalone(drawn, ["a run", "line: means"], coloured=False)


def by_step(size: Size, here: Sequence[str]) -> str:
    """Means over the seeds, without the first tenth, whose fall would flatten the rest."""
    points = []
    for index, variant in enumerate(here):
        curves = [run["curve"] for run in size.runs[variant].values()]
        for at, losses in enumerate(zip(*curves, strict=False), start=1):
            there = [loss for loss in losses if loss is not None]
            if there and at > len(curves[0]) // 10:
                points.append(Point(x=at * POINT_STEPS, y=mean(there), label=variant, series=index))
    drawn = scatter(
        points, x_title="step", y_title="training loss, mean of the seeds", title=f"training loss, {size.name}"
    )
    return standalone(drawn, [VARIANTS[variant] for variant in here], coloured=True)


def standalone(drawn: str, names: Sequence[str], *, coloured: bool) -> str:
    """A picture that is a file of its own: with its colours, and its series named in the corner."""
    named = "".join(
        f'<circle cx="590" cy="{26 + 18 * index}" r="5" fill="{f"var(--c{index})" if coloured else "none"}"/>'
        f'<text x="602" y="{30 + 18 * index}">{name}</text>'
        for index, name in enumerate(names)
    )
    return drawn.replace("<title>", f"<style>{STYLE}</style><title>", 1).replace("</svg>", f"{named}</svg>")


# ---- router and capacity


def router(size: Size) -> list[str]:
    each, pair = size.against("bf16_router", FULL), {"fp32": FULL, "bf16": "bf16_router"}
    lines = [
        "8 experts. *fp32*: the router's product and scores are in fp32, of bf16 weights and tokens. *bf16*: its "
        "product is in bf16.",
        "",
        "| router | held-out loss, mean | each seed | entropy of the probabilities | load of the busiest expert |",
        "| --- | ---: | --- | ---: | ---: |",
    ]
    for title, variant in pair.items():
        losses = ", ".join(f"{loss:.4f}" for loss in size.losses(variant))
        entropy, load = (
            size.of_runs(variant, figure, pair.values()) for figure in ("router_entropy", "load_max_over_mean")
        )
        lines.append(f"| {title} | {size.mean(variant, pair.values()):.4f} | {losses} | {entropy:.3f} | {load:.2f} |")
    return [
        *lines,
        "",
        f"bf16 against fp32, seed by seed: {signed(each)}; {mean(each):+.4f} in the mean. {within(size, each)} Steps "
        f"skipped because something was not finite: {skipped(size, FULL)} with fp32, {skipped(size, 'bf16_router')} "
        "with bf16.",
    ]


def within(size: Size, differences: Sequence[float]) -> str:
    """Whether a difference is one, in words."""
    spread = size.spread()
    if abs(mean(differences)) >= spread and len(differences) > 1:
        return f"That is more than the seeds of one model lie apart ({spread:.4f})."
    few = "From one seed, and " if len(differences) == 1 else "That is "
    side = "less" if abs(mean(differences)) < spread else "more"
    return f"{few}{side} than the seeds of one model lie apart ({spread:.4f}): no finding."


def skipped(size: Size, variant: str) -> int:
    return sum(run["skipped_steps"] for run in size.runs[variant].values())


def capacity(size: Size) -> list[str]:
    lines = [
        "8 experts. An expert takes at most *factor* x 256 / 8 tokens of a sequence; the others skip the layer. "
        "*Dropped*: share of assignments in training, mean of layers and steps.",
        "",
        "| factor | held-out loss, mean | each seed | against 1.25, seed by seed | dropped, first tenth | last half |",
        "| ---: | ---: | --- | --- | ---: | ---: |",
    ]
    here = [variant for variant in CAPACITIES if variant in size.runs]
    for variant in here:
        factor = CAPACITIES[variant]
        each = ", ".join(f"{loss:.4f}" for loss in size.losses(variant))
        beside = "" if variant == FULL else signed(size.against(variant, FULL))
        lines.append(
            f"| {factor} | {size.mean(variant, here):.4f} | {each} | {beside} "
            f"| {size.of_runs(variant, 'drop_share_first_tenth'):.1%} | {size.of_runs(variant, 'drop_share'):.1%} |"
        )
    for variant in here:
        each = size.against(variant, FULL)
        if variant != FULL and each:
            lines += ["", f"{CAPACITIES[variant]} against 1.25: {mean(each):+.4f} in the mean. {within(size, each)}"]
    return lines


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def signed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:+.4f}" for value in values)


if __name__ == "__main__":
    main()
