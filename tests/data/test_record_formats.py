"""One row of each format in use: what it means, and what is said of it when it is malformed."""

from __future__ import annotations

import json
import math
from typing import Any

import pyarrow
import pytest

from paceline.data.record_columns import Layout
from paceline.data.record_formats import read_record
from paceline.data.records import (
    BadRowError,
    Conversation,
    Judged,
    Message,
    Preference,
    Record,
    Text,
    Tokenized,
    check_record,
)

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"name": "add", "parameters": {"type": "object"}}


def turns(*pairs: tuple[str, str]) -> tuple[Message, ...]:
    return tuple(Message(role=role, content=content) for role, content in pairs)  # type: ignore[arg-type]


QUESTION, ANSWER, WORSE = ("user", "Two plus two?"), ("assistant", "Four."), ("assistant", "Five.")
ONE = Conversation(messages=turns(QUESTION, ANSWER))
LONG = Conversation(messages=turns(("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"), QUESTION, ANSWER))
PAIR = Preference(prompt=turns(QUESTION), chosen=turns(ANSWER), rejected=turns(WORSE))
GOOD = Judged(prompt=turns(QUESTION), answer=turns(ANSWER), desirable=True)
BAD = Judged(prompt=turns(QUESTION), answer=turns(WORSE), desirable=False)


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def value(who: str, text: str) -> dict[str, str]:
    return {"from": who, "value": text}


RANKED = {"prompt": "x", "chosen": "a", "rejected": "b"}
Q, A, B = said(*QUESTION), said(*ANSWER), said(*WORSE)
VALID: dict[str, tuple[dict[str, Any], Record]] = {
    "text": ({"text": "A line."}, Text(pieces=(("A line.", True),))),
    "alpaca": ({"instruction": "Two plus two?", "input": "", "output": "Four."}, ONE),
    "alpaca, input": (
        {"instruction": "Translate.", "input": "oui", "output": "yes"},
        Conversation(messages=turns(("user", "Translate.\noui"), ("assistant", "yes"))),
    ),
    "alpaca, history and system": (
        {
            "instruction": "Two plus two?",
            "output": "Four.",
            "system": "Be brief.",
            "history": [["Hi", "Hello"]],
        },
        LONG,
    ),
    "turns and an answer that is a turn": ({"prompt": [Q], "response": A}, ONE),
    "sharegpt": ({"conversations": [value("human", "Two plus two?"), value("gpt", "Four.")]}, ONE),
    "sharegpt, system column": (
        {
            "conversations": [
                value("human", "Hi"),
                value("gpt", "Hello"),
                value("human", "Two plus two?"),
                value("gpt", "Four."),
            ],
            "system": "Be brief.",
            "tools": "",
        },
        LONG,
    ),
    "ms-swift conversation": (
        {
            "system": "Be brief.",
            "conversation": [
                {"human": "Hi", "assistant": "Hello"},
                {"human": "Two plus two?", "assistant": "Four."},
            ],
        },
        LONG,
    ),
    "messages": (
        {"messages": [said("system", "Be brief."), said("user", "Hi"), said("assistant", "Hello"), Q, A]},
        LONG,
    ),
    "messages, parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Two plus two?"}]}, A]},
        ONE,
    ),
    "messages, loss of a turn": (
        {"messages": [said("user", "Hi"), {**said("assistant", "Hello"), "loss": False}, Q, A]},
        Conversation(
            messages=(
                *turns(("user", "Hi")),
                Message(role="assistant", content="Hello", trained=False),
                *turns(QUESTION, ANSWER),
            )
        ),
    ),
    "query and response": (
        {"query": "Two plus two?", "response": "Four.", "history": [["Hi", "Hello"]], "system": "Be brief."},
        LONG,
    ),
    "question and answer": ({"question": "Two plus two?", "answer": "Four."}, ONE),
    "input and target": ({"input": "Two plus two?", "target": "Four."}, ONE),
    "prompt and completion of turns": ({"prompt": [Q], "completion": [A]}, ONE),
    "pair, alpaca": ({"instruction": "Two plus two?", "input": "", "chosen": "Four.", "rejected": "Five."}, PAIR),
    "pair, sharegpt": (
        {
            "conversations": [value("human", "Two plus two?")],
            "chosen": value("gpt", "Four."),
            "rejected": value("gpt", "Five."),
        },
        PAIR,
    ),
    "pair, rejected_response": ({"messages": [Q, A], "rejected_response": "Five."}, PAIR),
    "pair, rejected_response list": ({"messages": [Q, A], "rejected_response": ["Five."]}, PAIR),
    "pair, rejected_messages": ({"messages": [Q, A], "rejected_messages": [Q, B]}, PAIR),
    "pair, chosen_messages": ({"chosen_messages": [Q, A], "rejected_messages": [Q, B]}, PAIR),
    "pair, trl texts": ({"prompt": "Two plus two?", "chosen": "Four.", "rejected": "Five."}, PAIR),
    "pair, trl turns": ({"prompt": [Q], "chosen": [A], "rejected": [B]}, PAIR),
    "pair, implicit prompt": ({"chosen": [Q, A], "rejected": [Q, B]}, PAIR),
    "pair, ultra": ({"prompt": "Two plus two?", "chosen": [Q, A], "rejected": [Q, B]}, PAIR),
    "pair, argilla": (
        {"instruction": "Two plus two?", "chosen_response": "Four.", "rejected_response": "Five."},
        PAIR,
    ),
    "pair, intel": (
        {"system": "Be brief.", "question": "Two plus two?", "chosen": "Four.", "rejected": "Five."},
        Preference(prompt=turns(("system", "Be brief."), QUESTION), chosen=turns(ANSWER), rejected=turns(WORSE)),
    ),
    "pair, margin and reference": (
        {
            "prompt": "Two plus two?",
            "chosen": "Four.",
            "rejected": "Five.",
            "margin": 0.5,
            "ref_chosen_logps": -1.0,
            "ref_rejected_logps": -2,
        },
        Preference(
            prompt=turns(QUESTION),
            chosen=turns(ANSWER),
            rejected=turns(WORSE),
            margin=0.5,
            reference_logps=(-1.0, -2.0),
        ),
    ),
    "kto, label": ({"messages": [Q, A], "label": True}, GOOD),
    "kto, kto_tag": ({"conversations": [Q, B], "kto_tag": False}, BAD),
    "kto, trl": ({"prompt": "Two plus two?", "completion": "Five.", "label": False}, BAD),
    "kto, alpaca": ({"instruction": "Two plus two?", "output": "Four.", "kto_tag": True}, GOOD),
    "token ids": (
        {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "labels": [-100, 6, 7]},
        Tokenized(ids=(5, 6, 7), trained=(False, True, True)),
    ),
    "segments": (
        {"segments": [{"label": False, "text": "<s>Hi"}, {"label": True, "text": " Hello</s>"}]},
        Text(pieces=(("<s>Hi", False), (" Hello</s>", True))),
    ),
}


