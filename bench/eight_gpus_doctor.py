"""One call of `paceline doctor --measure`; its answer is kept as data, as a page and as a calibration for the planner.

    python bench/eight_gpus_doctor.py RECIPE --nproc 8 --folder DIR [--set SECTION.KEY=VALUE ...]

Writes doctor.json, doctor.html and, on a GPU of the hardware table, calibration.toml into the folder. Doctor ends with
1 where it has found an error; that is a finding of its page here and no failure.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import cut_off


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--nproc", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    options = parser.parse_args()
    command = [sys.executable, "-m", "paceline", "doctor", options.recipe, "--measure", f"--nproc={options.nproc}"]
    command += [f"--out={options.folder / 'calibration.toml'}", f"--html={options.folder / 'doctor.html'}", "--json"]
    command += [f"--set={item}" for item in options.overrides]
    with (options.folder / "doctor.json").open("wb") as out:
        code = subprocess.run(command, stdout=out, check=False).returncode
    return 0 if code in (0, 1) else code


if __name__ == "__main__":
    cut_off.run(main)
