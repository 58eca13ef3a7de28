"""Which record is a row? The formats of post-training data in use, told apart by their keys or by a description.

Where a `Layout` is given (from ``dataset_info.json``) it decides. Else the keys do, row by row:

    input_ids                                       token ids, with labels
    segments                                        pieces of text with and without loss
    messages, conversations, conversation           turns; with label or kto_tag a judged answer; with chosen and
                                                    rejected, rejected_response or rejected_messages a pair
    chosen(_messages, _response) and rejected(...)  a pair, its prompt under prompt, instruction, question or query
    prompt (or a synonym) and a response            one exchange (alpaca, query/response, prompt/completion)
    text                                            plain text
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paceline.data.batch import IGNORE_INDEX
from paceline.data.json_lines import type_name
from paceline.data.messages import ANY_TAGS, MEDIA, Tags, read_answer, read_messages, read_tools, refuse_media
from paceline.data.records import (
    BadRowError,
    Conversation,
    Judged,
    Message,
    Messages,
    Preference,
    Record,
    Text,
    Tokenized,
    Tools,
)

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
REFERENCE = ("ref_chosen_logps", "ref_rejected_logps")
"""Where a pair may carry the reference model's log-probabilities."""
LARGEST = (2 - 2**-23) * 2.0**127
"""The largest finite float32, which such numbers become."""


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


def read_record(row: Mapping[str, Any], layout: Layout | None = None) -> Record:
    """The record in a row. Whether a task can use it is another question: `records.check_record`.

    Raises:
        BadRowError: the format is not known, or a value in it is not what it should be.
    """
    if layout is not None:
        refuse_media(row, [layout.columns[name] for name in MEDIA if name in layout.columns])
        return _alpaca(row, layout) if layout.formatting == "alpaca" else _turns(row, layout)
    refuse_media(row)
    return _by_keys(row)


def _by_keys(row: Mapping[str, Any]) -> Record:
    has = {key for key, value in row.items() if value is not None}
    if "input_ids" in has:
        return _tokenized(row)
    if "segments" in has:
        return _segments(row)
    turns = next((key for key in TURNS if key in has), "")
    columns = {"tools": "tools", "system": _first(has, SYSTEMS) or "system"}
    if label := _first({key for key in has if isinstance(row[key], bool)}, LABELS):
        columns["kto_tag"] = label
    if any(f"{side}{end}" in has for side in ("chosen", "rejected") for end in ("", "_messages", "_response")):
        return _pair(row, has, turns, columns)
    if turns:
        return _turns(row, Layout(formatting="sharegpt", columns={**columns, "messages": turns}))
    prompt = _first(has, PROMPTS)
    response = _first(has - {prompt}, RESPONSES)
    if prompt and response:
        if isinstance(row[prompt], list):
            row = {**row, "messages": [*row[prompt], *_as_turns(row[response], response)]}
            return _turns(row, Layout(formatting="sharegpt", columns={**columns, "messages": "messages"}))
        names = {"prompt": prompt, "response": response, "history": "history"}
        if prompt != "input":
            names["query"] = "input"
        return _alpaca(row, Layout(formatting="alpaca", columns={**columns, **names}))
    if "text" in has:
        return _alpaca(row, Layout(formatting="alpaca", columns={"prompt": "text"}))
    if prompt:
        raise BadRowError("no answer", f"a prompt ({prompt!r}) and no answer beside it; it has {_keys(row)}")
    if empty := _first(row.keys() - has, (*TURNS, *PROMPTS, *RESPONSES)):
        raise BadRowError("no text", f"{empty!r} is null; it has {_keys(row)}")
    raise BadRowError("unknown format", f"it has {_keys(row)}")


def _keys(row: Mapping[str, Any]) -> str:
    seen = (f"{key!r}{' (null)' if row[key] is None else ''}" for key in list(row)[:8])
    return ", ".join(seen) or "no keys"


def _first(has: set[str], names: Sequence[str]) -> str:
    return next((name for name in names if name in has), "")


def _as_turns(value: object, what: str) -> list[Any]:
    """An answer after turns: its text, one turn, or a list of turns."""
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    if isinstance(value, Mapping):
        return [value]
    if not isinstance(value, Sequence):
        raise BadRowError("not text", f"{what!r} is {type_name(value)}")
    return list(value)


# ---- turns