@pytest.mark.parametrize("name", VALID)
def test_a_row_is_the_record_that_it_means(name: str) -> None:
    row, record = VALID[name]
    assert read_record(row) == record


@pytest.mark.parametrize("name", [name for name in VALID if "parts" not in name])
def test_parquet_says_the_same(name: str) -> None:
    """Its columns are there in every row, with null where another row has something. (Parts are no column: a text
    beside a list.)"""
    row, record = VALID[name]
    others = [dict.fromkeys(row), {"extra": 1}]
    assert read_record(pyarrow.Table.from_pylist([row, *others]).to_pylist()[0]) == record


def test_calls_and_tools() -> None:
    """The same exchange with a tool, as each family of data sets writes it."""
    text = json.dumps({"name": "add", "arguments": {"a": 1}})
    rows: list[dict[str, Any]] = [
        {
            "conversations": [
                value("human", "?"),
                value("function_call", text),
                value("observation", "3"),
                value("gpt", "Three."),
            ],
            "tools": json.dumps([TOOL]),
        },
        {
            "messages": [
                said("user", "?"),
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                said("tool", "3"),
                said("assistant", "Three."),
            ],
            "tools": [{"type": "function", "function": TOOL}],
        },
        {
            "messages": [
                said("user", "?"),
                said("tool_call", text),
                said("tool_response", "3"),
                said("assistant", "Three."),
            ],
            "tools": json.dumps([{"type": "function", "function": TOOL}]),
        },
    ]
    found = [read_record(row) for row in rows]
    for record in found:
        assert isinstance(record, Conversation)
        assert [message.role for message in record.messages] == ["user", "assistant", "tool", "assistant"]
        assert record.messages[1].tool_calls == (CALL,)
        assert record.tools == ({"type": "function", "function": TOOL},)
        check_record(record, "sft")


