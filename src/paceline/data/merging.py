"""Merges datasets together with their descriptions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from paceline.data.indexed import IndexedDataset, dataset_prefix
from paceline.data.indexed_writer import merge
from paceline.data.sidecar import Sidecar, read_sidecar, sidecar_path, write_sidecar
from paceline.errors import DataError


def merge_datasets(prefixes: Sequence[str], output: str | Path, *, widen: bool = False) -> IndexedDataset:
    """As `merge`; refuses descriptions that disagree. The result is described if all of the parts are.

    Raises:
        DataError: different tokenizers, and what `merge` raises.
    """
    sidecars = {prefix: read_sidecar(prefix) for prefix in prefixes}
    known = {prefix: sidecar for prefix, sidecar in sidecars.items() if sidecar is not None}
    _check_same_tokenizer(known)
    output = dataset_prefix(output)
    merged = merge(prefixes, output, widen=widen)
    if len(known) < len(sidecars):
        sidecar_path(output).unlink(missing_ok=True)
        return merged
    parts = [known[prefix] for prefix in prefixes]
    total = replace(
        parts[0],
        documents=merged.num_documents,
        tokens=merged.num_tokens,
        text_bytes=sum(part.text_bytes for part in parts),
    )
    write_sidecar(output, total)
    return merged


def _check_same_tokenizer(known: dict[str, Sidecar]) -> None:
    for first, other in pairwise(known):
        a, b = known[first], known[other]
        if (a.tokenizer_fingerprint, a.eod_id, a.eod_appended) != (b.tokenizer_fingerprint, b.eod_id, b.eod_appended):
            raise DataError(
                f"{first} and {other} were made with different tokenizers",
                evidence=f"{a.tokenizer} (sha256 {a.tokenizer_fingerprint[:12]}, end of document {a.eod_id}, "
                f"appended: {a.eod_appended}) and {b.tokenizer} (sha256 {b.tokenizer_fingerprint[:12]}, "
                f"{b.eod_id}, appended: {b.eod_appended}).",
                next_step="Build both with one tokenizer and the same options.",
            )
