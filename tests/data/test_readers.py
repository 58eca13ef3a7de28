from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from paceline.data.readers import Document, Problem, ReadOptions, SliceReader, find_files, texts, units
from paceline.errors import DataError

LINES = [f"line {i} " + "x" * (i * 7 % 50) for i in range(60)]


def read(path: Path, unit_bytes: int = 1 << 20, **options: object) -> tuple[list[str], list[Problem]]:
    options_ = ReadOptions(**options)  # type: ignore[arg-type]
    found, problems, before = [], [], 0
    for unit in units(find_files([path]), options_, unit_bytes):
        for part in unit:
            reader = SliceReader(part, options_)
            for item in reader:
                if isinstance(item, Document):
                    assert item.num_bytes == len(item.text.encode())
                    found.append(item.text)
                else:
                    problems.append(item._replace(line=item.line + before))
            before += reader.num_lines
    return found, problems


def jsonl(lines: list[str]) -> bytes:
    return "".join(json.dumps({"text": line}) + "\n" for line in lines).encode()


@pytest.mark.parametrize("unit_bytes", [1, 7, 64, 100, 1000, 1 << 20])
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("end", [True, False])
def test_lines_do_not_depend_on_the_cut(tmp_path: Path, unit_bytes: int, suffix: str, end: bool) -> None:
    content = jsonl(LINES) if end else jsonl(LINES)[:-1]
    packed = {"": lambda c: c, ".gz": gzip.compress, ".zst": zstandard.compress}[suffix](content)
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(packed)
    assert read(path, unit_bytes)[0] == LINES


def test_several_zstd_frames(tmp_path: Path) -> None:
    content = jsonl(LINES)
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(content[:301]) + zstandard.compress(content[301:]))
    assert read(tmp_path / "a.jsonl.zst")[0] == LINES


def test_text_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\ntwo\n\nthree".encode())
    assert read(tmp_path / "a.txt")[0] == ["one\r\ntwo\n\nthree"]
    assert read(tmp_path / "a.txt", split_lines=True)[0] == ["one\r", "two", "three"]
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"packed"))
    assert read(tmp_path / "b.txt.gz")[0] == ["packed"]
    (tmp_path / "c.txt").write_bytes(b"fine\nfine\nbr\xf4ken")
    found, problems = read(tmp_path / "c.txt")
    assert not found and problems[0][1:4] == (3, 12, "invalid UTF-8")


