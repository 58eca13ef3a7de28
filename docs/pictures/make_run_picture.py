"""Draws the run folder's loss and speed as an SVG, with nothing but Python.

    python docs/pictures/make_run_picture.py runs/demo docs/pictures/run.svg

The picture has no background and colours that are legible on white and on black; where the reader's system asks for a
dark scheme, text becomes lighter.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 860, 300
PANEL_WIDTH, PANEL_HEIGHT = 350, 190
TOP = 60
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #57606a }
  .title { font-size: 14px; font-weight: 600; fill: #24292f }
  .grid { stroke: #8c959f; stroke-opacity: .3 }
  .train { stroke: #2f7ed8; fill: none; stroke-width: 2 }
  .held-out { fill: #d9822b }
  .speed { stroke: #2da44e; fill: none; stroke-width: 2 }
  @media (prefers-color-scheme: dark) {
    text { fill: #9da7b1 }
    .title { fill: #e6edf3 }
  }
"""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A rectangle of the picture with its own scales."""

    left: float
    x_max: float
    y_min: float
    y_max: float

    def place(self, x: float, y: float) -> tuple[float, float]:
        across = self.left + PANEL_WIDTH * x / self.x_max
        down = TOP + PANEL_HEIGHT * (1 - (y - self.y_min) / (self.y_max - self.y_min))
        return round(across, 1), round(down, 1)

    def line(self, kind: str, points: Sequence[tuple[float, float]]) -> str:
        placed = " ".join(f"{x},{y}" for x, y in (self.place(*point) for point in points))
        return f'<polyline class="{kind}" points="{placed}"/>'

    def dots(self, kind: str, points: Sequence[tuple[float, float]]) -> str:
        placed = (self.place(*point) for point in points)
        return "".join(f'<circle class="{kind}" cx="{x}" cy="{y}" r="4"/>' for x, y in placed)

    def frame(self, title: str) -> str:
        parts = [f'<text class="title" x="{self.left}" y="{TOP - 18}">{escape(title)}</text>']
        for value in ticks(self.y_min, self.y_max):
            x, y = self.place(0, value)
            parts.append(f'<line class="grid" x1="{x}" y1="{y}" x2="{x + PANEL_WIDTH}" y2="{y}"/>')
            parts.append(f'<text x="{x - 8}" y="{y + 4}" text-anchor="end">{value:,g}</text>')
        for value in ticks(0, self.x_max):
            x, _ = self.place(value, self.y_min)
            parts.append(f'<text x="{x}" y="{TOP + PANEL_HEIGHT + 20}" text-anchor="middle">{value:,g}</text>')
        middle = self.left + PANEL_WIDTH / 2
        parts.append(f'<text x="{middle}" y="{TOP + PANEL_HEIGHT + 38}" text-anchor="middle">step</text>')
        return "\n".join(parts)


def ticks(low: float, high: float) -> list[float]:
    """About five round numbers from ``low`` to ``high``."""
    rough = (high - low) / 5
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step)
    return [round(number * step, 10) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def draw(records: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]], ranks: int) -> str:
    """The SVG's text."""
    losses = [(line["step"], line["loss"]) for line in records if line["loss"] is not None]
    held_out = [(line["step"], line["loss"]) for line in evaluations]
    # the first line holds start-up costs
    speeds = [(line["step"], line["tokens_per_second_per_gpu"] * ranks) for line in records[1:]]
    last = records[-1]["step"]
    lowest = min(loss for _, loss in losses + held_out)
    loss_panel = Panel(left=60, x_max=last, y_min=math.floor(lowest), y_max=max(loss for _, loss in losses) * 1.03)
    speed_panel = Panel(left=490, x_max=last, y_min=0, y_max=max(speed for _, speed in speeds) * 1.15)
    legend = TOP - 18
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>Loss and tokens a second over {last} steps</title>",
        f"<style>{STYLE}</style>",
        loss_panel.frame("loss, nats a token"),
        f'<line class="train" x1="220" y1="{legend - 4}" x2="244" y2="{legend - 4}"/>',
        f'<text x="250" y="{legend}">training</text>',
        f'<circle class="held-out" cx="326" cy="{legend - 4}" r="4"/><text x="336" y="{legend}">held out</text>',
        loss_panel.line("train", losses),
        loss_panel.dots("held-out", held_out),
        speed_panel.frame(f"tokens/s, {ranks} processes together" if ranks > 1 else "tokens/s"),
        speed_panel.line("speed", speeds),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main(run: Path, target: Path) -> None:
    events = read_lines(run / "events.jsonl")
    # one name in the course of the run, another for the last evaluation
    evaluations = [
        {"step": event["step"], "loss": event.get("valid/loss", event.get("loss"))}
        for event in events
        if event["event"] == "evaluation"
    ]
    ranks = max((event.get("world_size", 1) for event in events if event["event"] in ("start", "resume")), default=1)
    target.write_text(draw(read_lines(run / "metrics.jsonl"), evaluations, ranks), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