def test_calls_next_to_each_other_are_one_turn() -> None:
    text = json.dumps({"name": "add", "arguments": "{}"})
    row = {
        "messages": [
            said("user", "?"),
            said("tool_call", text),
            said("tool_call", text),
            said("tool", "1"),
            said("tool", "2"),
            said("assistant", "Done."),
        ]
    }
    record = read_record(row)
    assert isinstance(record, Conversation)
    assert [message.role for message in record.messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert len(record.messages[1].tool_calls) == 2
    check_record(record, "sft")


MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "no known key": ({"foo": 1}, "unknown format: it has 'foo'"),
    "a prompt alone": ({"instruction": "Two plus two?"}, "no answer"),
    "rl prompt": ({"data_source": "x", "prompt": [Q], "reward_model": {"style": "rule"}}, "no answer"),
    "text is a number": ({"text": 5}, "not text: 'text' is a number"),
    "output is a list": ({"instruction": "a", "output": ["b"]}, "not text: 'output' is a list"),
    "history of triples": ({"instruction": "a", "output": "b", "history": [["1", "2", "3"]]}, "'history'"),
    "turns are a text": ({"messages": "hello"}, "not a list of turns: 'messages' is text"),
    "a turn is a text": ({"messages": ["hello"]}, "not a turn: turn 1 is text"),
    "misspelled role": (
        {"messages": [said("asistant", "x")]},
        "unknown role: turn 1 is of 'asistant'; known are system, developer, user, human, assistant, gpt, chatgpt, "
        "tool, observation, tool_response, function, function_call, tool_call; did you mean 'assistant'?",
    ),
    "unknown role": ({"messages": [said("narrator", "x")]}, "unknown role: turn 1 is of 'narrator'; known are system"),
    "a role is a list": (
        {"messages": [{"role": ["user"], "content": "x"}]},
        "turn without a role: 'role' of turn 1 is a list, text was expected",
    ),
    "a null text": ({"text": None}, "no text: 'text' is null"),
    "null turns": ({"id": 1, "messages": None}, "no text: 'messages' is null; it has 'id', 'messages' (null)"),
    "a null answer": ({"prompt": "x", "response": None}, "no answer beside it; it has 'prompt', 'response' (null)"),
    "a number after turns": ({"prompt": [Q], "response": 5}, "not text: 'response' is a number"),
    "true after turns": ({"prompt": [Q], "response": True}, "not text: 'response' is a boolean"),
    "an object after turns": (
        {"prompt": [Q], "response": {"content": "x"}},
        "turn without a role: turn 2 has no 'from'; it has 'content'",
    ),
    "no role": ({"messages": [{"content": "x"}]}, "turn without a role"),
    "no content": ({"messages": [{"role": "user"}]}, "turn without text: turn 1 has no content"),
    "content is a number": ({"messages": [{"role": "user", "content": 5}]}, "the content of turn 1 is a number"),
    "a call is no JSON": (
        {"messages": [Q, said("function_call", "add(1)")]},
        "unreadable tool call: turn 2 is no JSON",
    ),
    "a call without a name": ({"messages": [Q, said("function_call", "{}")]}, "a call without a name"),
    "arguments are no JSON": (
        {"messages": [Q, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]},
        "the arguments of turn 2 are no JSON",
    ),
    "tools are no JSON": ({"messages": [Q, A], "tools": "[{"}, "unreadable tools"),
    "images": ({"messages": [Q, A], "images": ["a.png"]}, "images, audio or video: 1 under 'images'"),
    "an image part": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}, A]},
        "images, audio or video: turn 1 has a part of type 'image'",
    ),
    "half a weight": ({"messages": [Q, {**A, "loss_scale": 0.5}]}, "weight of a turn: loss_scale = 0.5 of turn 2"),
    "rejected missing": ({"prompt": "x", "chosen": "Four."}, "no answer: rejected is missing"),
    "chosen missing": ({"prompt": "x", "rejected": "Four."}, "no answer: chosen is missing"),
    "several rejected": ({"messages": [Q, A], "rejected_response": ["a", "b"]}, "several answers"),
    "half a reference": (
        {"prompt": "x", "chosen": "a", "rejected": "b", "ref_chosen_logps": -1.0},
        "must both be numbers",
    ),
    "infinite margin": ({**RANKED, "margin": math.inf}, "'margin' is inf, a finite number was expected"),
    "margin beyond float32": ({**RANKED, "margin": 3.5e38}, "'margin' is 3.5e+38, a finite number"),
    "margin beyond any float": ({**RANKED, "margin": 10**400}, "'margin' is too large, a finite number"),
    "reference without a number": (
        {**RANKED, "ref_chosen_logps": math.nan, "ref_rejected_logps": -1},
        "'ref_chosen_logps' is nan, a finite number was expected",
    ),
    "reference is true": (
        {**RANKED, "ref_chosen_logps": True, "ref_rejected_logps": -1},
        "'ref_chosen_logps' is a boolean, a number was expected",
    ),
    "margin is text": ({"prompt": "x", "chosen": "a", "rejected": "b", "margin": "1"}, "'margin' is text"),
    "labels of another length": ({"input_ids": [1, 2], "labels": [1]}, "2 input_ids and 1 labels"),
    "labels of other ids": ({"input_ids": [1, 2], "labels": [-100, 3]}, "label 1 is 3"),
    "negative ids": ({"input_ids": [1, -2]}, "holds -2"),
    "segment without label": ({"segments": [{"text": "a"}]}, "no label"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_row_says_why(name: str) -> None:
    row, why = MALFORMED[name]
    with pytest.raises(BadRowError) as error:
        read_record(row)
    assert why in str(error.value)


UNUSABLE: dict[str, tuple[dict[str, Any], str, str]] = {
    "pair for sft": (
        VALID["pair, trl texts"][0],
        "sft",
        "a preference pair, which is for task.kind = dpo, orpo or reward",
    ),
    "conversation for dpo": (VALID["messages"][0], "dpo", "a conversation, which is for task.kind = sft"),
    "conversation for kto": (VALID["alpaca"][0], "kto", "record of another task"),
    "empty answer": ({"messages": [Q, said("assistant", " ")]}, "sft", "empty assistant turn: turn 2 has neither"),
    "empty chosen": ({"prompt": "x", "chosen": "", "rejected": "b"}, "dpo", "the chosen answer has neither"),
    "empty rejected": ({"prompt": "x", "chosen": "a", "rejected": ""}, "orpo", "the rejected answer has neither"),
    "equal answers": ({"prompt": "x", "chosen": "same", "rejected": "same "}, "dpo", "equal answers"),
    "ends with the user": ({"messages": [Q, A, Q]}, "sft", "the last turn is the user's"),
    "two user turns": ({"messages": [Q, Q, A]}, "sft", "turn 2, user, comes after user; assistant fits there"),
    "two answers": ({"messages": [Q, A, A]}, "sft", "turn 3, assistant, comes after assistant"),
    "begins with the answer": ({"messages": [A]}, "sft", "turn 1, assistant, comes at the start; user fits there"),
    "a late system turn": ({"messages": [Q, said("system", "x"), A]}, "sft", "it can only come first"),
    "nothing": ({"messages": []}, "sft", "no turns: the list is empty"),
    "nothing trained": ({"messages": [Q, {**A, "loss": False}]}, "sft", "nothing to learn"),
    "prompt ends with an answer": ({"prompt": [Q, A], "chosen": [A], "rejected": [B]}, "dpo", "turns out of order"),
    "empty text": ({"text": ""}, "sft", "the text is empty"),
    "ids without labels": ({"input_ids": [1, 2], "labels": [-100, -100]}, "sft", "none of 2 token ids has a label"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_row_that_a_task_cannot_learn_from_says_why(name: str) -> None:
    row, task, why = UNUSABLE[name]
    with pytest.raises(BadRowError) as error:
        check_record(read_record(row), task)
    assert why in str(error.value)


def test_a_description_decides_over_keys() -> None:
    layout = Layout(formatting="alpaca", columns={"prompt": "q", "response": "a"})
    row = {"q": "Two plus two?", "a": "Four.", "history": [["not", "listed"]], "instruction": "nor this"}
    assert read_record(row, layout) == ONE
