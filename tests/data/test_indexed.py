from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from paceline.data.indexed import HEADER, MAGIC, IndexedDataset, bin_path, dtype_for_vocab, idx_path
from paceline.data.indexed_writer import IndexedWriter, merge
from paceline.errors import DataError


def write(prefix: Path, documents: list[list[int]], **options: object) -> IndexedDataset:
    with IndexedWriter(prefix, **({"vocab_size": 1000} | options)) as writer:  # type: ignore[arg-type]
        for document in documents:
            writer.add_document(document)
    return IndexedDataset(prefix)


def independent_read(prefix: Path) -> list[list[int]]:
    """A reader that shares no code with ours: struct only."""
    index, tokens = idx_path(prefix).read_bytes(), bin_path(prefix).read_bytes()
    assert index[:9] == b"MMIDIDX\0\0" and struct.unpack("<Q", index[9:17]) == (1,)
    size, letter = {8: (2, "H"), 4: (4, "i"), 1: (1, "B")}[index[17]]
    s, d = struct.unpack("<QQ", index[18:34])
    lengths = struct.unpack(f"<{s}i", index[34 : 34 + 4 * s])
    pointers = struct.unpack(f"<{s}q", index[34 + 4 * s : 34 + 12 * s])
    starts = struct.unpack(f"<{d}q", index[34 + 12 * s :])
    assert starts[0] == 0 and starts[-1] == s
    return [
        list(struct.unpack(f"<{length}{letter}", tokens[pointer : pointer + size * length]))
        for length, pointer in zip(lengths, pointers, strict=True)
    ]


def test_bytes_of_example_g(tmp_path: Path) -> None:
    write(tmp_path / "g", [[1, 2, 3], [4, 5]])
    assert bin_path(tmp_path / "g").read_bytes().hex() == "01000200030004000500"
    expected = "4d4d494449445800000100000000000000080200000000000000030000000000000003000000020000000000000000000000"
    expected += "0600000000000000" + "0000000000000000" + "0100000000000000" + "0200000000000000"
    assert idx_path(tmp_path / "g").read_bytes().hex() == expected
    assert len(idx_path(tmp_path / "g").read_bytes()) == 82


def test_round_trip_with_an_independent_reader_and_writer(tmp_path: Path) -> None:
    documents = [[1], [2, 3, 4], [], [5, 999]]
    dataset = write(tmp_path / "a", documents)
    assert independent_read(tmp_path / "a") == documents
    assert [dataset.get(i).tolist() for i in range(4)] == documents
    assert dataset.get(1, 1, 2).tolist() == [3, 4]
    index = MAGIC + struct.pack("<QBQQ", 1, 4, 2, 3) + struct.pack("<2i", 1, 2)
    index += struct.pack("<2q", 0, 4) + struct.pack("<3q", 0, 1, 2)
    idx_path(tmp_path / "b").write_bytes(index)
    bin_path(tmp_path / "b").write_bytes(struct.pack("<3i", 7, 151642, 9))
    other = IndexedDataset(tmp_path / "b")
    assert [other.get(i).tolist() for i in range(2)] == [[7], [151642, 9]]


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [(65_499, "uint16"), (65_500, "int32"), (65_536, "int32"), (65_537, "int32"), (151_643, "int32")],
)
def test_dtype_by_vocabulary(tmp_path: Path, vocab: int, dtype: str) -> None:
    assert dtype_for_vocab(vocab).name == dtype
    ids = [i for i in (0, 65_498, 65_499, 65_500, 65_535, 65_536, 151_642) if i < vocab]
    dataset = write(tmp_path / "v", [ids], vocab_size=vocab)
    assert dataset.get(0).tolist() == ids and dataset.dtype.name == dtype
    with pytest.raises(DataError, match=f"document 1 holds the token id {vocab}"):
        write(tmp_path / "w", [[0], [1, vocab]], vocab_size=vocab)
    assert not list(tmp_path.glob("*w.*"))


def test_offsets_beyond_2_gib(tmp_path: Path) -> None:
    length = 400_000_000
    with bin_path(tmp_path / "big").open("wb") as file:
        file.truncate(3 * length * 4)  # sparse: takes no disk
    lengths = np.full(3, length, "<i4")
    pointers = np.arange(3, dtype="<i8") * length * 4
    content = HEADER.pack(MAGIC, 1, 4, 3, 4) + lengths.tobytes() + pointers.tobytes()
    idx_path(tmp_path / "big").write_bytes(content + np.arange(4, dtype="<i8").tobytes())
    dataset = IndexedDataset(tmp_path / "big")
    assert dataset.pointers.dtype == np.int64 and (np.diff(dataset.pointers) > 0).all()
    assert int(dataset.pointers[-1]) + length * 4 == bin_path(tmp_path / "big").stat().st_size
    assert dataset.get(2, length - 2).tolist() == [0, 0]


def test_our_own_index_beyond_2_gib(tmp_path: Path) -> None:
    sparse = tmp_path / "tokens"
    with sparse.open("wb") as file:
        file.truncate(40)
    with IndexedWriter(tmp_path / "o", vocab_size=70_000) as writer:
        writer.append_file(sparse, np.array([10]))
        writer._files["lengths"].write(np.full(2, 400_000_000, "<i4").tobytes())
        writer._num_sequences = writer.num_documents = 3
        writer._files["bin"].truncate(40 + 2 * 1_600_000_000)
        writer.num_tokens = 10
    assert IndexedDataset(tmp_path / "o").pointers.tolist() == [0, 40, 40 + 1_600_000_000]


