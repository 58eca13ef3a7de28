from __future__ import annotations

import random

import pytest

from paceline.data import dedup
from paceline.data.dedup import exact_hash, signature


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 6, 40, 700])
def test_a_long_text_has_the_same_hashes_in_pieces(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    words = random.Random(size).choices(["one", "Two,", "drei", "\u0394\u039f\u03a3", "x", "--"], k=size)
    text = "  \n".join(words) + " \t "
    whole = exact_hash(text), signature(text).tolist()
    for piece in (1, 5, 64):
        monkeypatch.setattr(dedup, "_PIECE", piece)
        assert (exact_hash(text), signature(text).tolist()) == whole
