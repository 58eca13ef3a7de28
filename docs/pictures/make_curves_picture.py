"""Draws the loss curves of `bench/dense.sh curves` and their differences beside the band of seeds, as an SVG.

    python docs/pictures/make_curves_picture.py docs/measured/dense_curves docs/pictures/dense_curves.svg

Left: running means of the training loss. Right: how far each run is from bf16 with all fast paths on; the shaded band
is the largest difference between any two seeds so far. Steps that were skipped have no loss and are left out. Legible
on white and on black, like `make_run_picture.py`.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from make_run_picture import WIDTH, Panel

Curve: TypeAlias = Sequence[float | None]
"""The loss of each step; None of one that was skipped."""
Curves: TypeAlias = Mapping[str, Curve]

HEIGHT = 320
SMOOTH = 20
REFERENCE, SEEDS = "fast", ("seed1", "seed2")
TITLES = {
    "fast": "bf16",
    "off": "fast paths off",
    "fp8": "fp8",
    "fp8_delayed": "fp8, earlier scales",
    "seed1": "other seeds",
    "seed2": "",
}
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #57606a }
  .title { font-size: 14px; font-weight: 600; fill: #24292f }
  .grid { stroke: #8c959f; stroke-opacity: .3 }
  .fast { stroke: #2f7ed8; fill: none; stroke-width: 2 }
  .off { stroke: #d9822b; fill: none; stroke-width: 1.5 }
  .fp8 { stroke: #2da44e; fill: none; stroke-width: 1.5 }
  .fp8_delayed { stroke: #8250df; fill: none; stroke-width: 1.5 }
  .seed1, .seed2 { stroke: #8c959f; fill: none; stroke-width: 1 }
  .band { fill: #8c959f; fill-opacity: .2 }
  @media (prefers-color-scheme: dark) {
    text { fill: #9da7b1 }
    .title { fill: #e6edf3 }
  }
"""


def smoothed(values: Curve, window: int = SMOOTH) -> list[tuple[float, float]]:
    """(step, mean of the losses in the ``window`` steps up to it); no point where there is none."""
    window = min(window, len(values))
    windows = {end: values[end - window : end] for end in range(window, len(values) + 1)}
    found = ((end, [value for value in each if value is not None]) for end, each in windows.items())
    return [(end, sum(there) / len(there)) for end, there in found if there]


def distance(curve: Curve, other: Curve) -> list[tuple[float, float]]:
    """Running means over the steps that both have."""
    pairs = zip(curve, other, strict=True)
    return smoothed([None if one is None or two is None else one - two for one, two in pairs])


def band(curves: Curves) -> list[tuple[float, float]]:
    """(step, largest distance between any two seeds up to it); empty with fewer than two."""
    seeds = [curves[name] for name in (REFERENCE, *SEEDS) if name in curves]
    widest: dict[float, float] = {}
    for one, other in itertools.combinations(seeds, 2):
        for step, value in distance(one, other):
            widest[step] = max(widest.get(step, 0.0), abs(value))
    steps = sorted(widest)
    return list(zip(steps, itertools.accumulate((widest[step] for step in steps), max), strict=True))


def draw(curves: Curves) -> str:
    """The SVG's text. Curves of another length than the reference are left out."""
    length = len(curves[REFERENCE])
    curves = {name: curves[name] for name in TITLES if len(curves.get(name, ())) == length}
    lines = {name: points for name, values in curves.items() if (points := smoothed(values))}
    lowest = min((value for points in lines.values() for _, value in points), default=0.0)
    highest = max((value for points in lines.values() for _, value in points), default=0.0)
    loss_panel = Panel(left=60, x_max=length, y_min=lowest - 0.1, y_max=highest + 0.1)
    shade = band(curves)
    distances = {
        name: points
        for name in ("off", "fp8", "fp8_delayed")
        if name in curves and (points := distance(curves[name], curves[REFERENCE]))
    }
    reach = 1.1 * max([abs(value) for points in (shade, *distances.values()) for _, value in points] or [0.0]) or 1.0
    gap_panel = Panel(left=490, x_max=length, y_min=-reach, y_max=reach)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>Training loss of {len(curves)} runs over {length} steps, and their differences</title>",
        f"<style>{STYLE}</style>",
        loss_panel.frame("loss, nats a token"),
        *(loss_panel.line(name, points) for name, points in reversed(lines.items())),
        gap_panel.frame("difference from bf16, and the seeds' band"),
    ]
    if shade:
        around = [gap_panel.place(step, value) for step, value in shade]
        around += [gap_panel.place(step, -value) for step, value in reversed(shade)]
        parts.append(f'<polygon class="band" points="{" ".join(f"{x},{y}" for x, y in around)}"/>')
    parts += [gap_panel.line(name, points) for name, points in distances.items()]
    parts += legend(curves)
    return "\n".join([*parts, "</svg>"]) + "\n"


def legend(curves: Curves) -> list[str]:
    parts, left, down = [], 60, HEIGHT - 12
    for name, title in TITLES.items():
        if name in curves and title:
            parts.append(f'<line class="{name}" x1="{left}" y1="{down - 4}" x2="{left + 24}" y2="{down - 4}"/>')
            parts.append(f'<text x="{left + 30}" y="{down}">{title}</text>')
            left += 60 + 7 * len(title)
    return parts


def read_curves(folder: Path) -> dict[str, list[float | None]]:
    return {
        file.stem: [loss_of(line) for line in file.read_text(encoding="utf-8").splitlines()]
        for file in sorted(folder.glob("*.jsonl"))
    }


def loss_of(line: str) -> float | None:
    loss: float | None = json.loads(line)["loss"]
    return None if loss is None or not math.isfinite(loss) else loss


def main(folder: Path, target: Path) -> None:
    target.write_text(draw(read_curves(folder)), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
