from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from paceline.data.indexed import IndexedDataset
from paceline.data.pool import WorkerPool
from paceline.data.prepare import BuildSummary, PrepareOptions, Progress, build_dataset
from paceline.data.readers import ReadOptions
from paceline.data.sidecar import read_sidecar
from paceline.data.tokenizer import ByteTokenizer, load_tokenizer
from paceline.data.train_tokenizer import train_tokenizer
from paceline.errors import DataError

BYTE = ByteTokenizer()
WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "for",
    "it",
    "was",
    "on",
    "are",
    "as",
    "with",
    "his",
    "they",
    "at",
]
WORDS += ["be", "this", "from", "have", "or", "by", "one", "had", "not"]


def prose(seed: int, words: int = 80) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def build(path: Path | list[Path], out: Path, **options: object) -> BuildSummary:
    read = ReadOptions(**{k: options.pop(k) for k in ("json_key", "split_lines") if k in options})  # type: ignore[arg-type]
    inputs = path if isinstance(path, list) else [path]
    tokenizer = options.pop("tokenizer", BYTE)
    return build_dataset(inputs, out, tokenizer=tokenizer, options=PrepareOptions(read=read, **options))  # type: ignore[arg-type]


def documents(prefix: Path | str) -> list[str]:
    data = IndexedDataset(prefix)
    return [BYTE.decode(data.get(i)) for i in range(len(data))]


def nothing_left(folder: Path) -> bool:
    return not [p for p in folder.iterdir() if p.suffix in (".bin", ".idx") or p.name.startswith(".")]


def test_empty_documents_are_counted_and_skipped(tmp_path: Path) -> None:
    summary = build(write_jsonl(tmp_path / "a.jsonl", ["", "a b", "", "x"]), tmp_path / "out")
    assert summary.num_empty == 2 and summary.documents == 2 and summary.tokens == 6
    data = IndexedDataset(tmp_path / "out")
    assert data.get(0).tolist() == [97, 32, 98, 256] and data.get(1).tolist() == [120, 256]
    assert data.num_documents == 2
    sidecar = read_sidecar(tmp_path / "out")
    assert sidecar is not None and sidecar.text_bytes == 4 and sidecar.eod_id == 256 and sidecar.tokenizer == "byte"


def test_a_document_of_one_token_is_kept(tmp_path: Path) -> None:
    build(write_jsonl(tmp_path / "a.jsonl", ["a", "b"]), tmp_path / "out", append_eod=False)
    assert IndexedDataset(tmp_path / "out").lengths.tolist() == [1, 1]


def test_nothing_but_empty_documents(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing to write"):
        build(write_jsonl(tmp_path / "a.jsonl", ["", ""]), tmp_path / "out")
    assert nothing_left(tmp_path)


def test_the_result_does_not_depend_on_the_workers(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "sub").mkdir()
    texts = [prose(i, 1 + i % 300) for i in range(1500)]
    write_jsonl(tmp_path / "in" / "a.jsonl", texts)
    more = [prose(i, 20) for i in range(5000, 5400)]
    (tmp_path / "in" / "b.jsonl.gz").write_bytes(gzip.compress(write_jsonl(tmp_path / "more", more).read_bytes()))
    (tmp_path / "in" / "sub" / "c.txt").write_text("a text file\nof two lines")
    results = []
    for workers in (1, 2, 3):
        out = tmp_path / f"out{workers}"
        build(tmp_path / "in", out, workers=workers)
        results.append([Path(f"{out}{suffix}").read_bytes() for suffix in (".bin", ".idx", ".json")])
    assert results[0] == results[1] == results[2]
    assert documents(tmp_path / "out1") == [*texts, *more, "a text file\nof two lines"]


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [prose(i) for i in range(3000)])
    seen: list[Progress] = []
    options = PrepareOptions(workers=2)
    summary = build_dataset([path], tmp_path / "out", tokenizer=BYTE, options=options, progress=seen.append)
    assert len(seen) > 2 and seen[-1].bytes_done == seen[-1].bytes_total == path.stat().st_size
    assert seen[-1].tokens == summary.tokens and seen[-1].documents == 3000 and seen[-1].tokens_per_second > 0


