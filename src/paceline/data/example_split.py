"""Which examples are held out? `data.split` over rows: by content, so that nothing held out is trained on too."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.data.example_cache import Examples
from paceline.data.gpt_index import split_ranges


def split_members(
    examples: Examples, members: Sequence[NDArray[np.int64]], split: str, seed: int
) -> list[tuple[NDArray[np.int64], ...]]:
    """For each part of ``split`` the members of each source, in their order.

    The different contents of a source are shuffled, those of many examples first, and cut where the examples up to
    there come nearest to the shares. Examples with the same tokens are on one side: copies of a row, one that was drawn
    several times, and a file that is named twice. Of a content that several sources have, the first one decides.

    Args:
        members: of each source the numbers of its examples, ascending.
    """
    contents = _contents(examples, members)
    side = np.full(len(examples), -1, dtype=np.int8)  # by content
    for of_source in members:
        distinct, copies = np.unique(contents[of_source], return_counts=True)
        is_new = side[distinct] < 0
        new, copies = distinct[is_new], copies[is_new]
        order = np.random.default_rng((seed, 1)).permutation(len(new))
        # small contents last: the cuts are among them, and so come nearer to the shares
        order = order[np.argsort(-copies[order], kind="stable")]
        upto = np.concatenate([[0], np.cumsum(copies[order])])
        for part, cut in enumerate(split_ranges(split, int(upto[-1]))):
            start, stop = (int(np.argmin(np.abs(upto - bound))) for bound in (cut.start, cut.stop))
            side[new[order[start:stop]]] = part
    count = len(split_ranges(split, 0))
    return [tuple(one[side[contents[one]] == part] for one in members) for part in range(count)]


def _contents(examples: Examples, members: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """[N], the number of the first example among ``members`` with the same tokens; its own for the others.

    What is learned of the tokens does not count: a judged answer and its opposite verdict belong together.
    """
    found = np.arange(len(examples))
    wanted = np.unique(np.concatenate([found[:0], *members]))
    # of 64 bits: should two contents meet by chance, they are on one side, which harms nobody
    hashes = np.array([_hash(examples, int(number)) for number in wanted], dtype=np.uint64)
    _, first, which = np.unique(hashes, return_index=True, return_inverse=True)
    found[wanted] = wanted[first[which]]
    return found


def _hash(examples: Examples, number: int) -> int:
    begin = number * examples.width
    end = begin + examples.width
    content = hashlib.blake2b(examples.lengths[begin:end].tobytes(), digest_size=8)
    content.update(examples.tokens[int(examples.starts[begin]) : int(examples.starts[end])].tobytes())
    return int.from_bytes(content.digest(), "little")
