"""A layout in a line."""

from __future__ import annotations

from typing import Any

from paceline.config.run import RunConfig


def layout_text(config: RunConfig, *, than: RunConfig | None = None) -> str:
    """``tp 4, pp 2, zero 1, micro-batch 2, recompute selective``; only what is not 1, or what differs from another."""
    before = layout_fields(than) if than else {}
    shown = []
    for name, value in layout_fields(config).items():
        if than is not None:
            if before[name] != value:
                shown.append(f"{name} {value}")
        elif name in ("zero", "micro-batch") or value not in (1, "none", "1f1b"):
            shown.append(f"{name} {value}")
    return ", ".join(shown)


def layout_fields(config: RunConfig) -> dict[str, Any]:
    parallel = config.parallel
    mode = parallel.recompute
    return {
        "tp": parallel.tp,
        "pp": parallel.pp,
        "cp": parallel.cp,
        "ep": parallel.ep,
        "zero": parallel.zero,
        "copies": parallel.dp_replicate,
        "schedule": parallel.pipeline_schedule if parallel.pp > 1 else "1f1b",
        "stages a rank": parallel.stages_per_rank,
        "micro-batch": config.train.micro_batch_size,
        "recompute": mode if isinstance(mode, str) else "by layer",
        "offload": parallel.offload,
    }
