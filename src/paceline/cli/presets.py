"""The table that `paceline train --presets` prints."""

from __future__ import annotations

from paceline.config.load import resolve
from paceline.config.presets import preset_names
from paceline.costs.layers import count_parameters
from paceline.report import units
from paceline.report.console import make_console, print_table
from paceline.report.table import Column, Table


def print_presets() -> None:
    """Prints every preset with its shape and parameter counts."""
    rows = []
    for name in preset_names():
        model = resolve({"model": {"preset": name}}).config.model
        count = count_parameters(model)
        experts = f"{model.num_experts} top-{model.top_k}" if model.is_moe else ""
        rows.append(
            (
                name,
                units.count(count.total),
                units.count(count.active) if model.is_moe else "",
                str(model.num_layers),
                str(model.hidden_size),
                f"{model.num_heads}/{model.kv_heads}" if model.attention == "gqa" else f"{model.num_heads} mla",
                experts,
                str(model.vocab_size),
            )
        )
    titles = ("preset", "parameters", "active", "layers", "hidden", "heads/kv", "experts", "vocabulary")
    columns = tuple(Column(name=title, align="left" if title in ("preset", "experts") else "right") for title in titles)
    print_table(make_console(), Table(columns=columns, rows=tuple(rows)))
