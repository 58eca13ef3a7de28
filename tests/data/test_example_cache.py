from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from paceline.data import encode_rows, example_cache
from paceline.data.chat_template import load_template
from paceline.data.documents import Encoder
from paceline.data.encode_rows import FileSet
from paceline.data.example_cache import Examples, encode_files
from paceline.data.record_rows import find_record_files
from paceline.data.tokenizer import load_tokenizer
from paceline.errors import DataError


def encoder(task: str = "sft", template: str = "chatml") -> Encoder:
    tokenizer = load_tokenizer("byte")
    return Encoder(tokenizer=tokenizer, template=load_template(template, tokenizer), task=task)


def write(path: Path, count: int, bad: tuple[int, ...] = ()) -> Path:
    with path.open("w") as file:
        for i in range(count):
            row = {"instruction": f"question {i}", "output": "" if i in bad else "yes " * (i % 7 + 1)}
            file.write(json.dumps(row) + "\n")
    return path


def encode(path: Path, folder: Path, *, workers: int = 1, using: Encoder | None = None) -> Examples:
    sets = [FileSet(files=tuple(find_record_files([path])))]
    return encode_files(sets, using or encoder(), folder=folder, workers=workers)


def same(a: Examples, b: Examples) -> bool:
    names = ("tokens", "trained", "lengths", "desirable", "lines", "files")
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in names)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example_cache, "CHUNK_ROWS", 8)
    monkeypatch.setattr(example_cache, "PART_ROWS", 32)
    monkeypatch.setattr(example_cache, "IN_PROCESS_ROWS", 16)


def test_rows_are_encoded_in_order_and_bad_ones_counted(tmp_path: Path) -> None:
    found = encode(write(tmp_path / "a.jsonl", 20, bad=(3, 11)), tmp_path / "cache")
    assert len(found) == 18
    assert found.place(3) == (str(tmp_path / "a.jsonl"), 5)
    assert found.tally.rows == 20
    assert dict(found.tally.kinds) == {"empty assistant turn": 2}
    assert [str(row) for row in found.tally.first] == [
        f"{tmp_path / 'a.jsonl'}:{line}: empty assistant turn: turn 2 has neither text nor a tool call"
        for line in (4, 12)
    ]
    first = found.document(0)
    text = load_tokenizer("byte").decode(first.ids)
    assert text == "<|im_start|>user\nquestion 0<|im_end|>\n<|im_start|>assistant\nyes <|im_end|>"
    assert load_tokenizer("byte").decode(first.ids[first.trained]) == "yes <|im_end|>"


@pytest.mark.usefixtures("small_parts")
def test_the_result_does_not_depend_on_processes_or_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", 150, bad=(40, 90))
    alone, many = encode(path, tmp_path / "1"), encode(path, tmp_path / "2", workers=2)
    monkeypatch.setattr(example_cache, "PART_ROWS", 1 << 20)
    whole = encode(path, tmp_path / "3")
    assert same(alone, many)
    assert same(alone, whole)
    assert alone.tally == many.tally == whole.tally


@pytest.mark.usefixtures("small_parts")
def test_an_interrupted_build_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cache = write(tmp_path / "a.jsonl", 150, bad=(5,)), tmp_path / "cache"
    whole = encode(path, tmp_path / "other")
    real, calls = encode_rows.EncodeRows.__call__, 0

    def interrupted(self: object, chunk: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 11:
            raise KeyboardInterrupt
        return real(self, chunk)  # type: ignore[arg-type]

    monkeypatch.setattr(encode_rows.EncodeRows, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        encode(path, cache)
    assert not list(cache.glob("*/examples.json")), "nothing that looks complete"
    assert len(list(cache.glob("*/parts/*.json"))) == 2
    calls = 100
    assert same(encode(path, cache), whole)
    assert calls - 100 == 11, "19 chunks, 8 of them were done"
    assert not list(cache.glob("*/parts"))


def test_the_key_is_all_that_decides_the_tokens(tmp_path: Path) -> None:
    path, cache = write(tmp_path / "a.jsonl", 5), tmp_path / "cache"
    first = encode(path, cache)
    assert encode(path, cache).identity == first.identity
    others = {
        encode(path, cache, using=encoder(template="zephyr")).identity,
        encode(
            path,
            cache,
            using=Encoder(tokenizer=encoder().tokenizer, template=encoder().template, task="sft", mask="all"),
        ).identity,
        encode(write(tmp_path / "a.jsonl", 6), cache).identity,
    }
    assert len(others | {first.identity}) == 4
    moved = path.rename(tmp_path / "b.jsonl")
    again = encode(moved, cache)
    assert again.identity in others, "the name does not count"
    assert again.place(0) == (str(moved), 1)


def test_a_damaged_cache_is_built_again(tmp_path: Path) -> None:
    path, cache = write(tmp_path / "a.jsonl", 5), tmp_path / "cache"
    first = encode(path, cache)
    tokens = np.array(first.tokens)
    (file,) = cache.glob("*/tokens.npy")
    file.write_bytes(file.read_bytes()[:200])
    assert np.array_equal(encode(path, cache).tokens, tokens)


def test_a_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    found = encode(write(tmp_path / "a.jsonl", 5), tmp_path / "file" / "cache")
    assert len(found) == 5
    assert found.tokens[:3].tolist() == list(b"<|i")
    assert "set data.cache_dir to a writable folder" in caplog.text


def test_a_refusal_leaves_nothing(tmp_path: Path) -> None:
    path, cache = tmp_path / "a.jsonl", tmp_path / "cache"
    path.write_text(json.dumps({"instruction": "a", "output": "b", "system": "c"}) + "\n")
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}")
    with pytest.raises(DataError, match="no place for a system turn"):
        encode(path, cache, using=encoder(template=str(template)))
    assert not list(cache.glob("*-examples"))
