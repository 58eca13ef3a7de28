"""What does the model say at the end of its training?"""

from __future__ import annotations

import shutil
from pathlib import Path

from paceline.data.build import TokenizerInfo
from paceline.training.setup import Parts


def keep_tokenizer(folder: Path, info: TokenizerInfo) -> None:
    """Copies the tokenizer's file into the run folder, so that the run can speak wherever it is moved."""
    source = Path(info.name)
    if not info.name or not source.is_file():
        return
    target = folder / "tokenizer" / source.name
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f"{target.name}.part")
    shutil.copyfile(source, beside)
    beside.replace(target)


def draw_samples(parts: Parts, info: TokenizerInfo) -> tuple[tuple[str, str], ...]:
    """(prompt, continuation) for each of `observe.sample_prompts`."""
    raise AssertionError
