"""Which examples do the sources of a recipe have? Files to encoded examples, bad rows refused or counted."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.config.data import DataConfig, DataSource
from paceline.config.run import RunConfig
from paceline.data.bad_rows import apply_policy
from paceline.data.chat_template import load_template
from paceline.data.dataset_info import Entry, read_entry
from paceline.data.documents import Encoder
from paceline.data.encode_rows import FileSet
from paceline.data.example_cache import Examples, encode_files
from paceline.data.kept_tokenizer import template_of_run
from paceline.data.record_rows import CACHE, find_record_files
from paceline.data.tokenizer import Tokenizer, load_tokenizer
from paceline.errors import DataError

MAX_WORKERS = 16


@dataclass(frozen=True, kw_only=True)
class RowRequest:
    """What a run says of its rows beside the ``[data]`` section."""

    task: str
    """a task of `records.TASKS`"""
    seq_len: int
    """tokens of a sequence"""
    seed: int
    init_from: str = ""
    """a folder whose tokenizer is taken where the section names none"""
    vocab_size: int | None = None
    """of the model; None = not known, not checked"""
    global_batch_size: int = 1
    multiple: int = 1
    """what every length of a sequence must be a multiple of"""
    keep_tokens: bool = True
    """False: write no cache; one that is there is read"""

    @classmethod
    def of(cls, config: RunConfig, *, keep_tokens: bool = True) -> RowRequest:
        """That of a recipe."""
        return cls(
            task=config.task.kind,
            seq_len=config.train.seq_len,
            seed=config.run.seed,
            init_from=config.model.init_from,
            vocab_size=config.model.vocab_size,
            global_batch_size=config.train.global_batch_size,
            multiple=2 * config.parallel.cp * config.parallel.tp,
            keep_tokens=keep_tokens,
        )


def open_encoder(config: DataConfig, request: RowRequest) -> Encoder:
    """The tokenizer and the chat template of a recipe; where a run is named, those that it used.

    Raises:
        DataError: there is no tokenizer, or it has more ids than the model. A missing template is an error only where
            data have turns.
    """
    name = config.tokenizer or request.init_from
    if not name:
        raise DataError(
            "no tokenizer is named for these data",
            evidence="Rows of text become tokens by one: data.tokenizer, or that of the folder model.init_from.",
            next_step="Set data.tokenizer to a tokenizer.json, the folder that holds it, a run, or `byte`.",
        )
    tokenizer = load_tokenizer(name)
    _check_vocabulary(tokenizer, request.vocab_size)
    try:
        template = load_template(config.template or template_of_run(Path(name)), tokenizer)
    except DataError as error:
        if config.template:
            raise
        return Encoder(tokenizer=tokenizer, template=error, task=request.task, mask=config.mask)
    return Encoder(tokenizer=tokenizer, template=template, task=request.task, mask=config.mask)


def _check_vocabulary(tokenizer: Tokenizer, vocab_size: int | None) -> None:
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"the vocabulary of {tokenizer.name}, {tokenizer.vocab_size:,}, is larger than model.vocab_size = "
            f"{vocab_size:,}",
            evidence="Ids from the upper part would have no embedding.",
            next_step=f"Set model.vocab_size to at least {tokenizer.vocab_size}, or use the model's own tokenizer.",
        )


# ---- reading


@dataclass(frozen=True, kw_only=True)
class OpenedRows:
    """The examples of some sources, and which belong to which."""

    sources: tuple[DataSource, ...]
    examples: Examples
    members: tuple[NDArray[np.int64], ...]
    """for each source the numbers of its examples; drawn where its description asks for so many"""


def open_rows(sources: Sequence[DataSource], encoder: Encoder, config: DataConfig, request: RowRequest) -> OpenedRows:
    """Reads and encodes, or takes it from the cache. Bad rows are refused or counted as `data.bad_rows` says.

    Raises:
        DataError: nothing to read, or rows that cannot be used.
    """
    entries = [_entry(source.path) for source in sources]
    sets = [_file_set(entry, source.path) for entry, source in zip(entries, sources, strict=True)]
    folder = Path(config.cache_dir) if config.cache_dir else Path(sets[0].files[0].path).parent / CACHE
    examples = encode_files(sets, encoder, folder=folder, workers=_workers(), keep=request.keep_tokens)
    apply_policy(examples.tally, config.bad_rows, ", ".join(source.path for source in sources))
    check_columns(examples)
    members, first = [], 0
    for number, (entry, group) in enumerate(zip(entries, sets, strict=True)):
        mine = np.flatnonzero((examples.files >= first) & (examples.files < first + len(group.files)))
        first += len(group.files)
        wanted = entry.num_samples if entry else None
        members.append(mine if wanted is None else _drawn(mine, wanted, (request.seed, number)))
    return OpenedRows(sources=tuple(sources), examples=examples, members=tuple(members))


def _workers() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_WORKERS)


def _entry(path: str) -> Entry | None:
    file, mark, name = path.rpartition("#")
    return read_entry(file, name) if mark else None


def _file_set(entry: Entry | None, path: str) -> FileSet:
    if entry is None:
        return FileSet(files=tuple(find_record_files([path])))
    return FileSet(files=tuple(find_record_files([entry.path])), layout=entry.layout)


def _drawn(members: NDArray[np.int64], count: int, seed: tuple[int, int]) -> NDArray[np.int64]:
    """``count`` of them: each as often as the others, the rest drawn."""
    if not len(members):
        return members
    order = np.random.default_rng(seed).permutation(members)
    return np.sort(np.resize(order, count))


def check_columns(examples: Examples) -> None:
    """Numbers beside the texts are there for all pairs or for none.

    Raises:
        DataError: names the first row without.
    """
    for name, values in (("ref_chosen_logps", examples.reference_logps), ("margin", examples.margins)):
        missing = np.isnan(values.reshape(len(values), -1)).any(axis=1)
        if missing.any() and not missing.all():
            path, line = examples.place(int(np.flatnonzero(missing)[0]))
            raise DataError(
                f"{path}:{line}: no {name}, and {int((~missing).sum()):,} other rows have it",
                evidence="It is read for all pairs or for none.",
                next_step="Add it, or take it out everywhere.",
            )
