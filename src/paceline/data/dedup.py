"""Which documents repeat earlier ones, exactly or nearly?

The first of a group of duplicates, in document order, is kept; the result does not depend on the number of workers.

- Exact: the same text after collapsing white space (64-bit hash).
- Near: MinHash over shingles of five words, letters and digits only, lower case. 128 hashes in 16 bands of 8 find
  candidates (a pair of Jaccard similarity 0.8 is found with probability 0.95, one of 0.5 with 0.06); of these,
  documents that agree in at least 80 % of the hashes are dropped (standard error of that estimate at 0.8: 3.5 points).

Memory: about 2.5 kB for each kept document, in the parent process. Source of the method: Broder, "On the resemblance
and containment of documents", 1997.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

NUM_HASHES = 128
NUM_BANDS = 16
THRESHOLD = 0.8
SHINGLE_WORDS = 5

_WORD = re.compile(r"\w+")
_SPACE = re.compile(r"\s")
_PIECE = 1 << 18  # characters looked at together
_BLOCK = 2048  # shingles hashed at a time: 2 MB of 64-bit products
_MULTIPLIERS = np.random.RandomState(20).randint(0, 2**62, NUM_HASHES).astype(np.uint64) * np.uint64(2) + np.uint64(1)
_OFFSETS = np.random.RandomState(21).randint(0, 2**62, NUM_HASHES).astype(np.uint64)
_WORD_FACTORS = np.random.RandomState(22).randint(0, 2**62, SHINGLE_WORDS).astype(np.uint64) * np.uint64(2) + np.uint64(
    1
)


def _pieces(text: str) -> Iterator[str]:
    """A long text cut at white space: a list of its words would take ten times its size."""
    start = 0
    while len(text) - start > _PIECE and (gap := _SPACE.search(text, start + _PIECE)):
        yield text[start : gap.start()]
        start = gap.start()
    yield text[start:]


def exact_hash(text: str) -> int:
    """64 bits of the text with white space collapsed."""
    digest = hashlib.blake2b(digest_size=8)
    gap = ""
    for piece in _pieces(text):
        if words := piece.split():
            digest.update((gap + " ".join(words)).encode())
            gap = " "
    return int.from_bytes(digest.digest(), "little")


def signature(text: str) -> NDArray[np.uint32]:
    """MinHash signature, uint32 [NUM_HASHES]."""
    best = np.full(NUM_HASHES, np.iinfo(np.uint32).max, dtype=np.uint32)
    words = np.zeros(0, dtype=np.uint64)
    found = False
    for piece in _pieces(text):
        # the shingles that lie across two pieces begin in the last words of the first
        words = np.concatenate((words[-(SHINGLE_WORDS - 1) :], _word_hashes(piece)))
        if len(words) >= SHINGLE_WORDS:
            _add_shingles(best, words)
            found = True
    if not found:
        few = words if len(words) else np.array([zlib.crc32(text.encode())], dtype=np.uint64)
        _add_shingles(best, np.concatenate((few, np.zeros(SHINGLE_WORDS - len(few), dtype=np.uint64))))
    return best


def _word_hashes(text: str) -> NDArray[np.uint64]:
    known: dict[str, int] = {}
    hashes = []
    for word in _WORD.findall(text.lower()):
        if word not in known:
            known[word] = zlib.crc32(word.encode())
        hashes.append(known[word])
    return np.array(hashes, dtype=np.uint64)


def _add_shingles(best: NDArray[np.uint32], words: NDArray[np.uint64]) -> None:
    """Lowers the minima in ``best`` to those of the shingles of these words."""
    count = len(words) - SHINGLE_WORDS + 1
    shingles = sum(words[i : i + count] * _WORD_FACTORS[i] for i in range(SHINGLE_WORDS))
    assert isinstance(shingles, np.ndarray)
    shingles = np.unique(shingles ^ (shingles >> np.uint64(29)))
    for start in range(0, len(shingles), _BLOCK):
        # multiply-shift hashing: the upper half of a product with an odd number
        products = shingles[start : start + _BLOCK, None] * _MULTIPLIERS + _OFFSETS
        np.minimum(best, (products >> np.uint64(32)).astype(np.uint32).min(axis=0), out=best)


class Deduplicator:
    """Sees documents in order and says which to keep."""

    def __init__(self) -> None:
        self.num_exact = 0
        self.num_near = 0
        self._seen: set[int] = set()
        self._bands: dict[bytes, list[int]] = {}
        self._signatures: list[NDArray[np.uint32]] = []

    def keep(self, exact: NDArray[np.uint64], signatures: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Whether to keep each of these documents."""
        return np.array([self._keep(int(e), s) for e, s in zip(exact, signatures, strict=True)], dtype=bool)

    def _keep(self, exact: int, own: NDArray[np.uint32]) -> bool:
        if exact in self._seen:
            self.num_exact += 1
            return False
        self._seen.add(exact)
        keys = [bytes([band]) + part.tobytes() for band, part in enumerate(own.reshape(NUM_BANDS, -1))]
        candidates = {number for key in keys for number in self._bands.get(key, ())}
        if any(float(np.mean(self._signatures[number] == own)) >= THRESHOLD for number in candidates):
            self.num_near += 1
            return False
        for key in keys:
            self._bands.setdefault(key, []).append(len(self._signatures))
        self._signatures.append(own)
        return True