def _turns(row: Mapping[str, Any], layout: Layout) -> Record:
    name = layout.columns.get("messages", "messages")
    value = row.get(name)
    tools = read_tools(layout.get(row, "tools"))
    messages = _exchanges(value) or read_messages(value, layout.tags, what=name)
    messages = with_system(messages, layout.get(row, "system"))
    if layout.ranking:
        chosen = read_answer(layout.get(row, "chosen"), layout.tags, what="chosen")
        rejected = read_answer(layout.get(row, "rejected"), layout.tags, what="rejected")
        return _preference(row, prompt=messages, chosen=chosen, rejected=rejected, tools=tools)
    if "kto_tag" in layout.columns:
        prompt, answer = _parted(messages)
        return Judged(prompt=prompt, answer=answer, desirable=_desirable(row, layout), tools=tools)
    return Conversation(messages=messages, tools=tools)


def _exchanges(value: object) -> Messages:
    """Turns as ``[{"human", "assistant"}]``; empty where they are not."""
    if not isinstance(value, list) or not value:
        return ()
    if not all(isinstance(item, Mapping) and {"human", "assistant"} <= item.keys() for item in value):
        return ()
    turns = [turn for item in value for turn in (("user", item["human"]), ("assistant", item["assistant"]))]
    return read_messages([{"role": role, "content": content} for role, content in turns])


def with_system(messages: Messages, system: object) -> Messages:
    """The prompt of a ``system`` column goes first, unless the turns bring their own."""
    if not system or (messages and messages[0].role == "system"):
        return messages
    if not isinstance(system, str):
        raise BadRowError("not text", f"the system prompt is {type_name(system)}")
    return (Message(role="system", content=system), *messages)


def _parted(messages: Messages) -> tuple[Messages, Messages]:
    """(prompt, the last turn)"""
    if not messages or messages[-1].role != "assistant":
        raise BadRowError("turns out of order", "the last turn is not the assistant's, an answer is needed")
    return messages[:-1], messages[-1:]


def _desirable(row: Mapping[str, Any], layout: Layout) -> bool:
    value = layout.get(row, "kto_tag")
    if not isinstance(value, bool):
        raise BadRowError(
            "no label", f"{layout.columns['kto_tag']!r} is {type_name(value)}, true or false was expected"
        )
    return value


# ---- one exchange


def _alpaca(row: Mapping[str, Any], layout: Layout) -> Record:
    parts = [_text(row, layout, "prompt"), _text(row, layout, "query", needed=False)]
    prompt = "\n".join(part for part in parts if part)
    if not layout.ranking and "response" not in layout.columns:
        return Text(pieces=((prompt, True),))
    past = with_system(_history(layout.get(row, "history")), layout.get(row, "system"))
    turns = (*past, Message(role="user", content=prompt))
    tools = read_tools(layout.get(row, "tools"))
    if layout.ranking:
        chosen = read_answer(layout.get(row, "chosen"), layout.tags, what="chosen")
        rejected = read_answer(layout.get(row, "rejected"), layout.tags, what="rejected")
        return _preference(row, prompt=turns, chosen=chosen, rejected=rejected, tools=tools)
    answer = (Message(role="assistant", content=_text(row, layout, "response")),)
    if "kto_tag" in layout.columns:
        return Judged(prompt=turns, answer=answer, desirable=_desirable(row, layout), tools=tools)
    return Conversation(messages=turns + answer, tools=tools)


def _text(row: Mapping[str, Any], layout: Layout, name: str, *, needed: bool = True) -> str:
    column = layout.columns.get(name)
    value = None if column is None else row.get(column)
    if value is None:
        if needed:
            raise BadRowError("missing key", f"no {column or name!r}; it has {_keys(row)}")
        return ""
    if not isinstance(value, str):
        raise BadRowError("not text", f"{column!r} is {type_name(value)}")
    return value


def _history(value: object) -> Messages:
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


# ---- pairs


def _pair(row: Mapping[str, Any], has: set[str], turns: str, columns: Mapping[str, str]) -> Preference:
    """A preference pair by its keys; the prompt may be turns, a text, or the common beginning of two lists of turns."""
    tools = read_tools(row.get("tools"))
    chosen, rejected = _side(row, has, "chosen"), _side(row, has, "rejected")
    system = row.get(columns["system"])
    if turns and chosen is None:
        return _rejected_beside(row, rejected, with_system(read_messages(row[turns]), system), system, tools)
    if chosen is None or rejected is None:
        raise BadRowError("no answer", f"{'chosen' if chosen is None else 'rejected'} is missing; it has {_keys(row)}")
    prompt = _pair_prompt(row, has, turns)
    if not prompt:
        same = _common(chosen, rejected)
        prompt, chosen, rejected = chosen[:same], chosen[same:], rejected[same:]
    elif chosen[: len(prompt)] == rejected[: len(prompt)] == prompt:
        # some sets repeat the prompt's turns in both answers
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    return _preference(row, prompt=with_system(prompt, system), chosen=chosen, rejected=rejected, tools=tools)


