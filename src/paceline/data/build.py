"""From the ``[data]`` section to the datasets of a run: opens, checks, splits, blends and caches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.config.data import DataConfig, DataSource
from paceline.data.gpt_index import GPTIndex, build_index, plan_epochs, split_ranges
from paceline.data.index_cache import cached_arrays
from paceline.data.indexed import IndexedDataset
from paceline.data.mixture import Mixture, blend_order, blend_sizes, exhaustive_order, normalized
from paceline.data.sidecar import Sidecar, read_sidecar
from paceline.data.sources import GPTDataset, Sample, SampleSource, SyntheticDataset
from paceline.data.tokenizer import load_tokenizer
from paceline.errors import DataError

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True, kw_only=True)
class TokenizerInfo:
    """What is known of the tokenizer that made the datasets; all of it may be unknown for datasets of other tools."""

    name: str = ""
    """what `load_tokenizer` takes; empty = unknown"""
    fingerprint: str = ""
    vocab_size: int | None = None
    eod_id: int | None = None


@dataclass(frozen=True, kw_only=True)
class SourceReport:
    """One dataset of one split, in numbers."""

    split: str
    path: str
    weight: float
    """share of the samples, 1 where there is one dataset"""
    documents: int
    tokens: int
    """tokens of one epoch of this split"""
    samples: int
    """samples that the split draws from it"""
    epochs: float
    """how often its tokens are read for that many samples"""
    note: str = ""
    """what else is to be known"""

    def __str__(self) -> str:
        return (
            f"{self.split}: {self.path}: {self.documents:,} documents, {self.tokens:,} tokens, "
            f"{self.samples:,} samples = {self.epochs:.3g} epochs (weight {self.weight:.4g})"
            + (f"; {self.note}" if self.note else "")
        )


@dataclass(frozen=True, kw_only=True)
class Split:
    """The samples of one split, in the order in which they are read."""

    source: SampleSource
    identity: str
    """Hash of all that decides the order: two runs with the same identity read the same samples in the same order."""
    reports: tuple[SourceReport, ...]
    bytes_per_token: float | None
    """UTF-8 bytes of source text per token, for bits per byte = loss / ln 2 / bytes_per_token; None = not recorded"""

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, i: int) -> Sample:
        return self.source[i]


@dataclass(frozen=True, kw_only=True)
class Datasets:
    train: Split
    valid: Split | None
    test: Split | None
    tokenizer_info: TokenizerInfo
    warnings: tuple[str, ...] = ()
    """What a run should say aloud before it learns from these data, each with its next step."""

    @property
    def reports(self) -> tuple[SourceReport, ...]:
        """Documents, tokens, samples and epochs of every dataset of every split."""
        return tuple(r for split in (self.train, self.valid, self.test) if split is not None for r in split.reports)


def build_datasets(
    config: DataConfig,
    *,
    seq_len: int,
    vocab_size: int,
    seed: int,
    train_samples: int,
    valid_samples: int | None = None,
    test_samples: int | None = None,
) -> Datasets:
    """Opens and checks everything before the first step.

    Args:
        train_samples: samples of the whole run; the dataset repeats as often as needed.
        valid_samples: samples to draw for evaluation (it repeats too); None = every token of the held-out data exactly
            once, the last sample padded. The same for ``test_samples``.
    Raises:
        DataError: files are missing or damaged, a sequence is longer than a dataset, ids do not fit the vocabulary, the
            datasets were made by different tokenizers.
    """
    plan = _plan_splits(config)
    opened = {path: IndexedDataset(path) for _, sources, _ in plan for path in (source.path for source in sources)}
    sidecars = {path: read_sidecar(path) for path in opened}
    info = _check_tokenizers(config, sidecars, vocab_size)
    samples = dict(zip(SPLITS, (train_samples, valid_samples, test_samples), strict=True))
    builder = _Builder(config, opened, sidecars, info, seq_len, vocab_size, seed)
    splits = {name: builder.split(name, sources, samples[name], part) for name, sources, part in plan}
    if config.is_synthetic:
        splits["train"] = _synthetic("train", seq_len, vocab_size, seed, train_samples)
        if "valid" not in splits and valid_samples:
            splits["valid"] = _synthetic("valid", seq_len, vocab_size, seed + 1, valid_samples)
    train = splits.get("train")
    if train is None:
        raise DataError(
            f"data.split = {config.split!r} leaves nothing to train on",
            next_step="Give the first number, train, a larger share.",
        )
    return Datasets(train=train, valid=splits.get("valid"), test=splits.get("test"), tokenizer_info=info)


def _plan_splits(config: DataConfig) -> list[tuple[str, tuple[DataSource, ...], str]]:
    """(split, its sources, the split string that cuts it from them, or "")."""
    train = () if config.is_synthetic else _sources(config.train)
    if not train and not config.is_synthetic:
        raise DataError(
            "data.train is empty",
            evidence="It names the data to train on.",
            next_step='Name a dataset by its prefix, or write data.train = "synthetic" for made-up tokens.',
        )
    if config.split and train:
        if config.valid or config.test:
            raise DataError(
                f"data.split = {config.split!r} and data.valid or data.test are both set",
                evidence="Both say where the held-out data come from.",
                next_step="Keep one of them.",
            )
        return [(name, train, config.split) for name in SPLITS]
    plan = [("train", train, ""), ("valid", _sources(config.valid), ""), ("test", _sources(config.test), "")]
    return [entry for entry in plan if entry[1]]


def _sources(value: str | Sequence[DataSource]) -> tuple[DataSource, ...]:
    if isinstance(value, str):
        return (DataSource(path=value),) if value else ()
    return tuple(value)


def _check_tokenizers(config: DataConfig, sidecars: dict[str, Sidecar | None], vocab_size: int) -> TokenizerInfo:
    """All datasets must come from one tokenizer, which must fit the model and the one named in the recipe."""
    known = {path: sidecar for path, sidecar in sidecars.items() if sidecar is not None}
    info = TokenizerInfo()
    first = ""
    if config.tokenizer:
        tokenizer = load_tokenizer(config.tokenizer)
        first = f"data.tokenizer = {config.tokenizer}"
        info = TokenizerInfo(
            name=tokenizer.name,
            fingerprint=tokenizer.fingerprint,
            vocab_size=tokenizer.vocab_size,
            eod_id=tokenizer.eod_id,
        )
    for path, sidecar in known.items():
        if info.fingerprint and sidecar.tokenizer_fingerprint != info.fingerprint:
            raise DataError(
                f"{path} was made with another tokenizer than {first}",
                evidence=f"It was {sidecar.tokenizer} (sha256 {sidecar.tokenizer_fingerprint[:12]}, vocabulary "
                f"{sidecar.vocab_size:,}); the other has sha256 {info.fingerprint[:12]}, "
                f"vocabulary {info.vocab_size:,}.",
                next_step="Build it again with the right tokenizer, or correct data.tokenizer.",
            )
        if not first:
            first = path
            info = TokenizerInfo(
                name=sidecar.tokenizer,
                fingerprint=sidecar.tokenizer_fingerprint,
                vocab_size=sidecar.vocab_size,
                eod_id=sidecar.eod_id,
            )
        elif info.eod_id != sidecar.eod_id:
            # one tokenizer file may name several candidates; what the dataset was built with decides
            info = TokenizerInfo(
                name=info.name, fingerprint=info.fingerprint, vocab_size=info.vocab_size, eod_id=sidecar.eod_id
            )
    if info.vocab_size is not None and info.vocab_size > vocab_size:
        raise DataError(
            f"the vocabulary of {first}, {info.vocab_size:,}, is larger than model.vocab_size = {vocab_size:,}",
            evidence="Ids from the upper part would have no embedding.",
            next_step=f"Set model.vocab_size to at least {info.vocab_size}, or use the model's own tokenizer.",
        )
    return info


@dataclass(frozen=True)
class _Part:
    """The sequences of one dataset that belong to one split."""

    source: DataSource
    dataset: IndexedDataset
    sidecar: Sidecar | None
    sequences: range

    @property
    def tokens(self) -> int:
        return int(np.sum(self.dataset.lengths[self.sequences.start : self.sequences.stop], dtype=np.int64))


@dataclass(frozen=True)
class _Builder:
    """Builds one split after the other from what was opened."""

    config: DataConfig
    opened: dict[str, IndexedDataset]
    sidecars: dict[str, Sidecar | None]
    info: TokenizerInfo
    seq_len: int
    vocab_size: int
    seed: int

    def split(self, name: str, sources: tuple[DataSource, ...], samples: int | None, cut: str) -> Split | None:
        """``cut`` is the split string that this split is cut by, or "". None where that leaves it no documents."""
        parts = []
        for source in sources:
            dataset = self.opened[source.path]
            sequences = split_ranges(cut, len(dataset))[SPLITS.index(name)] if cut else range(len(dataset))
            if len(sequences):
                parts.append(_Part(source, dataset, self.sidecars[source.path], sequences))
        if not parts:
            return None
        weights = normalized([part.source.weight for part in parts])
        data, requested, drawn = self._blend(name, parts, weights, samples)
        return Split(
            source=data,
            identity=self._identity(parts, weights, requested),
            reports=tuple(
                SourceReport(
                    split=name,
                    path=part.source.path,
                    weight=weight,
                    documents=len(part.sequences),
                    tokens=part.tokens,
                    samples=count,
                    epochs=count * self.seq_len / part.tokens,
                )
                for part, weight, count in zip(parts, weights, drawn, strict=True)
            ),
            bytes_per_token=_bytes_per_token(parts, drawn),
        )

    def _blend(
        self, name: str, parts: list[_Part], weights: list[float], samples: int | None
    ) -> tuple[SampleSource, list[int | None], list[int]]:
        """(the samples, samples asked of each dataset, samples drawn from each)."""
        requested: list[int | None]
        if len(parts) == 1:
            data = self._dataset(name, parts[0], samples)
            return data, [samples], [len(data) if samples is None else samples]
        if samples is None:
            requested = [None] * len(parts)
            datasets = [self._dataset(name, part, None) for part in parts]
            sizes = [len(dataset) for dataset in datasets]
            return Mixture(datasets, *exhaustive_order(sizes)), requested, sizes
        length, predicted = blend_sizes(weights, samples)
        ids, places = self._blend_order(parts, weights, length)
        exact = np.bincount(ids, minlength=len(parts)).tolist()
        requested = [max(pair) for pair in zip(predicted, exact, strict=True)]
        datasets = [self._dataset(name, part, count) for part, count in zip(parts, requested, strict=True)]
        drawn = np.bincount(ids[:samples], minlength=len(parts)).tolist()
        return Mixture(datasets, ids, places), requested, drawn

    def _blend_order(self, parts: list[_Part], weights: list[float], length: int) -> tuple[np.ndarray, np.ndarray]:
        def build() -> dict[str, np.ndarray]:
            return dict(zip(_BLEND_ARRAYS, blend_order(weights, length), strict=True))

        if length < _CACHED_BLEND:
            arrays = build()
        else:
            key: dict[str, object] = {"blend": weights, "length": length}
            arrays = cached_arrays(self._cache_folder(parts[0]), key, _BLEND_ARRAYS, build, "blend")
        return arrays["source_ids"], arrays["sample_ids"]

    def _dataset(self, name: str, part: _Part, samples: int | None) -> GPTDataset:
        def build() -> dict[str, np.ndarray]:
            index = build_index(
                part.dataset.lengths,
                np.arange(part.sequences.start, part.sequences.stop, dtype=np.int32),
                seq_len=self.seq_len,
                num_samples=samples,
                seed=self.seed,
                order=self.config.order,
                drop_last=samples is not None,
            )
            return {array: getattr(index, array) for array in _INDEX_ARRAYS}

        key = self._order_key(part, samples)
        try:
            arrays = cached_arrays(
                self._cache_folder(part), key, _INDEX_ARRAYS, build, f"{Path(part.source.path).name}-{name}"
            )
        except DataError as error:
            raise DataError(
                f"{name} data {part.source.path}: {error.subject}", evidence=error.evidence, next_step=error.next_step
            ) from error
        eod_id = part.sidecar.eod_id if part.sidecar else self.info.eod_id
        return GPTDataset(
            part.dataset,
            GPTIndex(**arrays),
            seq_len=self.seq_len,
            vocab_size=self.vocab_size,
            eod_id=eod_id,
            reset_at_document_ends=self.config.reset_at_document_ends,
            eod_mask_loss=self.config.eod_mask_loss,
        )

    def _cache_folder(self, part: _Part) -> Path:
        return Path(self.config.cache_dir) if self.config.cache_dir else Path(part.source.path).parent / "cache"

    def _order_key(self, part: _Part, samples: int | None) -> dict[str, object]:
        """All that decides which tokens sample i of this dataset is."""
        key: dict[str, object] = {
            "dataset": part.dataset.fingerprint(),
            "sequences": [part.sequences.start, part.sequences.stop],
            "seq_len": self.seq_len,
            "seed": self.seed,
            "order": self.config.order,
            "samples": samples,
        }
        return key

    def _identity(self, parts: list[_Part], weights: list[float], requested: list[int | None]) -> str:
        """As the cache's key, but the number of samples counts only as far as it changes their order."""
        keys = []
        for part, samples in zip(parts, requested, strict=True):
            key = self._order_key(part, samples)
            if samples is not None:
                key["samples"] = "as many as needed"
                if self.config.order == "megatron":
                    plan = plan_epochs(part.tokens, seq_len=self.seq_len, num_samples=samples)
                    key["epochs"] = [plan.num_epochs, plan.separate_last_epoch]
            keys.append(key)
        return _hash({"datasets": keys, "weights": weights})


