"""What is one example of post-training data? Conversations, preference pairs, judged answers and ready-made text.

Whatever file an example comes from (`record_formats` reads them), it is one of the five records here; what follows
(`chat_template`, `chat_mask`, `documents`) knows no file format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
EMPTY = "empty assistant turn"
"""Kind of a row whose answer has nothing to learn."""
ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")


class BadRowError(ValueError):
    """A row that cannot be used. Not for the user as it is: whoever reads files adds file and line.

    Args:
        kind: a few words, the same for all rows with this fault.
        detail: the values.
    """

    def __init__(self, kind: str, detail: str) -> None:
        self.kind = kind
        self.detail = detail
        super().__init__(kind, detail)

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


@dataclass(frozen=True, kw_only=True)
class Message:
    """One turn. ``tool_calls`` are those of an assistant: ``{"type": "function", "function": {"name", "arguments"}}``
    with the arguments as an object."""

    role: Role
    content: str
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)
    """other keys that templates read: ``name``, ``tool_call_id``, ``reasoning_content``"""
    trained: bool = True
    """False: an assistant turn that the data say is not to be learned"""

    @property
    def is_empty(self) -> bool:
        return not self.content.strip() and not self.tool_calls

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it."""
        message: dict[str, Any] = {"role": self.role, "content": self.content, **self.more}
        if self.tool_calls:
            message["tool_calls"] = [dict(call) for call in self.tool_calls]
        return message


Messages = tuple[Message, ...]
Tools = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Turns to learn from; the last one is the assistant's."""

    messages: Messages
    tools: Tools = ()


@dataclass(frozen=True, kw_only=True)
class Preference:
    """Two answers to one prompt, the first one better."""

    prompt: Messages
    chosen: Messages
    rejected: Messages
    tools: Tools = ()
    reference_logps: tuple[float, float] | None = None
    """sums of log-probabilities of chosen and rejected under the reference model, where the data have them"""
    margin: float | None = None
    """by how much the chosen answer is better, where the data say so"""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One answer to a prompt, and whether it is a good one."""

    prompt: Messages
    answer: Messages
    desirable: bool
    tools: Tools = ()


@dataclass(frozen=True, kw_only=True)
class Text:
    """Text with no turns: pieces, and whether each is learned. Plain text is one piece that is."""

    pieces: tuple[tuple[str, bool], ...]


@dataclass(frozen=True, kw_only=True)
class Tokenized:
    """Token ids that somebody made already. ``trained[t]``: token t is learned (from those before it)."""

    ids: tuple[int, ...]
    trained: tuple[bool, ...]


Record = Conversation | Preference | Judged | Text | Tokenized

NAMES: Mapping[type, str] = {
    Conversation: "a conversation",
    Preference: "a preference pair",
    Judged: "a judged answer",
    Text: "text",
    Tokenized: "token ids",
}
TASKS: Mapping[str, tuple[type, ...]] = {
    "pretrain": (Conversation, Text, Tokenized),
    "sft": (Conversation, Text, Tokenized),
    "dpo": (Preference,),
    "orpo": (Preference,),
    "reward": (Preference,),
    "kto": (Judged,),
}
"""The records that each task learns from."""
SUITS: Mapping[type, str] = {
    Conversation: "sft",
    Preference: "dpo, orpo or reward",
    Judged: "kto",
    Text: "sft",
    Tokenized: "sft",
}


def check_record(record: Record, task: str) -> None:
    """Refuses what a task cannot learn from.

    Raises:
        BadRowError: another kind of record than the task needs, turns out of order, an empty or missing answer, a pair
            of equal answers, nothing that is trained.
    """
    if not isinstance(record, TASKS[task]):
        kind = NAMES[type(record)]
        raise BadRowError("record of another task", f"{kind}, which is for task.kind = {SUITS[type(record)]}")
    if isinstance(record, Conversation):
        check_turns(record.messages, answered=True)
        if not any(message.role == "assistant" and message.trained for message in record.messages):
            raise BadRowError("nothing to learn", "no assistant turn is marked as trained")
    elif isinstance(record, Preference):
        check_turns(record.prompt + record.chosen, answered=True, start=len(record.prompt), whose="chosen")
        check_turns(record.prompt + record.rejected, answered=True, start=len(record.prompt), whose="rejected")
        if _said(record.chosen) == _said(record.rejected):
            raise BadRowError("equal answers", "chosen and rejected are the same text: there is nothing to prefer")
    elif isinstance(record, Judged):
        check_turns(record.prompt + record.answer, answered=True, start=len(record.prompt))
    elif isinstance(record, Text):
        if not any(text for text, trained in record.pieces if trained):
            raise BadRowError("nothing to learn", "the text is empty")
    elif not any(record.trained[1:]):
        raise BadRowError("nothing to learn", f"none of {len(record.ids)} token ids has a label")


def _said(messages: Messages) -> list[tuple[str, object]]:
    return [(message.content.strip(), [dict(call) for call in message.tool_calls]) for message in messages]


def check_turns(messages: Sequence[Message], *, answered: bool, start: int = 0, whose: str = "") -> None:
    """The order that chat templates are made for: an optional system turn, then user or tool and assistant in turn.

    Several tool turns may follow one call. Turns are counted from 1 in what is said.

    Args:
        answered: whether the last turn must be the assistant's (else it must not be).
        start: the answer begins at this message, which must be an assistant's; 0 = not known.
        whose: the name of the answer in messages.
    """
    turns = list(enumerate(messages, start=1))
    if turns and turns[0][1].role == "system":
        turns = turns[1:]
    if not turns:
        raise BadRowError("no turns", "there is nothing but a system prompt" if messages else "the list is empty")
    before: Role = "system"
    for number, message in turns:
        _check_order(before, message.role, number)
        if message.role == "assistant" and message.is_empty:
            name = f"the {whose} answer" if whose and number > start else f"turn {number}"
            raise BadRowError(EMPTY, f"{name} has neither text nor a tool call")
        before = message.role
    if answered != (before == "assistant"):
        what = "the last turn is the assistant's" if before == "assistant" else f"the last turn is the {before}'s"
        raise BadRowError(
            "turns out of order", what + (", an answer is needed" if answered else ", a prompt ends before")
        )
    if start and messages[start].role != "assistant":
        raise BadRowError("turns out of order", f"the answer begins with a {messages[start].role} turn")


def _check_order(before: Role, role: Role, number: int) -> None:
    if role == "system":
        raise BadRowError("turns out of order", f"turn {number} is a system turn; it can only come first")
    expected = ("assistant", "tool") if before == "tool" else ("assistant",) if before == "user" else ("user", "tool")
    if before == "system":
        expected = ("user",)
    if role not in expected:
        after = "at the start" if before == "system" else f"after {before}"
        fits = " or ".join(expected)
        raise BadRowError("turns out of order", f"turn {number}, {role}, comes {after}; {fits} fits there")