def _side(row: Mapping[str, Any], has: set[str], side: str) -> Messages | None:
    key = _first(has, (side, f"{side}_messages", f"{side}_response"))
    if not key:
        return None
    value = row[key]
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        if len(value) > 1:
            raise BadRowError("several answers", f"{key!r} has {len(value)}; a pair has one")
        value = value[0]
    return read_answer(value, what=key)


def _rejected_beside(
    row: Mapping[str, Any], rejected: Messages | None, messages: Messages, system: object, tools: Tools
) -> Preference:
    """``messages`` end with the better answer; the worse one stands beside them, alone or with all turns."""
    if rejected is None:
        raise BadRowError("no answer", f"rejected is missing; it has {_keys(row)}")
    prompt, chosen = _parted(messages)
    if len(rejected) > 1:
        rejected = with_system(rejected, system)
        same = _common(rejected, messages)
        prompt, chosen, rejected = messages[:same], messages[same:], rejected[same:]
    return _preference(row, prompt=prompt, chosen=chosen, rejected=rejected, tools=tools)


def _common(a: Messages, b: Messages) -> int:
    """How many turns two lists share at their beginning; the last of each is an answer and is never shared."""
    limit = min(len(a), len(b)) - 1
    return next((i for i in range(limit) if a[i] != b[i]), max(0, limit))


def _pair_prompt(row: Mapping[str, Any], has: set[str], turns: str) -> Messages:
    if turns:
        return read_messages(row[turns], what=turns)
    key = _first(has, PROMPTS)
    if not key:
        return ()
    if isinstance(row[key], list):
        return read_messages(row[key], what=key)
    more = {"query": "input"} if key != "input" else {}
    layout = Layout(formatting="alpaca", columns={"prompt": key, "history": "history", **more})
    parts = [_text(row, layout, "prompt"), _text(row, layout, "query", needed=False)]
    prompt = "\n".join(part for part in parts if part)
    return (*_history(row.get("history")), Message(role="user", content=prompt))


def _preference(row: Mapping[str, Any], **parts: Any) -> Preference:
    """A pair with what a row says of it beside its texts."""
    return Preference(**parts, reference_logps=_reference(row), margin=_number(row, "margin"))


def _reference(row: Mapping[str, Any]) -> tuple[float, float] | None:
    chosen, rejected = (_number(row, key) for key in REFERENCE)
    if chosen is None and rejected is None:
        return None
    if chosen is None or rejected is None:
        raise BadRowError("no label", f"{' and '.join(REFERENCE)} must both be numbers")
    return chosen, rejected


def _number(row: Mapping[str, Any], key: str) -> float | None:
    """A number that float32 holds; None where there is none."""
    value = row.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRowError("no label", f"{key!r} is {type_name(value)}, a number was expected")
    if not abs(value) <= LARGEST:  # NaN fails this too
        shown = f"{value:g}" if isinstance(value, float) else "too large"
        raise BadRowError("no label", f"{key!r} is {shown}, a finite number was expected")
    return float(value)


# ---- without turns


def _tokenized(row: Mapping[str, Any]) -> Tokenized:
    ids, labels = row["input_ids"], row.get("labels")
    for name, value in (("input_ids", ids), ("labels", labels)):
        if value is not None and not (isinstance(value, list) and all(type(item) is int for item in value)):
            raise BadRowError("unreadable token ids", f"{name!r} is no list of whole numbers")
    if any(item < 0 for item in ids):
        raise BadRowError("unreadable token ids", f"'input_ids' holds {min(ids)}")
    labels = ids if labels is None else labels
    if len(labels) != len(ids):
        raise BadRowError("unreadable token ids", f"{len(ids)} input_ids and {len(labels)} labels")
    wrong = next((i for i, label in enumerate(labels) if label not in (IGNORE_INDEX, ids[i])), None)
    if wrong is not None:
        raise BadRowError(
            "unreadable token ids", f"label {wrong} is {labels[wrong]}, neither {IGNORE_INDEX} nor the id {ids[wrong]}"
        )
    return Tokenized(ids=tuple(ids), trained=tuple(label != IGNORE_INDEX for label in labels))


def _segments(row: Mapping[str, Any]) -> Text:
    value = row["segments"]
    if not isinstance(value, list):
        raise BadRowError("not a list of turns", f"'segments' is {type_name(value)}")
    pieces = []
    for item in value:
        if not isinstance(item, Mapping) or not isinstance(item.get("text"), str):
            raise BadRowError("not text", "a segment without 'text'")
        if not isinstance(item.get("label"), bool):
            raise BadRowError("no label", "a segment without 'label', true or false")
        pieces.append((item["text"], item["label"]))
    return Text(pieces=tuple(pieces))