def test_parquet(tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["a", None, "", "ünï"], "n": [1, 2, 3, 4]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    found, problems = read(tmp_path / "a.parquet")
    assert found == ["a", "", "ünï"] and [(p.line, p.kind) for p in problems] == [(2, "not text")]
    with pytest.raises(DataError, match="no column 'body'"):
        read(tmp_path / "a.parquet", json_key="body")
    (tmp_path / "b.parquet").write_bytes(b"nonsense")
    with pytest.raises(DataError, match="not a readable parquet file"):
        read(tmp_path / "b.parquet")


BAD = [
    (b'{"text": "br\xf4ken"}', "invalid UTF-8"),
    (b'{"text": "cut o', "malformed JSON"),
    (b'{"text": "a"} {"text": "b"}', "malformed JSON"),
    (b'{"text": "raw \x0b control"}', "malformed JSON"),
    (b'{"text": "\\ud800"}', "lone surrogate"),
    (b'{"body": "a"}', "missing key"),
    (b'{"text": null}', "not text"),
    (b'{"text": 3}', "not text"),
    (b"[1]", "malformed JSON"),
    (b"[" * 100_000, "malformed JSON"),
    (b'{"text": "a", "n": 1' + b"0" * 5000 + b"}", "unreadable number"),
]


@pytest.mark.parametrize("unit_bytes", [50, 1 << 20])
def test_bad_lines_are_reported_with_their_place(tmp_path: Path, unit_bytes: int) -> None:
    content = b'{"text": "good"}\n\n'
    places = []
    for line, kind in BAD:
        places.append((content.count(b"\n") + 1, len(content), kind))
        content += line + b"\n" + b'{"text": "\\ud83d\\ude42 pair"}\n'
    (tmp_path / "a.jsonl").write_bytes(content)
    found, problems = read(tmp_path / "a.jsonl", unit_bytes)
    assert [(p.line, p.offset, p.kind) for p in problems] == places
    assert found == ["good"] + ["🙂 pair"] * len(BAD)
    assert all(p.detail and str(tmp_path) in str(p) for p in problems)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_cut_short(tmp_path: Path, suffix: str) -> None:
    import random

    text = jsonl(["".join(random.Random(i).choices("abcdefgh ", k=200)) for i in range(500)])
    packed = gzip.compress(text) if suffix == ".gz" else zstandard.compress(text)
    (tmp_path / f"a.jsonl{suffix}").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(DataError, match="damaged or cut short"):
        read(tmp_path / f"a.jsonl{suffix}")
    (tmp_path / f"b.jsonl{suffix}").write_bytes(b"plain text")
    with pytest.raises(DataError, match="damaged or cut short"):
        read(tmp_path / f"b.jsonl{suffix}")


def test_every_cut_of_a_zstd_file_is_found() -> None:
    import io

    from paceline.data.zstd_frames import WholeFrames

    with_checksum = zstandard.ZstdCompressor(write_checksum=True, write_content_size=False)
    frames = [
        zstandard.compress(b"one " * 9),
        b"\x53\x2a\x4d\x18\x03\x00\x00\x00abc",
        with_checksum.compress(bytes(500_000)),
    ]
    whole = b"".join(frames)
    ends = {0, len(frames[0]), len(frames[0]) + len(frames[1]), len(whole)}
    for cut in range(len(whole) + 1):
        for step in (1, 7, 1 << 20):
            source = WholeFrames(io.BytesIO(whole[:cut]))
            try:
                while source.read(step):
                    pass
                assert cut in ends
            except EOFError:
                assert cut not in ends


@pytest.mark.parametrize("text", ["plain \U0001f642 \\n é", "\U0001f642" * 3, 'quo"te'])
def test_long_lines_are_read_like_short_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    lines = [json.dumps({"text": text, "é": "x"}, ensure_ascii=False).encode(), b'{"text": "\xc3\xa9", "b": "\xff"}']
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    short = read(tmp_path / "a.jsonl")
    monkeypatch.setattr("paceline.data.readers.LONG_LINE", 8)
    assert read(tmp_path / "a.jsonl") == short and short[0] == [text] and short[1][0].kind == "invalid UTF-8"


def test_a_long_line_with_a_long_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.data.readers.LONG_LINE", 8)
    (tmp_path / "a.jsonl").write_bytes('{"text": "é", "n": 1'.encode() + b"0" * 5000 + b'}\n{"text": "b"}')
    found, problems = read(tmp_path / "a.jsonl")
    assert found == ["b"] and problems[0].kind == "unreadable number" and "4300 digits" in problems[0].detail


def test_finding_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a.jsonl", "sub/c.txt", "sub/d.py", "x.bin", ".hidden.txt", ".git/e.txt", "z.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")

    def names(*inputs: str, glob: str = "") -> list[str]:
        return [str(Path(f.path).relative_to(tmp_path)) for f in find_files([tmp_path / i for i in inputs], glob)]

    assert names("") == ["a.jsonl", "b.txt", "sub/c.txt"]
    assert names("", glob="*.py") == ["sub/d.py"]
    assert names("sub/d.py", "", "b.txt") == ["sub/d.py", "a.jsonl", "b.txt", "sub/c.txt"]
    assert names("**/*.txt") == ["b.txt", "sub/c.txt"]
    for missing, why in (("nothing", "no such file or folder"), (".git/none*.txt", "no such file")):
        with pytest.raises(DataError, match="nothing to read") as caught:
            find_files([tmp_path / missing])
        assert why in caught.value.evidence
    with pytest.raises(DataError, match="nothing to read"):
        find_files([tmp_path], "*.rs")
    with pytest.raises(DataError, match=r"a .json file is not read"):
        find_files([tmp_path / "z.json"])
    assert list(texts(find_files([tmp_path / "b.txt"]), ReadOptions())) == ["{}"]
