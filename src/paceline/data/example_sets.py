"""From the ``[data]`` section to the datasets of a run on rows: opens, selects, splits, packs and blends."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paceline.config.data import DataConfig, DataSource
from paceline.data.bad_rows import Tally
from paceline.data.build import SPLITS, Datasets, SourceReport, Split, TokenizerInfo
from paceline.data.documents import Encoder
from paceline.data.example_files import OpenedRows, RowRequest, open_encoder, open_rows
from paceline.data.example_fit import Fitted, fit
from paceline.data.example_rows import ExampleRows, bucket_size, lay_out, select
from paceline.data.example_split import split_members
from paceline.data.mixture import Mixture, blend_order, blend_sizes, normalized
from paceline.data.sources import SampleSource
from paceline.errors import ConfigError, DataError

ROUNDING = 1e-9
"""What shares of a blend, which are not exact, may miss of a whole step."""


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
        cut = split_members(opened.examples, opened.members, config.split, request.seed)
        parts = {name: replace(opened, members=members) for name, members in zip(SPLITS, cut, strict=True)}
    else:
        named = {"train": train, "valid": _sources(config.valid), "test": _sources(config.test)}
        parts = {name: builder.open(sources) for name, sources in named.items() if sources}
    splits = {name: builder.split(name, opened, train_samples) for name, opened in parts.items()}
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
    return Datasets(
        train=found,
        valid=splits.get("valid"),
        test=splits.get("test"),
        tokenizer_info=info,
        warnings=tuple(_loose_markers(encoder, config.template)),
    )


def _loose_markers(encoder: Encoder, template: str) -> Iterator[str]:
    """A template of another family than the tokenizer's: its markers are learned as the text that they are."""
    loose = encoder.loose_markers
    if loose:
        what = "are no tokens" if len(loose) > 1 else "is no token"
        yield (
            f"data.template = {template!r}: {', '.join(loose)} {what} of "
            f"tokenizer {encoder.tokenizer.name}: a model learns them as text, of several tokens each. Set "
            "data.template to that of the tokenizer's family (empty = its own, where it has one; alpaca, vicuna and "
            "zephyr are plain text), or data.tokenizer to one that has these tokens."
        )


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
        return open_rows(sources, self.encoder, self.config, self.request)

    def split(self, name: str, opened: OpenedRows, train_samples: int) -> Split | None:
        """None where there is no example."""
        members = list(opened.members)
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
            self._check_epochs(sources, reports, samples or 0)
        return Split(
            source=data,
            identity=self._identity(opened, name),
            reports=tuple(reports),
            bytes_per_token=None,
        )

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
                evidence="A bucket's batch has sequences of one length; a blend draws them one by one.",
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

    def _check_epochs(self, sources: list[ExampleRows], reports: list[SourceReport], samples: int) -> None:
        """Of a blend, the source that is read most often counts."""
        epochs, batch = self.config.epochs, self.request.global_batch_size
        if not epochs:
            return
        # samples of the whole run in an epoch of each source
        spans = [source.rows_an_epoch / report.weight for source, report in zip(sources, reports, strict=True)]
        most = min(range(len(spans)), key=spans.__getitem__)
        fitting = max(1, math.ceil(epochs * spans[most] / batch - ROUNDING))
        if samples <= fitting * batch:
            return
        blended = len(sources) > 1
        of = f" of {reports[most].path}" if blended else ""
        share = f", {reports[most].weight:.1%} of them from it" if blended else ""
        read = fitting * batch / spans[most]
        whole = f": steps are whole, so this reads {read:.3g} epochs" if read > epochs * (1 + ROUNDING) else ""
        raise ConfigError(
            f"train.steps asks for {samples / spans[most]:.3g} epochs{of}, data.epochs = {epochs:g}",
            evidence=f"An epoch{of} has {sources[most].rows_an_epoch:,} sequences; a step takes "
            f"train.global_batch_size = {batch:,}{share}.",
            next_step=f"Set train.steps = {fitting}{whole}.",
        )

    def _identity(self, opened: OpenedRows, name: str) -> str:
        """Hash of all that decides which row comes when; not the length of the run."""
        config, request = self.config, self.request
        content = {
            "examples": opened.examples.identity,
            "drawn": [hashlib.sha256(members.tobytes()).hexdigest() for members in opened.members],
            "weights": [source.weight for source in opened.sources],
            "split": [config.split, SPLITS.index(name) if config.split else None, name],
            "seq_len": request.seq_len,
            "task": request.task,
            "seed": request.seed,
            "options": [config.packing, config.too_long],
            "buckets": [request.global_batch_size, bucket_size(request.seq_len, request.multiple)]
            if config.packing == "buckets"
            else [],
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _note(fitted: Fitted, source: ExampleRows, tally: Tally) -> str:
    full = int(fitted.selection.sizes.sum()) / source.tokens_an_epoch
    parts = [f"{len(fitted.selection.members):,} examples in {len(source.rows):,} sequences, {full:.1%} full"]
    if tally.bad:
        parts.append(f"skipped: {tally.summary()}")
    parts += fitted.told()
    lists = [found.listing() for found in (tally, fitted.too_long) if found.bad]
    return "\n  ".join(["; ".join(parts), *(line for found in lists for line in found.splitlines())])
