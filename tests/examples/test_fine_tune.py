"""The fine-tuning tour ends with the same text four ways, Transformers' among them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_what_is_not_installed_is_told_before_anything_is_made(tmp_path: Path) -> None:
    bare = tmp_path / "python"  # no site-packages
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    for path, missing in ((ROOT / "src", "has no Transformers"), (tmp_path, "has no Paceline")):
        done = subprocess.run(
            ["bash", "examples/fine_tune.sh", str(tmp_path / "tour")],
            cwd=ROOT,
            env={**os.environ, "PACELINE_PYTHON": str(bare), "PYTHONPATH": str(path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 1 and missing in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "tour").exists()


@pytest.mark.slow
def test_the_tour_runs_and_its_answers_agree(tmp_path: Path) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PACELINE_PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", "examples/fine_tune.sh", str(tmp_path / "tour")],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    answers = done.stdout.partition("== 6.")[2].strip().splitlines()[1:]
    assert len(answers) == 4
    # learned, not only alike: the base writes noise
    assert [line for line in answers if not line.endswith("The capital of Japan is Tokyo.")] == []
    assert "before: " in done.stdout and "before: The capital" not in done.stdout
    merged = tmp_path / "tour" / "merged"
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= {
        file.name for file in merged.iterdir()
    }
