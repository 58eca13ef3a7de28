"""Cuts a very long text where a tokenizer cannot tell, so that it is encoded in bounded memory with the same ids.

A cut is made before a space (or line feed) that stands between two ASCII letters. It is safe where

- byte-level and word tokenizers (`tokenizer.json`): the pre-tokenizer is one whose pattern always ends a match between
  a letter and a space and starts one at that space whatever came before, the normalizer looks at neighbouring
  characters only as far as Unicode composition does (an ASCII letter after a space composes with nothing), and no
  added token holds such a place. Known patterns are listed below; anything else is encoded whole.
- SentencePiece BPE: no piece of the vocabulary crosses from a character into a following space, so no merge does. With
  a dummy prefix the space itself is dropped from the cut and comes back as the prefix of the next piece.

SentencePiece unigram models are encoded whole: the library adds up scores in single precision over the whole text, so
equal ids in pieces cannot be proved. The same holds for a `tokenizer.json` without a pre-tokenizer.
`encode` limits what is encoded whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from paceline.data.tokenizer import ByteTokenizer, HFTokenizer, SentencePieceTokenizer, Tokenizer

Splitter = Callable[[str], Iterator[str]]

PIECE_CHARS = 1 << 16
"""Length of a piece, in characters, when there is a safe place soon after."""

_CUT = re.compile(r"(?<=[A-Za-z])(?=[ \n][A-Za-z])")
_CUT_SPACE = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])")
_INNER_CUT = re.compile(r"[A-Za-z][ \n][A-Za-z]")

_NEUTRAL_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents"}
_WORD_PRE_TOKENIZERS = {"Whitespace", "WhitespaceSplit", "BertPreTokenizer", "Digits", "Punctuation"}

_DIGITS = frozenset({r"\p{N}{1,3}", r"\p{N}"})
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
KNOWN_PATTERNS = frozenset(
    {
        # GPT-2
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        # cl100k, Llama 3
        _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        # Qwen 2 and later
        _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)


def splitter_for(tokenizer: Tokenizer) -> Splitter | None:
    """How to cut a long text for this tokenizer; None where no safe cut is known, and it is encoded whole."""
    if isinstance(tokenizer, ByteTokenizer):
        return split_anywhere
    if isinstance(tokenizer, HFTokenizer):
        description = json.loads(tokenizer.backend.to_str())
        if not _is_local(description):
            return None
        return split_before_space if _adds_prefix_space(description) else split_before_gap
    if isinstance(tokenizer, SentencePieceTokenizer):
        return _sentencepiece_splitter(tokenizer)
    return None


def split_anywhere(text: str) -> Iterator[str]:
    for start in range(0, len(text), PIECE_CHARS):
        yield text[start : start + PIECE_CHARS]


def split_before_gap(text: str) -> Iterator[str]:
    """Before a space or a line feed."""
    return _split_before(text, _CUT)


def split_before_space(text: str) -> Iterator[str]:
    return _split_before(text, _CUT_SPACE)


def split_dropping_space(text: str) -> Iterator[str]:
    """Before a space, which is left out."""
    start = 0
    for cut in _cuts(text, _CUT_SPACE):
        yield text[start:cut]
        start = cut + 1
    yield text[start:]


def _split_before(text: str, pattern: re.Pattern[str]) -> Iterator[str]:
    start = 0
    for cut in _cuts(text, pattern):
        yield text[start:cut]
        start = cut
    yield text[start:]


def _cuts(text: str, pattern: re.Pattern[str]) -> Iterator[int]:
    position = PIECE_CHARS
    while position < len(text) and (match := pattern.search(text, position)):
        yield match.start()
        position = match.start() + PIECE_CHARS


def _is_local(description: dict[str, Any]) -> bool:
    """Whether a tokenizer.json meets the conditions above."""
    normalizers = _flatten(description.get("normalizer"), "normalizers")
    if any(part["type"] not in _NEUTRAL_NORMALIZERS for part in normalizers):
        return False
    for token in description.get("added_tokens", []):
        content = token["content"]
        if _INNER_CUT.search(content):
            return False
        absorbs = token.get("lstrip") or token.get("rstrip") or token.get("single_word")
        if absorbs and re.search(r"^[A-Za-z\s]|[A-Za-z\s]$", content):
            return False
    pre_tokenizers = _flatten(description.get("pre_tokenizer"), "pretokenizers")
    return any(map(_ends_between_letter_and_space, pre_tokenizers)) and all(map(_looks_nearby, pre_tokenizers))


def _looks_nearby(part: dict[str, Any]) -> bool:
    """Whether what it does on one side of a cut does not depend on the other side."""
    if part["type"] == "Split":
        pattern = part["pattern"].get("Regex")
        return pattern in KNOWN_PATTERNS or pattern in _DIGITS
    return part["type"] in _WORD_PRE_TOKENIZERS | {"ByteLevel"}


def _adds_prefix_space(description: dict[str, Any]) -> bool:
    """Then a piece must begin with a real space, or it would be given one."""
    parts = _flatten(description.get("pre_tokenizer"), "pretokenizers")
    return any(part["type"] == "ByteLevel" and part.get("add_prefix_space") for part in parts)


def _flatten(part: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [leaf for child in part[key] for leaf in _flatten(child, key)]
    return [part]


def _ends_between_letter_and_space(part: dict[str, Any]) -> bool:
    if part["type"] == "ByteLevel":
        return bool(part.get("use_regex", True))
    if part["type"] == "Split":
        known = part["pattern"].get("Regex") in KNOWN_PATTERNS
        return known and part.get("behavior") == "Isolated" and not part.get("invert")
    return part["type"] in {"Whitespace", "WhitespaceSplit", "BertPreTokenizer"}


_UNIGRAM, _BPE = 1, 2
_SPACE = "\u2581"


def _sentencepiece_splitter(tokenizer: SentencePieceTokenizer) -> Splitter | None:
    model = tokenizer.backend
    trainer, normalizer = {}, {}
    for number, value in _fields(model.serialized_model_proto()):
        if number == 2 and isinstance(value, bytes):
            trainer = dict(_fields(value))
        elif number == 3 and isinstance(value, bytes):
            normalizer = dict(_fields(value))
    # field numbers of sentencepiece_model.proto: TrainerSpec 3 model_type, 24 treat_whitespace_as_suffix;
    # NormalizerSpec 3 add_dummy_prefix, 4 remove_extra_whitespaces, 5 escape_whitespaces (all true unless written)
    if trainer.get(3, _UNIGRAM) != _BPE or trainer.get(24, 0) or not normalizer.get(5, 1):
        return None
    pieces = (model.id_to_piece(i) for i in range(model.vocab_size()))
    if any(re.search(rf"[^{_SPACE} ][{_SPACE} ]", piece) for piece in pieces):
        return None
    if normalizer.get(3, 1):
        return split_dropping_space
    return None if normalizer.get(4, 1) else split_before_space


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of a protobuf message: enough to read a few settings without a generated class."""
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = message[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    while position < len(message):
        key = varint()
        number, wire = key >> 3, key & 7
        if wire == 0:
            yield number, varint()
            continue
        length = varint() if wire == 2 else {1: 8, 5: 4}[wire]
        yield number, message[position : position + length]
        position += length
