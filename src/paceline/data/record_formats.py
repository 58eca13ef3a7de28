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
from typing import Any

from paceline.data.batch import IGNORE_INDEX
from paceline.data.json_lines import type_name
from paceline.data.messages import MEDIA, read_answer, read_messages, read_tools, refuse_media
from paceline.data.record_columns import (
    LABELS,
    PROMPTS,
    RESPONSES,
    SYSTEMS,
    TURNS,
    Layout,
    column_text,
    first_of,
    named_keys,
    parted,
    read_history,
    with_system,
)
from paceline.data.record_pairs import preference, read_pair
from paceline.data.records import (
    BadRowError,
    Conversation,
    Judged,
    Message,
    Messages,
    Record,
    Text,
    Tokenized,
)


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
    columns = {"tools": "tools", "system": first_of(has, SYSTEMS) or "system"}
    if label := first_of({key for key in has if isinstance(row[key], bool)}, LABELS):
        columns["kto_tag"] = label
    if any(f"{side}{end}" in has for side in ("chosen", "rejected") for end in ("", "_messages", "_response")):
        return read_pair(row, has, turns, columns)
    if turns:
        return _turns(row, Layout(formatting="sharegpt", columns={**columns, "messages": turns}))
    prompt = first_of(has, PROMPTS)
    response = first_of(has - {prompt}, RESPONSES)
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
        raise BadRowError("no answer", f"a prompt ({prompt!r}) and no answer beside it; it has {named_keys(row)}")
    if empty := first_of(row.keys() - has, (*TURNS, *PROMPTS, *RESPONSES)):
        raise BadRowError("no text", f"{empty!r} is null; it has {named_keys(row)}")
    raise BadRowError("unknown format", f"it has {named_keys(row)}")


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
        return preference(row, prompt=messages, chosen=chosen, rejected=rejected, tools=tools)
    if "kto_tag" in layout.columns:
        prompt, answer = parted(messages)
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


def _desirable(row: Mapping[str, Any], layout: Layout) -> bool:
    value = layout.get(row, "kto_tag")
    if not isinstance(value, bool):
        raise BadRowError(
            "no label", f"{layout.columns['kto_tag']!r} is {type_name(value)}, true or false was expected"
        )
    return value


# ---- one exchange


def _alpaca(row: Mapping[str, Any], layout: Layout) -> Record:
    parts = [column_text(row, layout, "prompt"), column_text(row, layout, "query", needed=False)]
    prompt = "\n".join(part for part in parts if part)
    if not layout.ranking and "response" not in layout.columns:
        return Text(pieces=((prompt, True),))
    past = with_system(read_history(layout.get(row, "history")), layout.get(row, "system"))
    turns = (*past, Message(role="user", content=prompt))
    tools = read_tools(layout.get(row, "tools"))
    if layout.ranking:
        chosen = read_answer(layout.get(row, "chosen"), layout.tags, what="chosen")
        rejected = read_answer(layout.get(row, "rejected"), layout.tags, what="rejected")
        return preference(row, prompt=turns, chosen=chosen, rejected=rejected, tools=tools)
    answer = (Message(role="assistant", content=column_text(row, layout, "response")),)
    if "kto_tag" in layout.columns:
        return Judged(prompt=turns, answer=answer, desirable=_desirable(row, layout), tools=tools)
    return Conversation(messages=turns + answer, tools=tools)


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
