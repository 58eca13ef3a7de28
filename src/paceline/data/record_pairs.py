"""A preference pair by its keys: two answers, and a prompt that is said in one of several ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.data.json_lines import type_name
from paceline.data.messages import read_answer, read_messages, read_tools
from paceline.data.record_columns import (
    PROMPTS,
    Layout,
    column_text,
    first_of,
    named_keys,
    parted,
    read_history,
    with_system,
)
from paceline.data.records import BadRowError, Message, Messages, Preference, Tools

REFERENCE = ("ref_chosen_logps", "ref_rejected_logps")
"""Where a pair may carry the reference model's log-probabilities."""
LARGEST = (2 - 2**-23) * 2.0**127
"""The largest finite float32, which such numbers become."""


def read_pair(row: Mapping[str, Any], has: set[str], turns: str, columns: Mapping[str, str]) -> Preference:
    """A preference pair by its keys; the prompt may be turns, a text, or the common beginning of two lists of turns."""
    tools = read_tools(row.get("tools"))
    chosen, rejected = _side(row, has, "chosen"), _side(row, has, "rejected")
    system = row.get(columns["system"])
    if turns and chosen is None:
        return _rejected_beside(row, rejected, with_system(read_messages(row[turns]), system), system, tools)
    if chosen is None or rejected is None:
        raise BadRowError(
            "no answer", f"{'chosen' if chosen is None else 'rejected'} is missing; it has {named_keys(row)}"
        )
    prompt = _pair_prompt(row, has, turns)
    if not prompt:
        same = _common(chosen, rejected)
        prompt, chosen, rejected = chosen[:same], chosen[same:], rejected[same:]
    elif chosen[: len(prompt)] == rejected[: len(prompt)] == prompt:
        # some sets repeat the prompt's turns in both answers
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    return preference(row, prompt=with_system(prompt, system), chosen=chosen, rejected=rejected, tools=tools)


def _side(row: Mapping[str, Any], has: set[str], side: str) -> Messages | None:
    key = first_of(has, (side, f"{side}_messages", f"{side}_response"))
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
        raise BadRowError("no answer", f"rejected is missing; it has {named_keys(row)}")
    prompt, chosen = parted(messages)
    if len(rejected) > 1:
        rejected = with_system(rejected, system)
        same = _common(rejected, messages)
        prompt, chosen, rejected = messages[:same], messages[same:], rejected[same:]
    return preference(row, prompt=prompt, chosen=chosen, rejected=rejected, tools=tools)


def _common(a: Messages, b: Messages) -> int:
    """How many turns two lists share at their beginning; the last of each is an answer and is never shared."""
    limit = min(len(a), len(b)) - 1
    return next((i for i in range(limit) if a[i] != b[i]), max(0, limit))


def _pair_prompt(row: Mapping[str, Any], has: set[str], turns: str) -> Messages:
    if turns:
        return read_messages(row[turns], what=turns)
    key = first_of(has, PROMPTS)
    if not key:
        return ()
    if isinstance(row[key], list):
        return read_messages(row[key], what=key)
    more = {"query": "input"} if key != "input" else {}
    layout = Layout(formatting="alpaca", columns={"prompt": key, "history": "history", **more})
    parts = [column_text(row, layout, "prompt"), column_text(row, layout, "query", needed=False)]
    prompt = "\n".join(part for part in parts if part)
    return (*read_history(row.get("history")), Message(role="user", content=prompt))


def preference(row: Mapping[str, Any], **parts: Any) -> Preference:
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
