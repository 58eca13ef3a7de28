"""Which characters of a rendered conversation are the assistant's own?

Where the template marks them with ``{% generation %}``, it decides. Elsewhere answer i is what a longer rendering adds
to a shorter one:

    prompt   messages[:i], with the generation prompt        must be how the whole text begins
    turn     messages[:i + 1]                                 must be how it goes on
    answer   whole[len(prompt) : len(turn)]

A template may end the last turn in another way than those before (with one more end marker), or leave out the
thoughts of answers once more turns follow. Both are recognised: the turn then ends at the last control token that both
renderings share, and begins after ``</think>``. Where an answer cannot be told even so, the conversation is refused: a
mask that is a guess would train on the wrong tokens.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from paceline.data.chat_template import ChatTemplate
from paceline.data.records import EMPTY, BadRowError, Messages

UNSTABLE = "answers cannot be told from the text"
_THOUGHT = re.compile(r"\s*<think>.*?</think>\n*", re.DOTALL)
_NO_WORDS = re.compile(r"<think>\s*</think>")


class MaskedText(NamedTuple):
    text: str
    answers: list[tuple[int, int]]
    """characters [start, end) of each wanted answer, its end marker included, in order"""


def masked_text(
    template: ChatTemplate,
    messages: Messages,
    tools: Sequence[Mapping[str, Any]],
    wanted: Sequence[int],
    special: Collection[str],
) -> MaskedText:
    """The text of a conversation, and where the answers ``messages[i]`` for i in ``wanted`` are in it.

    White space after an end marker is not the assistant's: it stops at the marker.

    Args:
        special: texts of control tokens, among them end markers.
    Raises:
        BadRowError: the template refuses the conversation, answers cannot be told, or one has no words as rendered.
    """
    whole, generated = template.render(messages, tools)
    if template.marks_answers:
        said = [i for i, message in enumerate(messages) if message.role == "assistant"]
        if len(said) != len(generated):
            raise BadRowError(
                UNSTABLE, f"{template.name} marks {len(generated)} generations for {len(said)} assistant turns"
            )
        ranges = [generated[said.index(i)] for i in wanted]
    else:
        ranges = [_answer(template, messages, tools, i, whole, special) for i in wanted]
    answers = [_to_marker(whole, start, end, special) for start, end in ranges]
    for i, (start, end) in zip(wanted, answers, strict=True):
        if start >= end:
            raise BadRowError(UNSTABLE, f"{template.name} renders turn {i + 1} as nothing")
        if not _says_something(whole[start:end], special):
            why = "leaves out the thought that is all of it" if "<think>" in messages[i].content else "renders no text"
            raise BadRowError(EMPTY, f"{template.name} {why}: turn {i + 1} would be learned as an empty answer")
    return MaskedText(whole, answers)


def _says_something(answer: str, special: Collection[str]) -> bool:
    """Whether there is more than control tokens and a thought without words."""
    rest = _NO_WORDS.sub("", answer)
    for marker in special:
        rest = rest.replace(marker, "")
    return bool(rest.strip())


def _answer(
    template: ChatTemplate,
    messages: Messages,
    tools: Sequence[Mapping[str, Any]],
    i: int,
    whole: str,
    special: Collection[str],
) -> tuple[int, int]:
    start = _start(template, messages[:i], tools, whole, special)
    if start is None:
        raise BadRowError(
            UNSTABLE, f"{template.name} renders the turns before turn {i + 1} differently once it follows"
        )
    if i == len(messages) - 1:
        return start, len(whole)
    alone = template.render(messages[: i + 1], tools).text
    for begin in _begins(alone, start):
        end = _shared_end(alone[begin:], whole[start:], special)
        if end:
            return start, start + end
    raise BadRowError(UNSTABLE, f"{template.name} renders turn {i + 1} differently once more turns follow")


def _start(
    template: ChatTemplate,
    before: Messages,
    tools: Sequence[Mapping[str, Any]],
    whole: str,
    special: Collection[str],
) -> int | None:
    """Where the answer after ``before`` begins; None where the turns before it are rendered in another way."""
    prompt = template.render(before, tools, prompt=True).text
    if whole.startswith(prompt):
        return len(prompt)
    turns = template.render(before, tools).text
    if not whole.startswith(turns):
        return None
    # the generation prompt goes on with words (an opened thought) that this answer does not have: its header is what
    # both share, up to its last control token
    shared = next(
        (i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), min(len(prompt), len(whole))
    )
    return max((place for place in _marker_ends(whole, len(turns), shared, special)), default=None)


def _marker_ends(text: str, start: int, end: int, special: Collection[str]) -> list[int]:
    """Ends of the control tokens that lie in text[start:end]."""
    found = []
    for marker in special:
        place = text.find(marker, start, end)
        while place >= 0:
            found.append(place + len(marker))
            place = text.find(marker, place + 1, end)
    return found


def _begins(alone: str, start: int) -> Iterator[int]:
    """Where the part of an answer begins that may still be there when more turns follow: with its thought, without."""
    yield start
    thought = _THOUGHT.match(alone, start)
    if thought:
        yield thought.end()


def _shared_end(alone: str, whole: str, special: Collection[str]) -> int:
    """How long the answer is that both texts begin with: all of ``alone``, or up to the last control token that they
    share where only control tokens follow it in ``alone``; 0 where it is not the same answer."""
    if whole.startswith(alone):
        return len(alone)
    shared = _length_shared(alone, whole)
    end = max(_marker_ends(whole, 0, shared, special), default=0)
    rest = alone[end:]
    for marker in special:
        rest = rest.replace(marker, "")
    return 0 if rest.strip() else end


def _length_shared(a: str, b: str) -> int:
    """Characters that two texts have in common at their beginning."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # the longest common prefix, by halves
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def _to_marker(text: str, start: int, end: int, special: Collection[str]) -> tuple[int, int]:
    """The range without white space that follows a control token at its end."""
    stripped = start + len(text[start:end].rstrip())
    if any(text.endswith(marker, start, stripped) for marker in special if marker):
        return start, stripped
    return start, end
