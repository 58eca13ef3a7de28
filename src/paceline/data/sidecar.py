"""What a dataset was made of, written beside it as ``PREFIX.json``.

Megatron's format has no place for it; datasets without this file still work, with fewer checks.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.data.atomic import write_text
from paceline.data.indexed import dataset_prefix
from paceline.errors import DataError

FORMAT = "paceline-dataset-1"


@dataclass(frozen=True, kw_only=True)
class Sidecar:
    """Facts of one dataset."""

    tokenizer: str
    """path of the tokenizer, or "byte" """
    tokenizer_fingerprint: str
    """sha256 of the tokenizer's file"""
    vocab_size: int
    eod_id: int
    eod_appended: bool
    """whether each document ends with the end-of-document token"""
    documents: int
    tokens: int
    text_bytes: int
    """UTF-8 bytes of the source text, for bits per byte"""

    @property
    def bytes_per_token(self) -> float:
        return self.text_bytes / self.tokens


def sidecar_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.json")


def write_sidecar(prefix: str | Path, sidecar: Sidecar) -> None:
    write_text(sidecar_path(prefix), json.dumps({"format": FORMAT, **asdict(sidecar)}, indent=2) + "\n")


def read_sidecar(prefix: str | Path) -> Sidecar | None:
    """None where there is no such file.

    Raises:
        DataError: it is there but is not ours or is damaged.
    """
    path = sidecar_path(dataset_prefix(prefix))
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            raise ValueError(f'no "format": "{FORMAT}" in it')
        return Sidecar(**content)
    except (OSError, ValueError, TypeError) as error:
        raise DataError(
            f"{path}: not a description of a dataset",
            evidence=str(error),
            next_step="Move it away to use the dataset without these checks, or build the dataset again.",
        ) from error
