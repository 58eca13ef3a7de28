"""How long are the documents that share the rows of a run, and do not see each other?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from paceline.data.batch import IGNORE_INDEX
from paceline.data.sources import Sample, SampleSource

LOOKED_AT = 256
"""Samples, evenly spaced. Rows of one dataset are much alike: the mean length of 256 is near enough for a rate."""


@dataclass(frozen=True, kw_only=True)
class DocumentLengths:
    counts: Mapping[int, int]
    """Length in tokens -> documents. What fills a row up is none."""
    tokens: int
    """Of the rows that were looked at, with what fills them up."""


def document_lengths(source: SampleSource) -> DocumentLengths | None:
    """Of some samples of a run; None where attention sees whole rows."""
    if not len(source) or source[0].documents is None:
        return None
    counts, tokens = Counter[int](), 0
    for place in np.unique(np.linspace(0, len(source) - 1, LOOKED_AT).astype(np.int64)).tolist():
        sample = source[place]
        counts.update(_lengths(sample))
        tokens += len(sample.tokens)
    return DocumentLengths(counts=counts, tokens=tokens)


def _lengths(sample: Sample) -> list[int]:
    assert sample.documents is not None, "rows of one source agree on documents"
    documents, lengths = np.unique(sample.documents, return_counts=True)
    last = sample.documents == documents[-1]
    # padding: tokens 0 that nothing is learned of
    padded = not sample.tokens[last].any() and bool((sample.labels[last] == IGNORE_INDEX).all())
    return [int(length) for length in lengths[: len(lengths) - padded]]