CASE_60 = [
    b'{"text": "valid"}',
    b'{"text": "br\xf4ken"}',
    b'{"text": "trunca',
    b'{"text": "a"}{"text": "b"}',
    b'{"text": "\\ud800"}',
    b'{"body": "x"}',
    b'{"text": null}',
    b'{"text": "' + b"word " * 1_000_000 + b'"}',
]


def test_bad_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(CASE_60))
    summary = build(tmp_path / "a.jsonl", tmp_path / "out", max_skipped_share=1.0, workers=2)
    assert summary.documents == 2
    assert summary.skipped == {
        "invalid UTF-8": 1,
        "malformed JSON": 2,
        "lone surrogate": 1,
        "missing key": 1,
        "not text": 1,
    }
    listed = [json.loads(line) for line in Path(summary.report).read_text().splitlines()]
    assert [entry["line"] for entry in listed] == [2, 3, 4, 5, 6, 7]
    assert [entry["byte_offset"] for entry in listed][:2] == [18, 18 + len(CASE_60[1]) + 1]
    assert IndexedDataset(tmp_path / "out").lengths.tolist() == [6, 5_000_001]


def test_too_much_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(CASE_60[:7]))
    with pytest.raises(DataError, match=r"6 documents \(85.7%\) could not be read") as caught:
        build(tmp_path / "a.jsonl", tmp_path / "out")
    assert caught.value.exit_code != 0 and "line 2" in caught.value.evidence
    assert nothing_left(tmp_path) and (tmp_path / "out.skipped.jsonl").exists()


def test_strict_stops_at_the_first(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(CASE_60[:7]))
    with pytest.raises(DataError, match=r"a.jsonl, line 2, byte 18: invalid UTF-8: byte 0xf4"):
        build(tmp_path / "a.jsonl", tmp_path / "out", strict=True)
    assert nothing_left(tmp_path) and not (tmp_path / "out.skipped.jsonl").exists()


def test_line_numbers_over_many_units(tmp_path: Path) -> None:
    lines = [json.dumps({"text": prose(i)}) for i in range(4000)]
    lines[3500] = "oops"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    summary = build(tmp_path / "a.jsonl", tmp_path / "out", workers=3)
    assert json.loads(Path(summary.report).read_text())["line"] == 3501


def test_a_long_line_gives_the_same_ids_as_whole(tmp_path: Path) -> None:
    tokenizer = train_tokenizer([prose(i) for i in range(50)], tmp_path / "t.json", vocab_size=300)
    text = "\n".join(prose(i, 3000) for i in range(120))
    assert len(text) > 1 << 20
    build(write_jsonl(tmp_path / "a.jsonl", ["x", text, "y"]), tmp_path / "out", tokenizer=tokenizer, workers=2)
    data = IndexedDataset(tmp_path / "out")
    assert data.get(1).tolist() == [*tokenizer.encode(text), tokenizer.eod_id]
    assert len(data) == 3


def test_a_text_without_a_place_to_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.data.encode.LONGEST_STRETCH", 100_000)
    monkeypatch.setattr("paceline.data.encode.LONG_CHARS", 50_000)
    tokenizer = train_tokenizer([prose(i) for i in range(50)], tmp_path / "t.json", vocab_size=300)
    cut, held = prose(1, 60_000), "y" * 90_000
    path = write_jsonl(tmp_path / "a.jsonl", ["x", cut + "y" * 110_000, cut, held])
    summary = build(path, tmp_path / "out", tokenizer=tokenizer, max_skipped_share=0.5)
    assert summary.skipped == {"no place to cut": 1} and summary.documents == 3
    data = IndexedDataset(tmp_path / "out")
    assert data.get(1).tolist() == [*tokenizer.encode(cut), tokenizer.eod_id]
    assert data.get(2).tolist() == [*tokenizer.encode(held), tokenizer.eod_id]
    entry = json.loads(Path(summary.report).read_text())
    assert (entry["line"], entry["byte_offset"]) == (2, 14) and "characters in a row (no space" in entry["detail"]
    with pytest.raises(DataError, match="more than --max-skipped-share"):
        build(path, tmp_path / "out2", tokenizer=tokenizer)
    with pytest.raises(DataError, match=r"line 2, byte 14: no place to cut: 1\d\d,\d\d\d characters"):
        build(path, tmp_path / "out2", tokenizer=tokenizer, strict=True)
    build(path, tmp_path / "bytes")  # bytes can be cut anywhere
    assert IndexedDataset(tmp_path / "bytes").num_documents == 4
    description = json.loads((tmp_path / "t.json").read_text()) | {"pre_tokenizer": None}
    (tmp_path / "whole.json").write_text(json.dumps(description))
    whole = load_tokenizer(tmp_path / "whole.json")
    summary = build(path, tmp_path / "whole", tokenizer=whole, max_skipped_share=0.5)
    assert summary.skipped == {"no place to cut": 2}


