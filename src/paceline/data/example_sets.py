"""From the ``[data]`` section to the datasets of a run on rows: reads, checks, encodes, selects, packs.

The same functions serve `paceline data inspect --task`, which shows what a run would read.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.config.data import DataConfig, DataSource
from paceline.data.bad_rows import BadRow, Tally, apply_policy
from paceline.data.build import SPLITS, Datasets, SourceReport, Split, TokenizerInfo
from paceline.data.chat_template import load_template
from paceline.data.dataset_info import Entry, read_entry
from paceline.data.documents import Encoder
from paceline.data.example_cache import Examples, FileSet, encode_files
from paceline.data.example_rows import PAIRED, ExampleRows, Selection, lay_out, select
from paceline.data.gpt_index import split_ranges
from paceline.data.mixture import Mixture, blend_order, blend_sizes, normalized
from paceline.data.record_rows import find_record_files
from paceline.data.sources import SampleSource
from paceline.data.tokenizer import Tokenizer, load_tokenizer
from paceline.errors import ConfigError, DataError

MAX_WORKERS = 16


@dataclass(frozen=True, kw_only=True)
class RowRequest:
    """What a run says of its rows beside the ``[data]`` section."""

    task: str
    """a task of `records.TASKS`"""
    seq_len: int
    """tokens of a row"""
    seed: int
    init_from: str = ""
    """a folder whose tokenizer is taken where the section names none"""
    vocab_size: int | None = None
    """of the model; None = not known, not checked"""
    global_batch_size: int = 1
    multiple: int = 1
    """what every length of a row must be a multiple of"""


def open_encoder(config: DataConfig, request: RowRequest) -> Encoder:
    """The tokenizer and the chat template of a recipe.

    Raises:
        DataError: there is no tokenizer, or it has more ids than the model. A missing template is an error only where
            data have turns.
    """
    name = config.tokenizer or request.init_from
    if not name:
        raise DataError(
            "no tokenizer is named for these data",
            evidence="Rows of text become tokens by one: data.tokenizer, or that of the folder model.init_from.",
            next_step="Set data.tokenizer to a tokenizer.json, the folder that holds it, or `byte`.",
        )
    tokenizer = load_tokenizer(name)
    _check_vocabulary(tokenizer, request.vocab_size)
    try:
        template = load_template(config.template, tokenizer)
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


def open_rows(sources: Sequence[DataSource], encoder: Encoder, config: DataConfig, seed: int) -> OpenedRows:
    """Reads and encodes, or takes it from the cache. Bad rows are refused or counted as `data.bad_rows` says.

    Raises:
        DataError: nothing to read, or rows that cannot be used.
    """
    entries = [_entry(source.path) for source in sources]
    sets = [_file_set(entry, source.path) for entry, source in zip(entries, sources, strict=True)]
    folder = Path(config.cache_dir) if config.cache_dir else Path(sets[0].files[0].path).parent / "cache"
    examples = encode_files(sets, encoder, folder=folder, workers=_workers())
    apply_policy(examples.tally, config.bad_rows, ", ".join(source.path for source in sources))
    check_columns(examples)
    members, first = [], 0
    for number, (entry, group) in enumerate(zip(entries, sets, strict=True)):
        mine = np.flatnonzero((examples.files >= first) & (examples.files < first + len(group.files)))
        first += len(group.files)
        wanted = entry.num_samples if entry else None
        members.append(mine if wanted is None else _drawn(mine, wanted, (seed, number)))
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


# ---- selecting


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A selection that fits rows, and what that took."""

    selection: Selection
    too_long: Tally
    """examples longer than a row"""
    policy: str


def fit(selection: Selection, seq_len: int, policy: str, *, what: str = "the data") -> Fitted:
    """Refuses, cuts or leaves out what is longer than a row of ``seq_len`` tokens.

    A pair must fit into one row, a judged answer twice (with its mismatched one): they are cut at the end of their
    answers. One of which no answer would be left is left out.

    Raises:
        DataError: an example is too long and the policy is ``refuse``, or nothing is left.
    """
    sizes = selection.sizes
    tally = Tally(rows=len(sizes))
    kept = np.ones(len(sizes), dtype=bool)
    lengths = selection.lengths.copy()
    for member in np.flatnonzero(sizes > seq_len).tolist():
        path, line = selection.examples.place(int(selection.members[member]))
        detail = f"{sizes[member]:,} tokens{_counted(selection.task)}, a row has {seq_len:,}"
        kept[member] = False
        if policy == "truncate":
            lengths[member] = _cut(lengths[member], seq_len, selection.task)
            kept[member] = _has_answer(selection, member, lengths[member])
            detail += "; cut" if kept[member] else "; left out, its answer begins beyond"
        tally.add(BadRow(path=path, line=line, kind="longer than a row", detail=detail))
    if policy == "refuse":
        apply_policy(tally, "refuse", what)
    if not kept.any():
        raise DataError(
            f"{what}: no example fits into train.seq_len = {seq_len:,}",
            evidence=tally.listing(3) or "There are none.",
            next_step="Raise train.seq_len.",
        )
    chosen = Selection(
        examples=selection.examples, members=selection.members[kept], lengths=lengths[kept], task=selection.task
    )
    return Fitted(selection=chosen, too_long=tally, policy=policy)


