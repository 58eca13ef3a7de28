"""Does `paceline doctor --measure` find what is known of a machine? Its figures beside those of two H200s.

    python bench/doctor_ceilings.py --out docs/measured/doctor.json      # on one or two H200s, a minute or two
    python bench/doctor_ceilings.py --read doctor.json                   # what `doctor --measure --json` printed before

The known figures (torch 2.11, NCCL 2.28, driver 580) were measured by other scripts. Each of doctor's must lie within
`--tolerance` of its own, the links must be one group of NVLink, and no finding of `measured.low-*` or `measured.slow-*`
may stand. Exit code 1 where that is not so.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cut_off

from paceline.report.console import make_console, print_table
from paceline.report.table import table

KNOWN_RATES = {
    "gemm_bf16_burst": 768.0,
    "gemm_bf16": 664.0,
    "gemm_fp8_burst": 1444.0,
    "gemm_fp8": 1271.0,
    "attention_forward": 553.0,
    "attention": 522.0,
    "memory_copy": 4280.0,
    "host_to_device": 55.0,
    "device_to_host": 55.0,
}
"""Of one H200, in the units of `doctor/measured/record.py`."""
KNOWN_BUS = {
    ("all_reduce", 2**24): 178.0,
    ("all_reduce", 2**26): 239.0,
    ("all_reduce", 2**28): 290.0,
    ("all_reduce", 2**30): 325.0,
    ("all_gather", 2**30): 276.0,
    ("reduce_scatter", 2**30): 257.0,
    ("all_to_all", 2**30): 322.0,
    ("send", 2**30): 349.0,
}
"""Bus bandwidth between two of them, GB/s."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--read", type=Path, help="judge this file; nothing is measured")
    parser.add_argument("--recipe", default="recipes/llama3_8b.toml")
    parser.add_argument("--out", type=Path, help="write what doctor printed, and the comparison")
    parser.add_argument("--tolerance", type=float, default=0.05, help="share by which a figure may differ")
    options = parser.parse_args()
    document = json.loads(options.read.read_text()) if options.read else measure(options.recipe)
    rows = list(compare(document["measured"]))
    wrong = [*too_far(rows, options.tolerance), *complaints(document)]
    shown = [(name, f"{found:.4g}", f"{known:.4g}", f"{found / known - 1:+.1%}") for name, found, known in rows]
    print_table(make_console(), table(("what", ">doctor", ">known", ">apart"), shown))
    for text in wrong:
        print(f"wrong: {text}")
    if options.out:
        document["compared"] = [{"what": name, "doctor": found, "known": known} for name, found, known in rows]
        document["wrong"] = wrong
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    return int(bool(wrong) or not rows)


def measure(recipe: str) -> dict[str, Any]:
    """One run of doctor; its exit code is 1 where it has found an error, which is judged here."""
    command = [sys.executable, "-m", "paceline", "doctor", recipe, "--measure", "--out", "", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"doctor ended with {done.returncode}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def compare(measured: dict[str, Any]) -> Iterator[tuple[str, float, float]]:
    """(what, doctor's figure, the known one); rates are the slowest rank's."""
    if any(record["device"] != "NVIDIA H200" for record in measured["ranks"]):
        raise SystemExit("the known figures are of H200s, and this is none: nothing to compare with")
    for name, known in KNOWN_RATES.items():
        found = [record["rates"][name] for record in measured["ranks"] if name in record["rates"]]
        if found:
            yield name, min(found), known
    if len(measured["ranks"]) == 2:
        for record in measured["collectives"]:
            if (bus := KNOWN_BUS.get((record["name"], record["size_bytes"]))) is not None:
                yield f"{record['name']} {record['size_bytes'] >> 20} MiB", record["bus_gb_per_s"], bus


def too_far(rows: list[tuple[str, float, float]], tolerance: float) -> Iterator[str]:
    for name, found, known in rows:
        if abs(found / known - 1) > tolerance:
            yield f"{name}: {found:.4g}, known is {known:.4g} ({found / known - 1:+.1%})"


def complaints(document: dict[str, Any]) -> Iterator[str]:
    """What doctor must not say of healthy H200s, and what it must."""
    for finding in document["findings"]:
        if finding["id"].startswith(("measured.low", "measured.slow", "topology.no-nvlink", "topology.fewer")):
            yield f"{finding['id']}: {finding['subject']}"
    ranks, topology = len(document["measured"]["ranks"]), document.get("topology")
    if ranks > 1 and (topology is None or topology["groups"] != [list(range(ranks))]):
        yield f"topology: {topology and topology['groups']} is not one group of {ranks}"


if __name__ == "__main__":
    cut_off.run(main)
