"""Pictures as inline SVG: stacked bars and points. No library, no network; colours follow the page's light or dark.

Colours are CSS variables, `--c0` to `--c11`, `--ink`, `--dim`, `--line`, which `STYLE` sets for both themes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

_LIGHT = (
    *("#3b6fb6", "#e08a2e", "#4f9d69", "#b6506f", "#7a62b3", "#8a6d4f"),
    *("#2f9aa0", "#b59f2b", "#6b7a8f", "#c9654a", "#5f8f2f", "#9aa0a6"),
)
_DARK = (
    *("#7aa7e8", "#f0b26b", "#84cfa0", "#e58aa6", "#b09ce6", "#c4a582"),
    *("#6fd0d5", "#e0cd66", "#a3b1c6", "#f09a80", "#a5d070", "#c6cbd1"),
)


def _theme(colours: Sequence[str], ink: str, dim: str, line: str, back: str) -> str:
    named = "".join(f"--c{index}:{colour};" for index, colour in enumerate(colours))
    return f"{named}--ink:{ink};--dim:{dim};--line:{line};--back:{back};"


STYLE = (
    f":root{{{_theme(_LIGHT, '#1b1f24', '#59636e', '#d4d9df', '#ffffff')}color-scheme:light dark}}"
    f"@media (prefers-color-scheme:dark){{:root{{{_theme(_DARK, '#e8eaed', '#9aa3ad', '#3a4048', '#14171a')}}}}}"
    "svg text{font:12px system-ui,sans-serif;fill:var(--ink)}svg .dim{fill:var(--dim)}"
    "svg .axis{stroke:var(--line);stroke-width:1}"
)
"""For the page that holds the pictures."""


@dataclass(frozen=True, kw_only=True)
class Point:
    x: float
    y: float
    label: str
    series: int = 0


def stacked_bars(
    names: Sequence[str],
    values: Sequence[Mapping[str, float]],
    *,
    unit: str,
    limit: float | None = None,
    title: str,
    written: Callable[[float], str] | None = None,
) -> str:
    """Horizontal bars, one a name, of parts that add up.

    Args:
        limit: a line across all bars, in the same unit.
        written: how a value is written, with its unit; four digits and ``unit`` without.
    """
    say = written or (lambda value: f"{value:.4g} {unit}")
    parts = [part for part in dict.fromkeys(name for row in values for name in row) if any(r.get(part) for r in values)]
    longest = max([sum(row.values()) for row in values] + ([limit] if limit else []) + [1e-12])
    row_height, width = 24, 560
    left = max(250, min(_WIDEST, 14 + round(_LETTER * max(map(len, names), default=0))))
    height = row_height * len(names) + (34 if limit else 12)
    scale = width / (longest * 1.02)
    pieces: list[str] = []
    for index, (name, row) in enumerate(zip(names, values, strict=True)):
        y, x = 8 + index * row_height, float(left)
        pieces.append(_text(left - 8, y + 13, _short(name), anchor="end"))
        for part in parts:
            length = row.get(part, 0.0) * scale
            if length <= 0:
                continue
            tip = f"{name}: {part} {say(row[part])}"
            pieces.append(
                f'<rect x="{x:.1f}" y="{y}" width="{length:.1f}" height="{row_height - 6}" '
                f'fill="var(--c{parts.index(part) % 12})"><title>{escape(tip)}</title></rect>'
            )
            x += length
        crossed = limit is not None and x <= left + limit * scale < x + 70
        pieces.append(
            _text(
                (left + limit * scale if crossed and limit else x) + 5,
                y + 13,
                say(sum(row.values())),
                dim=True,
            )
        )
    if limit:
        x = left + limit * scale
        bottom = 8 + row_height * len(names)
        pieces.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="2" y2="{bottom}" stroke="var(--ink)" stroke-dasharray="4 3"/>'
        )
        pieces.append(_text(x, bottom + 12, say(limit), anchor="middle", dim=True))
    return picture(left + width + 90, height, title, pieces) + legend(parts)


def legend(names: Sequence[str]) -> str:
    """Coloured squares with their names, as HTML; a series without a name is left out."""
    items = "".join(
        f'<span style="white-space:nowrap;margin-right:14px"><i style="display:inline-block;width:10px;height:10px;'
        f'background:var(--c{index % 12});margin-right:5px"></i>{escape(name)}</span>'
        for index, name in enumerate(names)
        if name
    )
    return f'<p class="legend">{items}</p>'


def scatter(
    points: Sequence[Point],
    *,
    x_title: str,
    y_title: str,
    title: str,
    line: Sequence[tuple[float, float]] = (),
    x_limit: float | None = None,
    logarithmic: bool = False,
) -> str:
    """Points with a label each (shown on hover), and a line through some of them.

    Args:
        x_limit: a vertical line.
        logarithmic: both axes.
    """
    if not points:
        return ""
    left, top, width, height = 70, 14, 640, 340
    xs = [point.x for point in points] + ([x_limit] if x_limit else [])
    ys = [point.y for point in points]
    across, along = _Axis.of(xs, logarithmic), _Axis.of(ys, logarithmic)

    def place(x: float, y: float) -> tuple[float, float]:
        return left + across.share(x) * width, top + (1 - along.share(y)) * height

    pieces: list[str] = []
    for tick in across.ticks:
        x, _ = place(tick, ys[0])
        pieces.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{top + height}"/>')
        pieces.append(_text(x, top + height + 16, f"{tick:.4g}", anchor="middle", dim=True))
    for tick in along.ticks:
        _, y = place(xs[0], tick)
        pieces.append(f'<line class="axis" x1="{left}" x2="{left + width}" y1="{y:.1f}" y2="{y:.1f}"/>')
        pieces.append(_text(left - 6, y + 4, _thousands(tick), anchor="end", dim=True))
    if x_limit:
        x, _ = place(x_limit, ys[0])
        pieces.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{top + height}" stroke="var(--ink)" '
            'stroke-dasharray="4 3"/>'
        )
    if line:
        path = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in line)
        pieces.append(f'<polyline points="{path}" fill="none" stroke="var(--ink)" stroke-width="1.2"/>')
    for point in points:
        x, y = place(point.x, point.y)
        pieces.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="var(--c{point.series % 12})" fill-opacity="0.75">'
            f"<title>{escape(point.label)}</title></circle>"
        )
    pieces.append(_text(left + width / 2, top + height + 36, x_title, anchor="middle"))
    pieces.append(
        f'<text x="14" y="{top + height / 2}" transform="rotate(-90 14 {top + height / 2})" '
        f'text-anchor="middle">{escape(y_title)}</text>'
    )
    return picture(left + width + 30, top + height + 46, title, pieces)


@dataclass(frozen=True, kw_only=True)
class _Axis:
    low: float
    high: float
    logarithmic: bool

    @classmethod
    def of(cls, values: Sequence[float], logarithmic: bool) -> _Axis:
        low, high = min(values), max(values)
        if logarithmic:
            return cls(low=low / 1.2, high=high * 1.2, logarithmic=True)
        margin = 0.05 * (high - low) or 0.1 * abs(high) or 1.0
        return cls(low=low - margin, high=high + margin, logarithmic=False)

    def share(self, value: float) -> float:
        if self.logarithmic:
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)

    @property
    def ticks(self) -> list[float]:
        if self.logarithmic:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            every = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
            return [tick for tick in every if self.low <= tick <= self.high]
        raw = (self.high - self.low) / 6
        step = 10.0 ** math.floor(math.log10(raw))
        step *= next(factor for factor in (1, 2, 5, 10) if factor * step >= raw)
        first = math.ceil(self.low / step)
        return [index * step for index in range(first, math.floor(self.high / step) + 1)]


def picture(width: float, height: float, title: str, pieces: Sequence[str]) -> str:
    """A whole picture of finished pieces of SVG. It shrinks to 85 %, where its letters can still be read, and scrolls
    sideways in a page that is narrower."""
    spoken = escape(title)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{spoken}">'
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'aria-label="{spoken}" style="max-width:{width:.0f}px;min-width:{0.85 * width:.0f}px;width:100%">'
        f"<title>{spoken}</title>{''.join(pieces)}</svg></div>"
    )


def _text(x: float, y: float, text: str, *, anchor: str = "start", dim: bool = False) -> str:
    style = ' class="dim"' if dim else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(text)}</text>'


_LETTER = 6.2
"""Pixels, in the mean."""
_WIDEST = 700
"""Pixels of names beside bars."""


def _short(text: str) -> str:
    longest = int((_WIDEST - 14) / _LETTER)
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def _thousands(value: float) -> str:
    return (
        f"{value / 1e6:.4g}M" if abs(value) >= 1e6 else f"{value / 1e3:.4g}K" if abs(value) >= 1e4 else f"{value:.4g}"
    )
