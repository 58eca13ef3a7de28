"""Pictures of `bench/eight_gpus.py`: the ladder, waterfalls of its fastest and its slowest step, the links of the host.

Legible on white and on black, and without a page around them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import dense_jobs
from eight_gpus_jobs import NAIVE, best_jobs
from eight_gpus_targets import figures

from paceline.report.chart import STYLE as PAGE_STYLE

WIDTH, ROW, LEFT, SCALE = 860, 22, 330, 360
"""Of the picture, of a row, of its name, of the longest bar."""
_STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #57606a }
  .title { font-size: 14px; font-weight: 600; fill: #24292f }
  .measured { fill: #2f7ed8 } .split { fill: #2f7ed8; fill-opacity: .45 } .total { fill: #57606a; fill-opacity: .6 }
  .expected { stroke: #d9822b; stroke-width: 2 }
  @media (prefers-color-scheme: dark) { text { fill: #9da7b1 } .title { fill: #e6edf3 } }
"""


def pictures(data: Mapping[str, Any]) -> dict[str, str]:
    """By name, of what is there."""
    found = {}
    entries = data["entries"]
    if len(rungs := ladder(entries, int(data["gpus"]))) > 1:
        found["ladder"] = bars("gpt_13b, tokens a second and GPU", rungs)
    explained = sorted(
        ((each["run"]["tokens_per_second_per_gpu"], key) for key, each in entries.items() if each.get("run")),
        reverse=True,
    )
    if explained:
        ends = {"fastest": explained[0][1], "slowest": explained[-1][1]}
        for name, key in ends.items() if len(explained) > 1 else [("fastest", explained[0][1])]:
            found[name] = waterfall(f"{key}: {entries[key]['title']}", entries[key]["run"])
    links = next((each["doctor"]["links_svg"] for each in entries.values() if each.get("doctor")), "")
    if links:
        begin = links.index(">") + 1
        found["links"] = f"{links[:begin]}<style>{PAGE_STYLE}</style>{links[begin:]}\n"
    return found


def ladder(entries: Mapping[str, Any], gpus: int) -> list[tuple[str, float]]:
    """(what, tokens/s/GPU) from the naive recipe up, as far as it was measured; then the best of this host."""
    keys = [f"{'thirteen' if name == NAIVE else 'rungs'}/{name}" for name in dense_jobs.RUNGS]
    keys += [job.key for job in best_jobs(gpus) if job.name != NAIVE]
    made = [(key, figures(entries.get(key))) for key in keys]
    return [(key.partition("/")[2], each["tokens_per_second_per_gpu"]) for key, each in made if each]


def bars(title: str, rows: Sequence[tuple[str, float]]) -> str:
    longest = max(value for _, value in rows)
    parts = []
    for index, (name, value) in enumerate(rows):
        y, width = 40 + ROW * index, SCALE * value / longest
        parts += [
            f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(name)}</text>',
            f'<rect class="measured" x="{LEFT}" y="{y + 2}" width="{width:.1f}" height="{ROW - 6}"/>',
            f'<text x="{LEFT + width + 6:.1f}" y="{y + 14}">{value:,.0f} ({value / rows[0][1]:.2f} x)</text>',
        ]
    return _picture(title, 40 + ROW * len(rows) + 10, parts)


def waterfall(title: str, run: Mapping[str, Any]) -> str:
    """A row for each part, begun where the one above ended; a mark where `plan` expected its end."""
    step = run["explained_step_seconds"]
    scale = SCALE / max(step, sum(max(part["seconds"], 0.0) for part in run["waterfall"]))
    parts, reached = [], 0.0
    for index, part in enumerate(run["waterfall"]):
        y, seconds = 40 + ROW * index, part["seconds"]
        x, width = LEFT + scale * min(reached, reached + seconds), scale * abs(seconds)
        kind = "measured" if part["measured"] else "split"
        parts += [
            f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(part["name"])}</text>',
            f'<rect class="{kind}" x="{x:.1f}" y="{y + 2}" width="{max(width, 0.5):.1f}" height="{ROW - 6}"/>',
        ]
        said = f"{1e3 * seconds:.1f} ms"
        if (expected := part["expected_seconds"]) is not None:
            at = LEFT + min(scale * (reached + expected), SCALE)
            parts.append(f'<line class="expected" x1="{at:.1f}" y1="{y}" x2="{at:.1f}" y2="{y + ROW - 2}"/>')
            said += f", plan {1e3 * expected:.1f}"
        parts.append(f'<text x="{WIDTH - 8}" y="{y + 14}" text-anchor="end">{said}</text>')
        reached += seconds
    y = 40 + ROW * len(run["waterfall"])
    parts += [
        f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end">step</text>',
        f'<rect class="total" x="{LEFT}" y="{y + 2}" width="{scale * step:.1f}" height="{ROW - 6}"/>',
        f'<text x="{WIDTH - 8}" y="{y + 14}" text-anchor="end">{1e3 * step:.1f} ms</text>',
        f'<text x="8" y="{y + ROW + 16}">dark: measured; light: split as predicted; '
        "orange line: where `plan` expected the part to end</text>",
    ]
    return _picture(title, y + ROW + 26, parts)


def _picture(title: str, height: int, parts: Sequence[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}</style>",
            f'<text class="title" x="8" y="22">{escape(title)}</text>',
            *parts,
            "</svg>\n",
        ]
    )
