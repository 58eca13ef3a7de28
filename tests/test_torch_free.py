"""Plans, configurations and run folders are read on machines without torch, in well under a second."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "src" / "paceline"
ROOMS = (
    *("errors.py", "report", "config", "costs", "planner", "explain", "launch", "tuner", "observe/telemetry"),
    *("doctor/environment", "doctor/variables", "doctor/topology", "doctor/nccl", "doctor/hardware", "doctor/measured"),
)
FILES = (
    "observe/events.py",
    "observe/folder_lock.py",
    "observe/hooks.py",
    "observe/phases.py",
    "observe/stall.py",
    "observe/health.py",
    "doctor/config.py",
    "doctor/software.py",
    "doctor/examination.py",
    "doctor/packages.py",
    "doctor/text_file.py",
    "runtime/launcher.py",
)

CHECK = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    assert "torch" not in sys.modules, f"{name} imports torch"
"""


def torch_free_modules() -> list[str]:
    paths = [
        path
        for room in ROOMS
        for path in ([PACKAGE / room] if room.endswith(".py") else (PACKAGE / room).rglob("*.py"))
    ]
    paths += [PACKAGE / file for file in FILES if (PACKAGE / file).exists()]
    names = [path.relative_to(PACKAGE.parent).with_suffix("").parts for path in paths]
    return sorted({".".join(parts).removesuffix(".__init__") for parts in names})


def test_torch_free_modules_do_not_import_torch() -> None:
    modules = torch_free_modules()
    assert "paceline.report.finding" in modules
    result = subprocess.run([sys.executable, "-c", CHECK, *modules], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
