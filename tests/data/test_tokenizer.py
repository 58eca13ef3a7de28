from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from paceline.data.pieces import (
    PIECE_CHARS,
    split_before_gap,
    split_before_space,
    split_dropping_space,
    splitter_for,
)
from paceline.data.tokenizer import ByteTokenizer, HFTokenizer, SentencePieceTokenizer, Tokenizer, load_tokenizer
from paceline.data.train_tokenizer import train_tokenizer
from paceline.errors import DataError

TEXTS = [
    "The quick brown fox jumps over the lazy dog. " * 3,
    "def main(argument):\n    return argument + 1  # naïve\n\n\n" * 5,
    "It's 1999 and we'll go; 3.14159 isn't 22/7!\tTabs\r\n and   spaces   ",
    "日本語のテキスト と emoji 🙂 mixed with English words, ça va? Ünïcödé",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizers")
    train_tokenizer(TEXTS * 20, folder / "bpe.json", vocab_size=400)
    (folder / "corpus.txt").write_text("\n".join(" ".join(TEXTS).splitlines() * 20))
    options = {"input": str(folder / "corpus.txt"), "vocab_size": 300, "minloglevel": 2, "hard_vocab_limit": False}
    for kind in ("bpe", "unigram"):
        sentencepiece.SentencePieceTrainer.train(model_prefix=str(folder / kind), model_type=kind, **options)
    sentencepiece.SentencePieceTrainer.train(
        model_prefix=str(folder / "spaces"),
        model_type="bpe",
        remove_extra_whitespaces=False,
        byte_fallback=True,
        allow_whitespace_only_pieces=True,
        **(options | {"vocab_size": 600}),
    )
    return folder


def test_byte_tokenizer() -> None:
    tokenizer = load_tokenizer("byte")
    assert tokenizer.encode("aé") == [97, 195, 169] and tokenizer.decode([97, 195, 169, 256]) == "aé"
    assert [ids.tolist() for ids in tokenizer.encode_batch(["a", "", "é"])] == [[97], [], [195, 169]]


@pytest.mark.parametrize("name", ["bpe.json", "bpe.model", "unigram.model"])
def test_file_tokenizers(folder: Path, name: str) -> None:
    tokenizer = load_tokenizer(folder / name)
    assert [ids.tolist() for ids in tokenizer.encode_batch(TEXTS)] == [tokenizer.encode(text) for text in TEXTS]
    assert tokenizer.decode(tokenizer.encode(TEXTS[0].strip())) == TEXTS[0].strip()
    assert 0 <= tokenizer.eod_id < tokenizer.vocab_size
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.fingerprint == tokenizer.fingerprint and again.encode(TEXTS[1]) == tokenizer.encode(TEXTS[1])


def test_byte_level_bpe_is_exact_and_deterministic(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder / "bpe.json")
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    train_tokenizer(TEXTS * 20, tmp_path / "again.json", vocab_size=400)
    assert (tmp_path / "again.json").read_bytes() == (folder / "bpe.json").read_bytes()
    assert tokenizer.vocab_size == 400 and tokenizer.eod_id == 0


def test_end_of_document_token(folder: Path) -> None:
    assert load_tokenizer(folder / "bpe.model").eod_id == 2  # </s>
    assert load_tokenizer(folder / "bpe.model", "<s>").eod_id == 1
    assert load_tokenizer(folder / "bpe.json", "a").eod_id == load_tokenizer(folder / "bpe.json").encode("a")[0]
    with pytest.raises(DataError, match="no end-of-document token named '<end>'"):
        load_tokenizer(folder / "bpe.json", "<end>")


def test_folder_and_added_tokens(folder: Path, tmp_path: Path) -> None:
    content = json.loads((folder / "bpe.json").read_text())
    content["added_tokens"].append(dict(content["added_tokens"][0], id=400, content="<|late|>"))
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == 401  # the added token counts
    assert len(tokenizer.encode(TEXTS[0])) > 4  # the truncation of the file is not applied


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.json", None, "no such tokenizer"),
        ("empty.json", b"", "not a usable tokenizer"),
        ("other.json", b"{}", "not a usable tokenizer"),
        ("binary.json", b"\xff\xfe", "not a usable tokenizer"),
        ("bad.model", b"version https://git-lfs.github.com/spec/v1\n", "not a usable tokenizer"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_tokenizer(tmp_path / name)
    with pytest.raises(DataError, match=r"no tokenizer.json and no tokenizer.model"):
        load_tokenizer(tmp_path)


def test_training_needs_text_and_room(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="vocabulary of 100 is too small"):
        train_tokenizer(TEXTS, tmp_path / "t.json", vocab_size=100)
    with pytest.raises(DataError, match="no text"):
        train_tokenizer([], tmp_path / "t.json", vocab_size=300)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        train_tokenizer(TEXTS, tmp_path / "file" / "t.json", vocab_size=300)


def long_text(seed: int) -> str:
    random = np.random.default_rng(seed)
    words = [*" ".join(TEXTS).split(" "), "\n", "\n\n", "  ", "x1 y", "'s", "<|endoftext|>", "▁", "é", "\u0301"]
    return " ".join(words[i] for i in random.integers(0, len(words), PIECE_CHARS))


def in_pieces(tokenizer: Tokenizer, text: str) -> list[int]:
    splitter = splitter_for(tokenizer)
    assert splitter is not None
    pieces = list(splitter(text))
    assert len(pieces) > 2 and max(map(len, pieces)) < 2 * PIECE_CHARS
    return [i for ids in tokenizer.encode_batch(pieces) for i in ids.tolist()]


@pytest.mark.parametrize("name", ["byte", "bpe.json", "bpe.model", "spaces.model"])
def test_a_long_text_in_pieces_gives_the_same_ids(folder: Path, name: str) -> None:
    tokenizer = load_tokenizer("byte" if name == "byte" else folder / name)
    text = long_text(1)
    assert in_pieces(tokenizer, text) == tokenizer.encode(text)


@pytest.mark.parametrize("name", ["bpe.json", "bpe.model", "spaces.model"])
def test_every_possible_cut_is_safe(folder: Path, name: str) -> None:
    tokenizer = load_tokenizer(folder / name)
    splitter = splitter_for(tokenizer)
    text = long_text(2)[:3000] + "".join(TEXTS)
    import re

    for match in re.finditer(r"(?<=[A-Za-z])(?=[ \n][A-Za-z])", text):
        cut = match.start()
        if splitter is not split_before_gap and text[cut] == "\n":
            continue
        left, right = text[:cut], text[cut + (splitter is split_dropping_space) :]
        near = slice(max(0, cut - 200), None)
        whole = tokenizer.encode(text[near][:600])
        parts = tokenizer.encode(left[near]) + tokenizer.encode(right)
        assert whole[:-20] == parts[: len(whole) - 20]


def variant(folder: Path, path: Path, **changes: object) -> HFTokenizer:
    content = json.loads((folder / "bpe.json").read_text())
    path.write_text(json.dumps(content | changes))
    return HFTokenizer(path)


def test_where_no_cut_is_known_to_be_safe(folder: Path, tmp_path: Path) -> None:
    def split(pattern: str) -> dict[str, object]:
        return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}

    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    llama3 = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )
    path = tmp_path / "t.json"
    assert splitter_for(variant(folder, path, pre_tokenizer=byte_level)) is None
    assert splitter_for(variant(folder, path, pre_tokenizer=None)) is None
    sequence = {"type": "Sequence", "pretokenizers": [split(r"[a-z ]+"), byte_level | {"use_regex": True}]}
    assert splitter_for(variant(folder, path, pre_tokenizer=sequence)) is None
    assert splitter_for(variant(folder, path, normalizer={"type": "Prepend", "prepend": "_"})) is None
    prefixed = variant(folder, path, pre_tokenizer=byte_level | {"use_regex": True, "add_prefix_space": True})
    assert splitter_for(prefixed) is split_before_space
    assert in_pieces(prefixed, long_text(3)) == prefixed.encode(long_text(3))
    known = {"type": "Sequence", "pretokenizers": [split(llama3), byte_level]}
    tokenizer = variant(folder, path, pre_tokenizer=known, normalizer={"type": "NFC"})
    assert in_pieces(tokenizer, long_text(4)) == tokenizer.encode(long_text(4))
    token = json.loads((folder / "bpe.json").read_text())["added_tokens"][0]
    assert splitter_for(variant(folder, path, added_tokens=[token, dict(token, id=1, content="a b")])) is None
    assert splitter_for(load_tokenizer(folder / "unigram.model")) is None
    assert isinstance(load_tokenizer(folder / "unigram.model"), SentencePieceTokenizer)


def test_a_text_without_safe_places_stays_whole() -> None:
    text = "x" * (3 * PIECE_CHARS)
    assert list(split_before_gap(text)) == [text]
    assert "".join(split_before_gap(long_text(5))) == long_text(5)
    assert "".join(ByteTokenizer().decode(ids) for ids in ByteTokenizer().encode_batch([text])) == text
