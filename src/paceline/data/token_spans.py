"""Which characters does each token stand for? Encoding with places, for masks over text.

Special tokens written in the text (``<|im_end|>``) become their own ids, as chat templates mean them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.data.tokenizer import ByteTokenizer, HFTokenizer, Tokenizer
from paceline.errors import DataError

BYTE_END = "<|endoftext|>"
"""How templates write the end-of-document token of the byte tokenizer, which has no text of its own."""


class Spans(NamedTuple):
    """n tokens of a text."""

    ids: NDArray[np.int32]
    """[n]"""
    starts: NDArray[np.int64]
    """[n], the first character; the bytes of one character all have its place"""
    ends: NDArray[np.int64]
    """[n], one past the last character; equal to the start where a token stands for no character"""


def encode_spans(tokenizer: Tokenizer, text: str) -> Spans:
    """The ids of a text and the characters that each covers.

    Raises:
        DataError: a SentencePiece ``.model``: it cannot say which of its ids a template's markers are.
    """
    if isinstance(tokenizer, HFTokenizer):
        encoding = tokenizer.backend.encode(text, add_special_tokens=False)
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        return Spans(np.array(encoding.ids, dtype=np.int32), offsets[:, 0], offsets[:, 1])
    if isinstance(tokenizer, ByteTokenizer):
        return _bytes(text)
    raise DataError(
        f"{tokenizer.name}: conversations need a tokenizer.json",
        evidence="A SentencePiece .model reads the markers of a chat template as plain text.",
        next_step="Set data.tokenizer to the tokenizer.json of the same model, or to the folder that holds it.",
    )


def _bytes(text: str) -> Spans:
    ids: list[int] = []
    places: list[int] = []
    start = 0
    for number, piece in enumerate(text.split(BYTE_END)):
        if number:
            ids.append(ByteTokenizer.eod_id)
            places.append(start)
            start += len(BYTE_END)
        for character in piece:
            content = character.encode("utf-8")
            ids += content
            places += [start] * len(content)
            start += 1
    starts = np.array(places, dtype=np.int64)
    widths = np.where(np.array(ids) == ByteTokenizer.eod_id, len(BYTE_END), 1)
    return Spans(np.array(ids, dtype=np.int32), starts, starts + widths)


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Texts that stand for control tokens -> ids."""
    if isinstance(tokenizer, HFTokenizer):
        added = tokenizer.backend.get_added_tokens_decoder()
        return {token.content: int(i) for i, token in added.items() if token.special}
    return {BYTE_END: ByteTokenizer.eod_id} if isinstance(tokenizer, ByteTokenizer) else {}


def inside(spans: Spans, characters: list[tuple[int, int]]) -> NDArray[np.bool_]:
    """[n]: tokens that share a character with one of the half-open ranges, or stand for none and lie within it."""
    found = np.zeros(len(spans.ids), dtype=bool)
    for start, end in characters:
        overlap = (spans.ends > start) & (spans.starts < end)
        found |= overlap | ((spans.starts == spans.ends) & (spans.starts >= start) & (spans.starts < end))
    return found