def corrupt(path: Path, offset: int, new: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(new)] = new
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i, b: i.unlink(), "no such file"),
        (lambda i, b: b.unlink(), "no such file"),
        (lambda i, b: i.write_bytes(b""), "too short for an index"),
        (lambda i, b: i.write_bytes(i.read_bytes()[:-1]), "81 bytes where 82 are expected"),
        (lambda i, b: i.write_bytes(b"{}" * 50), "not a dataset index"),
        (lambda i, b: corrupt(i, 9, b"\2"), "version 2"),
        (lambda i, b: corrupt(i, 17, b"\x09"), "dtype code 9"),
        (lambda i, b: corrupt(i, 17, b"\x07"), "dtype code 7"),
        (lambda i, b: corrupt(i, 17, b"\x04"), "sequence 1 is said to start at byte 6"),
        (lambda i, b: corrupt(i, 34, struct.pack("<i", -3)), "length -3"),
        (lambda i, b: corrupt(i, 50, struct.pack("<q", 4)), "said to start at byte 4"),
        (lambda i, b: corrupt(i, 58, struct.pack("<q", 1)), "document index runs from 1 to 2"),
        (lambda i, b: corrupt(i, 66, struct.pack("<q", 5)), "document 1 ends before it starts"),
        (lambda i, b: b.write_bytes(b.read_bytes()[:-1]), "9 bytes, shorter than the index says"),
        (lambda i, b: b.write_bytes(b.read_bytes() + b"x"), "11 bytes, longer"),
        (lambda i, b: b.write_bytes(b""), "0 bytes, shorter"),
    ],
)
def test_damage_is_named(tmp_path: Path, change: object, message: str) -> None:
    write(tmp_path / "d", [[1, 2, 3], [4, 5]])
    change(idx_path(tmp_path / "d"), bin_path(tmp_path / "d"))  # type: ignore[operator]
    with pytest.raises(DataError, match=message) as caught:
        IndexedDataset(tmp_path / "d")
    assert str(tmp_path / "d") in caught.value.subject and caught.value.next_step


def test_no_documents_or_no_tokens(tmp_path: Path) -> None:
    for documents in ([], [[], []]):
        with pytest.raises(DataError, match="nothing to write"):
            write(tmp_path / "e", documents)
    assert not list(tmp_path.iterdir())


def test_merge_keeps_document_boundaries(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1, 2], [3]])
    # one document of two sequences, then one of one: documents and sequences differ
    index = HEADER.pack(MAGIC, 1, 8, 3, 3) + struct.pack("<3i", 1, 2, 1)
    index += struct.pack("<3q", 0, 2, 6) + struct.pack("<3q", 0, 2, 3)
    idx_path(tmp_path / "b").write_bytes(index)
    bin_path(tmp_path / "b").write_bytes(struct.pack("<4H", 10, 11, 12, 13))
    merged = merge([tmp_path / "a", tmp_path / "b", tmp_path / "a"], tmp_path / "m")
    assert merged.num_documents == 6 and len(merged) == 7
    assert merged.document_starts.tolist() == [0, 1, 2, 4, 5, 6, 7]
    assert independent_read(tmp_path / "m") == [[1, 2], [3], [10], [11, 12], [13], [1, 2], [3]]


def test_merge_of_different_dtypes(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1, 2]])
    write(tmp_path / "b", [[151_642]], vocab_size=151_643)
    with pytest.raises(DataError, match="different dtypes"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "m")
    assert not bin_path(tmp_path / "m").exists()
    assert merge([tmp_path / "a", tmp_path / "b"], tmp_path / "m", widen=True).dtype.name == "int32"
    assert independent_read(tmp_path / "m") == [[1, 2], [151_642]]
    with pytest.raises(DataError, match="is one of the inputs"):
        merge([tmp_path / "a"], tmp_path / "a")


def test_an_error_leaves_the_old_dataset(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1, 2]])
    with pytest.raises(RuntimeError), IndexedWriter(tmp_path / "a", vocab_size=10) as writer:
        writer.add_document([3])
        raise RuntimeError
    assert independent_read(tmp_path / "a") == [[1, 2]] and len(list(tmp_path.iterdir())) == 2


def test_unwritable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        IndexedWriter(tmp_path / "file" / "x")


def test_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __init__(self, file: object) -> None:
            self.file = file

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

        def write(self, data: bytes) -> int:
            raise OSError(28, "No space left on device")

    with pytest.raises(DataError, match="cannot be written") as caught:
        with IndexedWriter(tmp_path / "f", vocab_size=10) as writer:
            writer._files["bin"] = Full(writer._files["bin"])  # type: ignore[assignment]
            writer.add_document([1])
    assert "No space left" in caught.value.evidence and not list(tmp_path.iterdir())


def test_fingerprint_ignores_the_place(tmp_path: Path) -> None:
    a = write(tmp_path / "a", [[1, 2], [3]])
    b = write(tmp_path / "sub" / "b", [[1, 2], [3]])
    c = write(tmp_path / "c", [[1], [2, 3]])
    assert a.fingerprint() == b.fingerprint() != c.fingerprint()
