from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from paceline.config.data import DataConfig, DataSource
from paceline.data.batch import IGNORE_INDEX
from paceline.data.build import Datasets, build_datasets
from paceline.data.indexed_writer import IndexedWriter
from paceline.data.sidecar import Sidecar, read_sidecar, sidecar_path, write_sidecar
from paceline.data.sources import SampleSource
from paceline.data.tokenizer import ByteTokenizer
from paceline.errors import DataError


def make(
    prefix: Path, documents: int, *, first: int = 0, vocab: int = 257, fingerprint: str = "", length: int = 9
) -> str:
    with IndexedWriter(prefix, vocab_size=max(vocab, 500)) as writer:
        for d in range(documents):
            writer.add_document(np.full(length, first + d % 200))
    if fingerprint:
        sidecar = Sidecar(
            tokenizer="byte",
            tokenizer_fingerprint=fingerprint,
            vocab_size=vocab,
            eod_id=256,
            eod_appended=True,
            documents=documents,
            tokens=documents * length,
            text_bytes=documents * length * 3,
        )
        write_sidecar(prefix, sidecar)
    return str(prefix)


def build(config: DataConfig, **options: object) -> Datasets:
    defaults: dict = {"seq_len": 8, "vocab_size": 500, "seed": 1, "train_samples": 40}
    return build_datasets(config, **(defaults | options))


def rows(source: SampleSource, count: int | None = None) -> list[list[int]]:
    return [source[i].tokens.tolist() for i in range(len(source) if count is None else count)]


def test_one_dataset(tmp_path: Path) -> None:
    data = build(DataConfig(train=make(tmp_path / "a", 20, fingerprint=ByteTokenizer.fingerprint)))
    assert data.valid is None and data.test is None and len(data.train) >= 40
    assert data.tokenizer_info.vocab_size == 257 and data.tokenizer_info.eod_id == 256
    assert data.train.bytes_per_token == 3.0
    (report,) = data.reports
    assert report.documents == 20 and report.tokens == 180 and report.samples == 40
    assert report.epochs == pytest.approx(40 * 8 / 180) and "1.78 epochs" in str(report)


def test_split_by_document(tmp_path: Path) -> None:
    data = build(DataConfig(train=make(tmp_path / "a", 100), split="80,15,5"))
    assert data.valid is not None and data.test is not None
    kinds = [{t for row in rows(split) for t in row} for split in (data.train, data.valid, data.test)]
    kinds[1].discard(0)  # padding
    kinds[2].discard(0)
    assert kinds[0] <= set(range(80)) and kinds[1] == set(range(80, 95)) and kinds[2] == set(range(95, 100))
    assert [r.documents for r in data.reports] == [80, 15, 5]
    # without a number of samples, every token of the held-out documents is predicted once (the first has no
    # predecessor)
    labels = sum(int((data.valid[i].labels != IGNORE_INDEX).sum()) for i in range(len(data.valid)))
    assert labels == 15 * 9 - 1


def test_blend(tmp_path: Path) -> None:
    config = DataConfig(
        train=(
            DataSource(path=make(tmp_path / "a", 30, first=1), weight=30),
            DataSource(path=make(tmp_path / "b", 5, first=300), weight=10),
            DataSource(path=make(tmp_path / "c", 5, first=400), weight=0.001),
        ),
        valid=(DataSource(path=str(tmp_path / "b")), DataSource(path=str(tmp_path / "c"))),
    )
    data = build(config, train_samples=200)
    first = [row[0] for row in rows(data.train, 200)]
    assert sum(t >= 400 for t in first) == 1 and abs(sum(300 <= t < 400 for t in first) - 50) <= 1
    assert [r.samples for r in data.reports[:3]] == [149, 50, 1]
    assert data.valid is not None and len(data.valid) == 2 * 6


def test_identity_follows_the_order(tmp_path: Path) -> None:
    path = make(tmp_path / "a", 20)  # 22 samples an epoch

    def run(samples: int, **config: object) -> tuple[str, list[list[int]]]:
        data = build(DataConfig(train=path, **config), train_samples=samples)
        return data.train.identity, rows(data.train, min(samples, 24))

    assert run(24)[0] != run(40)[0]  # the second epoch: apart, then together
    assert run(41) == run(42)
    assert run(41)[0] != run(90)[0] and run(41)[1] != run(90)[1]
    assert run(24, order="epoch") == run(90, order="epoch")
    assert run(24)[0] != run(24, order="epoch")[0]
    moved = make(tmp_path / "elsewhere" / "b", 20)
    assert build(DataConfig(train=moved), train_samples=41).train.identity == run(41)[0]
    assert build(DataConfig(train=path), seed=2, train_samples=41).train.identity != run(41)[0]


