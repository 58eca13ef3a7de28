"""What would a run read of these rows? Counts, lengths, how full rows get, and single examples as they are learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from paceline.config.data import DataConfig, DataSource
from paceline.data.bad_rows import Tally
from paceline.data.documents import Document, Encoder
from paceline.data.example_cache import Examples
from paceline.data.example_files import OpenedRows, RowRequest, open_encoder, open_rows
from paceline.data.example_fit import fit
from paceline.data.example_rows import PAIRED, ExampleRows, lay_out, select
from paceline.data.tokenizer import Tokenizer

PERCENTILES = (0, 5, 25, 50, 75, 95, 99, 100)
BINS = 12


class Stretch(NamedTuple):
    """Tokens next to each other that are all learned, or all not."""

    text: str
    learned: bool
    tokens: int


@dataclass(frozen=True, kw_only=True)
class ShownDocument:
    name: str
    """``conversation``, ``chosen``, ``rejected``, ``desirable`` or ``undesirable``"""
    stretches: tuple[Stretch, ...]


@dataclass(frozen=True, kw_only=True)
class ShownExample:
    number: int
    path: str
    line: int
    documents: tuple[ShownDocument, ...]


@dataclass(frozen=True, kw_only=True)
class RowReport:
    """All of it, for a terminal or as JSON."""

    sources: tuple[str, ...]
    task: str
    template: str
    tokenizer: str
    loose_markers: tuple[str, ...]
    """markers of the template that are no tokens of this tokenizer"""
    tally: Tally
    examples: int
    documents: int
    tokens: int
    learned: int
    """tokens with a loss"""
    lengths: Mapping[int, int]
    """percentile -> tokens of a document"""
    histogram: tuple[tuple[int, int, int], ...]
    """(from, to, documents) by tokens, both ends included"""
    seq_len: int
    too_long: int
    """examples longer than a sequence, left out of what follows"""
    rows: int
    fullness: float
    """share of the rows' tokens that is not padding"""
    most: int
    """examples in the fullest row"""
    shown: tuple[ShownExample, ...]

    def as_json(self) -> dict[str, Any]:
        content = {name: value for name, value in vars(self).items() if name not in ("tally", "shown")}
        return {
            **content,
            "bad_rows": self.tally.as_json(),
            "histogram": [{"from": low, "to": high, "documents": count} for low, high, count in self.histogram],
            "shown": [
                {
                    "example": example.number,
                    "path": example.path,
                    "line": example.line,
                    "documents": [
                        {"name": document.name, "stretches": [stretch._asdict() for stretch in document.stretches]}
                        for document in example.documents
                    ],
                }
                for example in self.shown
            ],
        }


def report_rows(
    config: DataConfig, request: RowRequest, sources: Sequence[str], *, samples: int = 1, example: int = -1
) -> RowReport:
    """Reads and encodes the sources as a run would; bad and too long ones are counted instead of refused.

    Args:
        samples: examples to show, spread evenly.
        example: show this one instead, from 0; negative = none in particular.
    Raises:
        DataError: nothing can be read, there is no such example, or the template has no place for the data.
    """
    encoder = open_encoder(config, request)
    lenient = config.model_copy(update={"bad_rows": "skip"})
    opened = open_rows([DataSource(path=path) for path in sources], encoder, lenient, request)
    members = np.concatenate(opened.members)
    selection = select(opened.examples, members, request.task)
    fitted = fit(selection, request.seq_len, "truncate" if config.too_long == "truncate" else "drop")
    packed = ExampleRows(
        fitted.selection,
        lay_out(fitted.selection, request.seq_len, config.packing, request.seed),
        seq_len=request.seq_len,
        seed=request.seed,
        num_samples=1,
        bucket_of=request.global_batch_size if config.packing == "buckets" else 0,
        multiple=request.multiple,
    )
    examples = opened.examples
    return RowReport(
        sources=tuple(sources),
        task=request.task,
        template="" if isinstance(encoder.template, Exception) else encoder.template.name,
        tokenizer=encoder.tokenizer.name,
        loose_markers=encoder.loose_markers,
        tally=examples.tally,
        examples=len(members),
        documents=int(selection.lengths.size),
        tokens=int(selection.lengths.sum()),
        learned=int(np.count_nonzero(examples.trained)),
        lengths={p: int(np.percentile(selection.lengths, p, method="lower")) for p in PERCENTILES},
        histogram=_histogram(selection.lengths.ravel()),
        seq_len=request.seq_len,
        too_long=fitted.too_long.bad,
        rows=len(packed.rows),
        fullness=int(fitted.selection.sizes.sum()) / packed.tokens_an_epoch,
        most=packed.rows.most,
        shown=_shown(opened, encoder, samples, example),
    )


def _histogram(lengths: np.ndarray) -> tuple[tuple[int, int, int], ...]:
    """Bins of equal width, a round number of tokens."""
    longest = int(lengths.max(initial=1))
    width = next(size for size in _round_numbers() if size * BINS >= longest)
    counts = np.bincount((lengths - 1).clip(min=0) // width)
    first = int(np.flatnonzero(counts)[0])
    return tuple((i * width + 1, (i + 1) * width, int(counts[i])) for i in range(first, len(counts)))


def _round_numbers() -> Sequence[int]:
    return [step * 10**power for power in range(9) for step in (1, 2, 5)]


def _shown(opened: OpenedRows, encoder: Encoder, samples: int, example: int) -> tuple[ShownExample, ...]:
    examples = opened.examples
    count = min(samples, len(examples))
    numbers = [example] if example >= 0 else [i * len(examples) // count for i in range(count)]
    return tuple(_show(examples, number, encoder) for number in numbers if number < len(examples))


def _show(examples: Examples, number: int, encoder: Encoder) -> ShownExample:
    path, line = examples.place(number)
    documents = tuple(
        ShownDocument(
            name=_name(examples, number, which, encoder.task),
            stretches=stretches(examples.document(number * examples.width + which), encoder.tokenizer),
        )
        for which in range(examples.width)
    )
    return ShownExample(number=number, path=path, line=line, documents=documents)


def _name(examples: Examples, number: int, which: int, task: str) -> str:
    if task in PAIRED:
        return ("chosen", "rejected")[which]
    if task == "kto":
        return "desirable" if examples.desirable[number] == 1 else "undesirable"
    return "conversation"


def stretches(document: Document, tokenizer: Tokenizer) -> tuple[Stretch, ...]:
    """The text of a document, parted where learning begins and ends."""
    edges = np.flatnonzero(np.diff(document.trained)) + 1
    bounds = [0, *edges.tolist(), len(document.ids)]
    return tuple(
        Stretch(tokenizer.decode(document.ids[start:end]), bool(document.trained[start]), end - start)
        for start, end in pairwise(bounds)
    )
