"""The link matrix as a picture: a cell for each pair, with its label, in a colour for each kind of link."""

from __future__ import annotations

from html import escape

from paceline.doctor.topology.matrix import LEVELS, LinkMatrix
from paceline.report import chart
from paceline.report.chart import legend

_CELL_WIDTH, _CELL_HEIGHT, _LEFT, _TOP = 60, 26, 120, 30
_MOST = 64


def matrix_picture(matrix: LinkMatrix, title: str = "Links between GPUs and network cards") -> str:
    """Inline SVG and its legend. Rows are GPUs; columns are GPUs, then network cards."""
    rows = (matrix.gpus or matrix.slices)[:_MOST]
    columns = (*rows, *matrix.nics[:_MOST])
    width, height = _LEFT + _CELL_WIDTH * len(columns) + 10, _TOP + _CELL_HEIGHT * len(rows) + 8
    spoken = f"{title}: {len(rows)} GPUs, {len(matrix.nics)} network cards"
    pieces: list[str] = []
    for index, column in enumerate(columns):
        x = _LEFT + index * _CELL_WIDTH + _CELL_WIDTH / 2
        pieces.append(f'<text x="{x}" y="{_TOP - 10}" text-anchor="middle">{escape(column[:7])}</text>')
    for place, row in enumerate(rows):
        pieces += _row(matrix, row, columns, _TOP + place * _CELL_HEIGHT)
    used = {matrix.level(row, column) for row in rows for column in columns if row != column}
    names = [name if index in used else "" for index, name in enumerate(LEVELS)]
    named = legend([name.replace("NV", "NVLink") for name in names])
    return chart.picture(width, height, spoken, pieces) + named + _cards(matrix)


def _row(matrix: LinkMatrix, row: str, columns: tuple[str, ...], y: int) -> list[str]:
    affinity = matrix.affinity.get(row)
    numa = f" · NUMA {affinity.numa}" if affinity and affinity.numa else ""
    pieces = [f'<text x="{_LEFT - 8}" y="{y + 17}" text-anchor="end">{escape(row + numa)}</text>']
    for index, column in enumerate(columns):
        x = _LEFT + index * _CELL_WIDTH
        if row == column:
            continue
        label = matrix.label(row, column)
        pieces.append(
            f'<rect x="{x}" y="{y}" width="{_CELL_WIDTH - 3}" height="{_CELL_HEIGHT - 3}" rx="3" fill-opacity="0.35" '
            f'fill="var(--c{matrix.level(row, column)})"><title>{escape(f"{row} to {column}: {label}")}</title></rect>'
            f'<text x="{x + _CELL_WIDTH / 2 - 1.5}" y="{y + 16}" text-anchor="middle">{escape(label)}</text>'
        )
    return pieces


def _cards(matrix: LinkMatrix) -> str:
    if not matrix.nic_names:
        return ""
    named = ", ".join(f"{nic} = {name}" for nic, name in matrix.nic_names.items())
    return f'<p class="note">{escape(named)}</p>'