def test_cache_is_used_and_repaired(tmp_path: Path) -> None:
    config = DataConfig(train=make(tmp_path / "a", 20), cache_dir=str(tmp_path / "cache"))
    expected = rows(build(config).train)
    files = sorted((tmp_path / "cache").glob("*.npy"))
    assert len(files) == 3
    stamps = [file.stat().st_mtime_ns for file in files]
    assert rows(build(config).train) == expected
    assert [file.stat().st_mtime_ns for file in files] == stamps
    for damage in (b"", b"nonsense", files[1].read_bytes()[:-4]):
        files[1].write_bytes(damage)
        assert rows(build(config).train) == expected
    assert not list((tmp_path / "cache").glob(".*.tmp"))


def _build_in_process(path: str, cache: str) -> list[list[int]]:
    return rows(build(DataConfig(train=path, cache_dir=cache)).train)


def test_many_ranks_start_at_once(tmp_path: Path) -> None:
    import multiprocessing

    path, cache = make(tmp_path / "a", 2000), str(tmp_path / "cache")
    with multiprocessing.get_context("fork").Pool(6) as pool:
        results = pool.starmap(_build_in_process, [(path, cache)] * 6)
    assert all(result == results[0] for result in results)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_folder(tmp_path: Path) -> None:
    path = make(tmp_path / "a", 20)
    tmp_path.chmod(0o500)
    assert len(build(DataConfig(train=path)).train) >= 40


def test_cache_folder_that_cannot_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    config = DataConfig(train=make(tmp_path / "a", 20), cache_dir=str(tmp_path / "file" / "cache"))
    assert len(build(config).train) >= 40
    assert "cannot be cached" in caplog.text


def test_synthetic() -> None:
    data = build(DataConfig(), valid_samples=4)
    assert len(data.train) == 40 and data.valid is not None and len(data.valid) == 4
    assert (data.train[0].tokens != data.valid[0].tokens).any()


def test_synthetic_training_with_real_held_out_data(tmp_path: Path) -> None:
    data = build(DataConfig(valid=make(tmp_path / "a", 20)), valid_samples=4)
    assert data.valid is not None and data.valid.reports[0].documents == 20 and len(data.train) == 40


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"train": "nowhere/x"}, "no such file"),
        ({"train": "a", "valid": "a", "split": "1,1"}, "are both set"),
        ({"train": "a", "split": "0,1,1"}, "leaves nothing to train on"),
        ({"train": "a", "split": "nan,1,1"}, "data.split = 'nan,1,1' is not a split"),
        ({"train": ""}, "data.train is empty"),
        ({"train": "", "split": "8,1,1"}, "data.train is empty"),
        ({"train": "short"}, "train.seq_len = 8 is longer than the dataset"),
        ({"train": "big"}, r"the vocabulary of .*, 600, is larger than model.vocab_size = 500"),
        ({"train": "a", "valid": "other"}, "was made with another tokenizer than"),
        ({"train": "other", "tokenizer": "byte"}, "was made with another tokenizer than data.tokenizer = byte"),
    ],
)
def test_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    make(Path("a"), 20, fingerprint=ByteTokenizer.fingerprint)
    make(Path("other"), 20, fingerprint="ffff")
    make(Path("big"), 20, fingerprint="ffff", vocab=600)
    make(Path("short"), 2, length=4)
    with pytest.raises(DataError, match=message) as caught:
        build(DataConfig(**config))
    assert caught.value.next_step


def test_ids_beyond_the_vocabulary_without_a_description(tmp_path: Path) -> None:
    data = build(DataConfig(train=make(tmp_path / "a", 20, first=100)), vocab_size=105)
    with pytest.raises(DataError, match=r"model.vocab_size = 105|holds the token id"):
        rows(data.train)


def test_foreign_description(tmp_path: Path) -> None:
    path = make(tmp_path / "a", 20)
    assert read_sidecar(path) is None
    for content in ("{}", "not json", '{"format": "paceline-dataset-1", "x": 1}', "[]"):
        sidecar_path(path).write_text(content)
        with pytest.raises(DataError, match="not a description of a dataset"):
            read_sidecar(path)
