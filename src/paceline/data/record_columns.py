"""What do columns of rows say, whatever the format: their names in use, texts, earlier exchanges, the system prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paceline.data.json_lines import type_name
from paceline.data.messages import ANY_TAGS, Tags
from paceline.data.records import BadRowError, Message, Messages

TURNS = ("messages", "conversations", "conversation")
PROMPTS = ("instruction", "prompt", "query", "question", "problem", "input")
RESPONSES = (
    "output",
    "response",
    "completion",
    "answer",
    "target",
    "targets",
    "answer_key",
    "answers",
    "solution",
    "text",
    "content",
)
LABELS = ("kto_tag", "label")
SYSTEMS = ("system", "system_prompt")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How one data set is laid out: which column means what. A column that is not listed is not there."""

    formatting: Literal["alpaca", "sharegpt", "openai"]
    columns: Mapping[str, str]
    """our name (prompt, query, response, history, messages, system, tools, images, videos, audios, chosen, rejected,
    kto_tag) -> the key in a row"""
    ranking: bool = False
    """rows are preference pairs"""
    tags: Tags = ANY_TAGS

    def get(self, row: Mapping[str, Any], name: str) -> Any:
        column = self.columns.get(name)
        return None if column is None else row.get(column)


def named_keys(row: Mapping[str, Any]) -> str:
    """The first keys of a row, for a message."""
    seen = (f"{key!r}{' (null)' if row[key] is None else ''}" for key in list(row)[:8])
    return ", ".join(seen) or "no keys"


def first_of(has: set[str], names: Sequence[str]) -> str:
    """The first of ``names`` that there is; empty if there is none."""
    return next((name for name in names if name in has), "")


def column_text(row: Mapping[str, Any], layout: Layout, name: str, *, needed: bool = True) -> str:
    """The text of a column of the layout.

    Raises:
        BadRowError: it is no text, or is needed and not there.
    """
    column = layout.columns.get(name)
    value = None if column is None else row.get(column)
    if value is None:
        if needed:
            raise BadRowError("missing key", f"no {column or name!r}; it has {named_keys(row)}")
        return ""
    if not isinstance(value, str):
        raise BadRowError("not text", f"{column!r} is {type_name(value)}")
    return value


def read_history(value: object) -> Messages:
    """Earlier exchanges, a list of [user, assistant], as turns.

    Raises:
        BadRowError: it is no such list.
    """
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise BadRowError("not a list of turns", f"'history' is {type_name(value)}")
    messages: list[Message] = []
    for item in value:
        if not isinstance(item, Sequence) or len(item) != 2 or not all(isinstance(text, str) for text in item):
            raise BadRowError("not a list of turns", "'history' holds something else than pairs of texts")
        messages += [Message(role="user", content=item[0]), Message(role="assistant", content=item[1])]
    return tuple(messages)


def with_system(messages: Messages, system: object) -> Messages:
    """The prompt of a ``system`` column goes first, unless the turns bring their own."""
    if not system or (messages and messages[0].role == "system"):
        return messages
    if not isinstance(system, str):
        raise BadRowError("not text", f"the system prompt is {type_name(system)}")
    return (Message(role="system", content=system), *messages)


def parted(messages: Messages) -> tuple[Messages, Messages]:
    """(prompt, the last turn)"""
    if not messages or messages[-1].role != "assistant":
        raise BadRowError("turns out of order", "the last turn is not the assistant's, an answer is needed")
    return messages[:-1], messages[-1:]