def _counted(task: str) -> str:
    return " with its mismatched answer" if task == "kto" else " of both answers" if task in PAIRED else ""


def _cut(lengths: NDArray[np.int64], seq_len: int, task: str) -> NDArray[np.int64]:
    if task == "kto":
        return np.minimum(lengths, seq_len // 2)
    if len(lengths) == 1:
        return np.minimum(lengths, seq_len)
    half = seq_len // 2
    shorter = min(int(lengths.min()), half)
    return np.minimum(lengths, max(half, seq_len - shorter))


def _has_answer(selection: Selection, member: int, lengths: NDArray[np.int64]) -> bool:
    width = selection.examples.width
    first = int(selection.members[member]) * width
    return all(selection.examples.document(first + which).answer_start < lengths[which] for which in range(width))


# ---- the datasets of a run


def build_row_datasets(config: DataConfig, request: RowRequest, *, train_samples: int) -> Datasets:
    """Opens, encodes and checks everything before the first step.

    Args:
        train_samples: rows of the whole run; they are repeated as often as needed.
    Raises:
        DataError: rows cannot be used, do not fit, or have no tokenizer or template.
        ConfigError: options that do not go together, or more epochs than `data.epochs`.
    """
    encoder = open_encoder(config, request)
    builder = _Builder(config, request, encoder)
    train = _sources(config.train)
    if config.split:
        if config.valid or config.test:
            raise DataError(
                f"data.split = {config.split!r} and data.valid or data.test are both set",
                evidence="Both say where the held-out data come from.",
                next_step="Keep one of them.",
            )
        opened = builder.open(train)
        parts: dict[str, tuple[OpenedRows, int | None]] = {name: (opened, i) for i, name in enumerate(SPLITS)}
    else:
        named = {"train": train, "valid": _sources(config.valid), "test": _sources(config.test)}
        parts = {name: (builder.open(sources), None) for name, sources in named.items() if sources}
    splits = {name: builder.split(name, opened, part, train_samples) for name, (opened, part) in parts.items()}
    found = splits["train"]
    if found is None:
        raise DataError(
            f"data.split = {config.split!r} leaves nothing to train on",
            next_step="Give the first number, train, a larger share.",
        )
    tokenizer = encoder.tokenizer
    info = TokenizerInfo(
        name=tokenizer.name,
        fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
    )
    return Datasets(train=found, valid=splits.get("valid"), test=splits.get("test"), tokenizer_info=info)


def _sources(value: str | Sequence[DataSource]) -> tuple[DataSource, ...]:
    if isinstance(value, str):
        return (DataSource(path=value),) if value else ()
    return tuple(value)


@dataclass(frozen=True)
class _Builder:
    config: DataConfig
    request: RowRequest
    encoder: Encoder

    def open(self, sources: tuple[DataSource, ...]) -> OpenedRows:
        return open_rows(sources, self.encoder, self.config, self.request.seed)

    def split(self, name: str, opened: OpenedRows, part: int | None, train_samples: int) -> Split | None:
        """``part``: which of `data.split`; None = all. None where that leaves no example."""
        members = [self._part(of_source, part) for of_source in opened.members]
        weights = [source.weight for source in opened.sources]
        if not sum(map(len, members)):
            return None
        samples = train_samples if name == "train" else None
        if samples is None or len(set(weights)) == 1:
            made = self._rows(name, opened, np.concatenate(members), samples, weight=1.0)
            sources, reports = [made[0]], [made[1]]
            data: SampleSource = made[0]
        else:
            data, sources, reports = self._blend(name, opened, members, weights, samples)
        if name == "train":
            self._check_epochs(sources, samples or 0)
        return Split(
            source=data,
            identity=self._identity(opened, name, part),
            reports=tuple(reports),
            bytes_per_token=None,
        )

    def _part(self, members: NDArray[np.int64], part: int | None) -> NDArray[np.int64]:
        if part is None or not len(members):
            return members
        order = np.random.default_rng((self.request.seed, 1)).permutation(members)
        cut = split_ranges(self.config.split, len(members))[part]
        return np.sort(order[cut.start : cut.stop])

    def _rows(
        self, name: str, opened: OpenedRows, members: NDArray[np.int64], samples: int | None, weight: float
    ) -> tuple[ExampleRows, SourceReport]:
        config, request = self.config, self.request
        what = f"{name} data {', '.join(source.path for source in opened.sources)}"
        fitted = fit(select(opened.examples, members, request.task), request.seq_len, config.too_long, what=what)
        selection = fitted.selection
        if request.task == "kto" and len(selection.members) < 2:
            raise DataError(
                f"{what}: one example is not enough for kto",
                evidence="Its divergence from the reference is judged by the answers of other examples.",
                next_step="Add data.",
            )
        rows = lay_out(selection, request.seq_len, config.packing, request.seed)
        source = ExampleRows(
            selection,
            rows,
            seq_len=request.seq_len,
            seed=request.seed,
            num_samples=samples,
            bucket_of=request.global_batch_size if config.packing == "buckets" else 0,
            multiple=request.multiple,
        )
        tokens = int(selection.lengths.sum())
        report = SourceReport(
            split=name,
            path=", ".join(source.path for source in opened.sources),
            weight=weight,
            documents=len(selection.members) * selection.examples.width,
            tokens=tokens,
            samples=len(source),
            epochs=len(source) / source.rows_an_epoch,
            note=_note(fitted, source, opened.examples.tally),
        )
        return source, report

    def _blend(
        self,
        name: str,
        opened: OpenedRows,
        members: list[NDArray[np.int64]],
        weights: list[float],
        samples: int,
    ) -> tuple[SampleSource, list[ExampleRows], list[SourceReport]]:
        """Rows of each source alone, drawn by weight."""
        if self.config.packing == "buckets":
            raise ConfigError(
                "data.packing = 'buckets' with sources of different weights",
                evidence="A bucket's batch has rows of one length; a blend draws rows one by one.",
                next_step="Set data.packing = 'pack', or give all sources the same weight.",
            )
        shares = normalized(weights)
        length, _ = blend_sizes(shares, samples)
        ids, places = blend_order(shares, length)
        drawn = np.bincount(ids, minlength=len(weights)).tolist()
        sources, reports = [], []
        for number, source in enumerate(opened.sources):
            alone = OpenedRows(sources=(source,), examples=opened.examples, members=(members[number],))
            made, report = self._rows(name, alone, members[number], max(1, drawn[number]), shares[number])
            sources.append(made)
            reports.append(report)
        widest = max(source.num_documents for source in sources)
        for made in sources:
            made.num_documents = widest
        return Mixture(sources, ids, places), sources, reports

    def _check_epochs(self, sources: list[ExampleRows], samples: int) -> None:
        epochs, batch = self.config.epochs, self.request.global_batch_size
        if not epochs or len(sources) > 1:
            return
        rows = sources[0].rows_an_epoch
        fitting = math.ceil(epochs * rows / batch)
        if samples > fitting * batch:
            raise ConfigError(
                f"train.steps asks for {samples / rows:.3g} epochs, data.epochs = {epochs:g}",
                evidence=f"An epoch has {rows:,} rows; a step takes train.global_batch_size = {batch:,}.",
                next_step=f"Set train.steps = {fitting:,}".replace(",", "") + ".",
            )

    def _identity(self, opened: OpenedRows, name: str, part: int | None) -> str:
        """Hash of all that decides which row comes when; not the length of the run."""
        config, request = self.config, self.request
        content = {
            "examples": opened.examples.identity,
            "drawn": [hashlib.sha256(members.tobytes()).hexdigest() for members in opened.members],
            "weights": [source.weight for source in opened.sources],
            "split": [config.split, part, name],
            "seq_len": request.seq_len,
            "task": request.task,
            "seed": request.seed,
            "options": [config.packing, config.too_long],
            "batch": [request.global_batch_size, request.multiple] if config.packing == "buckets" else [],
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _note(fitted: Fitted, source: ExampleRows, tally: Tally) -> str:
    full = int(fitted.selection.sizes.sum()) / source.tokens_an_epoch
    parts = [f"{len(fitted.selection.members):,} examples in {len(source.rows):,} rows, {full:.1%} full"]
    if tally.bad:
        parts.append(f"skipped: {tally.summary()}")
    if fitted.too_long.bad:
        verb = {"truncate": "cut", "drop": "left out"}[fitted.policy]
        parts.append(f"{fitted.too_long.bad:,} examples longer than a row {verb}")
    return "; ".join(parts)