_INDEX_ARRAYS = ("document_index", "sample_index", "shuffle_index")
_BLEND_ARRAYS = ("source_ids", "sample_ids")
_CACHED_BLEND = 1 << 18  # shorter blends take less time to compute than to open


def _bytes_per_token(parts: list[_Part], drawn: list[int]) -> float | None:
    """The mean over the datasets, by samples drawn; a split cut from a dataset takes that whole dataset's mean."""
    if any(part.sidecar is None for part in parts) or not sum(drawn):
        return None
    shares = [part.sidecar.bytes_per_token * count for part, count in zip(parts, drawn, strict=True) if part.sidecar]
    return sum(shares) / sum(drawn)


def _synthetic(name: str, seq_len: int, vocab_size: int, seed: int, samples: int) -> Split:
    """Made-up tokens: nothing is read, nothing repeats."""
    report = SourceReport(
        split=name,
        path="synthetic",
        weight=1.0,
        documents=samples,
        tokens=samples * seq_len,
        samples=samples,
        epochs=1.0,
    )
    return Split(
        source=SyntheticDataset(vocab_size, seq_len, seed, samples),
        identity=_hash({"synthetic": [vocab_size, seq_len, seed]}),
        reports=(report,),
        bytes_per_token=None,
    )


def _hash(content: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]
