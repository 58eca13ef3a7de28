"""Which examples fit into a sequence of the model, and what is done with the others?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.data.bad_rows import BadRow, Tally, apply_policy
from paceline.data.example_rows import PAIRED, Selection
from paceline.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A selection that fits rows, and what that took."""

    selection: Selection
    too_long: Tally
    """examples longer than a sequence"""
    policy: str
    cut: int = 0
    """of these, cut to fit"""
    equal: int = 0
    """of these, pairs whose answers are the same after the cut: left out, they teach nothing"""

    @property
    def left_out(self) -> int:
        return self.too_long.bad - self.cut

    def told(self) -> list[str]:
        """What was done, with how many: ``["1 example longer than a sequence cut", "2 examples ... left out"]``."""
        other = self.left_out - self.equal
        return [
            f"{_many(count)} longer than a sequence {done}"
            for count, done in (
                (self.cut, "cut"),
                (other, "left out" if self.policy == "drop" else "left out, no answer would be left of them"),
                (self.equal, "left out, equal answers after the cut"),
            )
            if count
        ]


def _many(count: int) -> str:
    return f"{count:,} example{'' if count == 1 else 's'}"


def fit(selection: Selection, seq_len: int, policy: str, *, what: str = "the data") -> Fitted:
    """Refuses, cuts or leaves out what is longer than a sequence of ``seq_len`` tokens.

    A pair must fit into one sequence, a judged answer twice (with its mismatched one): they are cut at the end of their
    answers. One of which no answer would be left is left out, and so is a pair whose answers the cut makes equal.

    Raises:
        DataError: an example is too long and the policy is ``refuse``, or nothing is left.
    """
    sizes = selection.sizes
    tally = Tally(rows=len(sizes))
    kept = np.ones(len(sizes), dtype=bool)
    lengths = selection.lengths.copy()
    cut = equal = 0
    for member in np.flatnonzero(sizes > seq_len).tolist():
        path, line = selection.examples.place(int(selection.members[member]))
        detail = f"{sizes[member]:,} tokens{_counted(selection.task)}, train.seq_len = {seq_len:,}"
        kept[member] = False
        if policy == "truncate":
            lengths[member] = _cut(lengths[member], seq_len, selection.task)
            has_answer = _has_answer(selection, member, lengths[member])
            same = has_answer and _is_equal(selection, member, lengths[member])
            kept[member] = has_answer and not same
            cut, equal = cut + int(kept[member]), equal + int(same)
            why = "equal answers after the cut" if same else "its answer begins beyond"
            detail += "; cut" if kept[member] else f"; left out, {why}"
        tally.add(BadRow(path=path, line=line, kind="longer than a sequence", detail=detail))
    if policy == "refuse":
        apply_policy(tally, "refuse", what)
    if not kept.any():
        raise DataError(
            f"{what}: no example fits into train.seq_len = {seq_len:,}"
            + (f"; of {equal:,} the answers are equal after the cut" if equal else ""),
            evidence=tally.listing(3) or "There are none.",
            next_step="Raise train.seq_len.",
        )
    chosen = Selection(
        examples=selection.examples, members=selection.members[kept], lengths=lengths[kept], task=selection.task
    )
    return Fitted(selection=chosen, too_long=tally, policy=policy, cut=cut, equal=equal)


def _counted(task: str) -> str:
    return " with its mismatched answer" if task == "kto" else " of both answers" if task in PAIRED else ""


def _cut(lengths: NDArray[np.int64], seq_len: int, task: str) -> NDArray[np.int64]:
    if task == "kto":
        return np.minimum(lengths, seq_len // 2)
    if len(lengths) == 1:
        return np.minimum(lengths, seq_len)
    half, shorter = seq_len // 2, int(lengths.min())
    return np.minimum(lengths, seq_len - shorter if shorter <= half else half)


def _has_answer(selection: Selection, member: int, lengths: NDArray[np.int64]) -> bool:
    width = selection.examples.width
    first = int(selection.members[member]) * width
    return all(selection.examples.document(first + which).answer_start < lengths[which] for which in range(width))


def _is_equal(selection: Selection, member: int, lengths: NDArray[np.int64]) -> bool:
    """Whether what is kept of both answers of a pair is the same."""
    if selection.examples.width < 2:
        return False
    first = int(selection.members[member]) * 2
    chosen, rejected = (selection.examples.document(first + side).ids[: lengths[side]] for side in range(2))
    return np.array_equal(chosen, rejected)
