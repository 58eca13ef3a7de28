"""Exits with 0 if a run folder's summary says that all steps of the run are done: `is_finished.py RUN_FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

summary = json.loads((Path(sys.argv[1]) / "summary.json").read_text())
sys.exit(0 if summary["steps"] == summary["total_steps"] else 1)
