"""Runs `paceline` as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def paceline(
    *arguments: str, cwd: Path | None = None, seconds: float = 120.0, **environ: str
) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, which costs a second, or about five where torch is needed."""
    inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    return subprocess.run(
        [sys.executable, "-m", "paceline", *arguments],
        cwd=cwd,
        env={**inherited, "COLUMNS": "80", "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