def test_held_out_documents(tmp_path: Path) -> None:
    texts = [prose(i) for i in range(400)]
    summary = build(write_jsonl(tmp_path / "a.jsonl", texts), tmp_path / "out", valid_share=0.1, workers=2)
    train, valid = documents(tmp_path / "out-train"), documents(tmp_path / "out-valid")
    assert 20 < len(valid) < 60 and sorted(train + valid) == sorted(texts)
    assert list(summary.datasets) == [f"{tmp_path}/out-train", f"{tmp_path}/out-valid"]
    assert summary.datasets[f"{tmp_path}/out-valid"].text_bytes == sum(map(len, valid))
    # the choice is the document's own: more data around it changes nothing
    build(write_jsonl(tmp_path / "b.jsonl", [prose(9999), *texts[::-1]]), tmp_path / "o2", valid_share=0.1)
    assert set(valid) <= set(documents(tmp_path / "o2-valid"))


def test_a_held_out_part_without_documents(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none is held out"):
        build(write_jsonl(tmp_path / "a.jsonl", ["one"]), tmp_path / "out", valid_share=0.001)
    assert nothing_left(tmp_path)


def test_duplicates(tmp_path: Path) -> None:
    original = prose(1, 400)
    near = original.replace(" that ", " which ", 1)
    other = prose(2, 400)
    texts = [original, other, f"  {original}\n", near, "short", "short", "brief"]
    for workers in (1, 2):
        summary = build(write_jsonl(tmp_path / "a.jsonl", texts), tmp_path / "out", dedup=True, workers=workers)
        assert documents(tmp_path / "out") == [original, other, "short", "brief"]
        assert summary.num_exact_duplicates == 2 and summary.num_near_duplicates == 1
    assert summary.datasets[str(tmp_path / "out")].documents == 4


def test_rebuilding_replaces_all_files(tmp_path: Path) -> None:
    build(write_jsonl(tmp_path / "a.jsonl", ["one", "two"]), tmp_path / "out")
    build(write_jsonl(tmp_path / "a.jsonl", ["three"]), tmp_path / "out")
    sidecar = read_sidecar(tmp_path / "out")
    assert documents(tmp_path / "out") == ["three"] and sidecar is not None and sidecar.documents == 1
    assert {p.name for p in tmp_path.iterdir()} == {"a.jsonl", "out.bin", "out.idx", "out.json"}


def test_unwritable_output(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written") as caught:
        build(write_jsonl(tmp_path / "a.jsonl", ["one"]), tmp_path / "file" / "out")
    assert "file is a file, a folder is needed" in caught.value.evidence and "space" not in caught.value.next_step
    (tmp_path / "data").mkdir()
    with pytest.raises(DataError, match="data is a folder") as caught:
        build(tmp_path / "a.jsonl", tmp_path / "data")
    assert "data/NAME" in caught.value.next_step


def test_the_key_that_is_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": "7", "content": "some text"}\n' * 9)
    with pytest.raises(DataError, match="could not be read") as caught:
        build(tmp_path / "a.jsonl", tmp_path / "out")
    assert "--json-key content or --json-key id" in caught.value.next_step


def test_full_disk(tmp_path: Path) -> None:
    """The workers' files meet the limit first; the message names the reason and nothing is left."""
    import resource
    import signal

    path = write_jsonl(tmp_path / "a.jsonl", [prose(i, 2000) for i in range(300)])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        with pytest.raises(DataError, match="cannot be written") as caught:
            build(path, tmp_path / "out", workers=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)
    assert "File too large" in caught.value.evidence and nothing_left(tmp_path)


def _die(task: int) -> int:
    if task == 3:
        os._exit(9)
    return task * task


def _fail(task: int) -> int:
    if task == 2:
        raise DataError("task 2", evidence="why", next_step="how")
    return task


def _surprise(task: int) -> int:
    raise ZeroDivisionError("of all things")


def _exit(task: int) -> int:
    raise SystemExit(3)


def _uneven(task: int) -> int:
    import time

    time.sleep(0.05 if task % 5 == 0 else 0.0)
    return task


def test_pool() -> None:
    with WorkerPool(_uneven, 3) as pool:
        assert list(pool.map_ordered(range(40))) == list(range(40))
    with pytest.raises(DataError, match="exit code 9"), WorkerPool(_die, 2) as pool:
        list(pool.map_ordered(range(20)))
    with pytest.raises(DataError, match="task 2") as caught, WorkerPool(_fail, 2) as pool:
        list(pool.map_ordered(range(20)))
    assert caught.value.next_step == "how"
    with pytest.raises(DataError, match="ZeroDivisionError: of all things") as caught, WorkerPool(_surprise, 2) as pool:
        list(pool.map_ordered(range(20)))
    assert "test_prepare.py, line" in caught.value.evidence and "memory" not in str(caught.value)
    with pytest.raises(DataError, match="SystemExit: 3"), WorkerPool(_exit, 2) as pool:
        list(pool.map_ordered(range(20)))


def test_pool_beside_threads() -> None:
    """With another thread running, workers are spawned, not forked; the tokenizer travels by pickling."""
    import threading

    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        with WorkerPool(abs, 2) as pool:
            assert list(pool.map_ordered([-1, -2, -3])) == [1, 2, 3]
    finally:
        stop.set()
        thread.join()


def test_ids_are_written_in_the_dtype_of_the_vocabulary(tmp_path: Path) -> None:
    class Wide(ByteTokenizer):
        vocab_size = 70_000

        def encode_batch(self, texts: object) -> list:
            return [np.array([65_536, 69_999, 3], dtype=np.int32) for _ in texts]  # type: ignore[attr-defined]

    build(write_jsonl(tmp_path / "a.jsonl", ["one"]), tmp_path / "out", tokenizer=Wide())
    assert IndexedDataset(tmp_path / "out").get(0).tolist() == [65_536, 69_999, 3, 256]

    class Wrong(Wide):
        vocab_size = 69_999

    with pytest.raises(DataError, match="gave the id 69999, beyond its own vocabulary"):
        build(write_jsonl(tmp_path / "a.jsonl", ["one"]), tmp_path / "out2", tokenizer=Wrong())
    assert load_tokenizer("byte").vocab_size == 257


_MEASURED_BUILD = """
import re, resource, sys
from pathlib import Path
from paceline.data.prepare import PrepareOptions, build_dataset
from paceline.data.tokenizer import ByteTokenizer
build_dataset([sys.argv[1]], sys.argv[2], tokenizer=ByteTokenizer(), options=PrepareOptions(workers=2))
# not RUSAGE_SELF: that begins with the peak of whoever started this process
own = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024  # the largest one
print(own + 2 * child)
"""


def _peak_bytes(path: Path, out: Path) -> int:
    command = [sys.executable, "-c", _MEASURED_BUILD, str(path), str(out)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def test_memory_does_not_grow_with_the_number_of_documents(tmp_path: Path) -> None:
    """Both processes' peaks: at most 1.3 times that of a tenth of the documents, plus 20 bytes a document."""
    for count in (20_000, 200_000):
        (tmp_path / f"{count}.jsonl").write_text('{"text": "ab"}\n' * count)
    small = _peak_bytes(tmp_path / "20000.jsonl", tmp_path / "small")
    large = _peak_bytes(tmp_path / "200000.jsonl", tmp_path / "large")
    assert IndexedDataset(tmp_path / "large").num_documents == 200_000
    assert large < 1.3 * small + 20 * 200_000 and large < 2**30
