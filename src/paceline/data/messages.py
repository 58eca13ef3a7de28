"""Turns of conversations, as data sets write them, to messages: roles, contents, tool calls, tools.

Both spellings are read: ``{"role", "content"}`` and ``{"from", "value"}``, with the role names in use for each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from paceline.data.json_lines import type_name
from paceline.data.records import BadRowError, Message, Messages, Role, Tools

CALL = "function call"
"""Not a role of its own: an assistant turn whose text is the call."""

ROLE_NAMES: Mapping[str, str] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "tool": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "function": "tool",
    "function_call": CALL,
    "tool_call": CALL,
}
"""What a role may be called where no tags are given."""
MEDIA = ("images", "videos", "audios", "image", "video", "audio")
_KEPT = ("name", "tool_call_id", "reasoning_content", "thinking")


@dataclass(frozen=True, kw_only=True)
class Tags:
    """Where a message has its role and text, and what its roles are called."""

    role_key: str = ""
    """empty = ``role`` or ``from``, whichever is there"""
    content_key: str = ""
    """empty = ``content`` or ``value``"""
    roles: Mapping[str, str] | None = None
    """name in the data -> role (or `CALL`); None = `ROLE_NAMES`"""


ANY_TAGS = Tags()


def read_messages(value: object, tags: Tags = ANY_TAGS, *, what: str = "messages") -> Messages:
    """A list of turns; calls next to each other become one assistant turn with several calls.

    Raises:
        BadRowError: it is no list of objects, a role is not known, a content is no text, a call is no JSON.
    """
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise BadRowError("not a list of turns", f"{what!r} is {type_name(value)}")
    messages: list[Message] = []
    joins = False  # whether the turn before was a call that another call joins
    for number, item in enumerate(value, start=1):
        message, is_call = _message(item, tags, f"turn {number}")
        if is_call and joins:
            last = messages.pop()
            calls = (*last.tool_calls, *message.tool_calls)
            message = Message(role="assistant", content=last.content, tool_calls=calls, more=last.more)
        messages.append(message)
        joins = is_call
    return tuple(messages)


def read_answer(value: object, tags: Tags = ANY_TAGS, *, what: str) -> Messages:
    """An answer: its text, one turn, or a list of turns."""
    if isinstance(value, str):
        return (Message(role="assistant", content=value),)
    return read_messages([value] if isinstance(value, Mapping) else value, tags, what=what)


def _message(item: object, tags: Tags, where: str) -> tuple[Message, bool]:
    """(the message, whether its text is a call)"""
    if not isinstance(item, Mapping):
        raise BadRowError("not a turn", f"{where} is {type_name(item)}, an object was expected")
    role, name = _role(item, tags, where)
    key = tags.content_key or ("content" if "content" in item else "value")
    content = _content(item.get(key), role, where, missing=key not in item and not item.get("tool_calls"))
    more = {k: item[k] for k in _KEPT if item.get(k) is not None}
    if role == CALL:
        calls = read_calls(content, where)
        return Message(role="assistant", content="", tool_calls=calls, more=more, trained=_trained(item, where)), True
    tool_calls = read_calls(item.get("tool_calls") or [], where)
    if tool_calls and role != "assistant":
        raise BadRowError("unreadable tool call", f"{where} is a {name} turn, only assistants call tools")
    assert role in ("system", "user", "assistant", "tool")
    known: Role = role  # type: ignore[assignment]
    return (
        Message(role=known, content=content, tool_calls=tool_calls, more=more, trained=_trained(item, where)),
        False,
    )


def _role(item: Mapping[str, Any], tags: Tags, where: str) -> tuple[str, str]:
    key = tags.role_key or ("role" if "role" in item else "from")
    name = item.get(key)
    roles = ROLE_NAMES if tags.roles is None else tags.roles
    if not isinstance(name, str):
        if key in item:
            raise BadRowError("turn without a role", f"{key!r} of {where} is {type_name(name)}, text was expected")
        seen = ", ".join(map(repr, list(item)[:6])) or "no keys"
        raise BadRowError("turn without a role", f"{where} has no {key!r}; it has {seen}")
    if name not in roles:
        near = get_close_matches(name.lower(), roles, n=1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise BadRowError("unknown role", f"{where} is of {name!r}; known are {', '.join(roles)}{meant}")
    return roles[name], name


def _content(value: object, role: str, where: str, *, missing: bool) -> str:
    if missing:
        raise BadRowError("turn without text", f"{where} has no content")
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence):
        return "".join(_part(part, where) for part in value)
    if role in ("tool", CALL):
        return json.dumps(value, ensure_ascii=False)
    raise BadRowError("turn without text", f"the content of {where} is {type_name(value)}")


def _part(part: object, where: str) -> str:
    """A piece of a content that is a list: ``{"type": "text", "text": ...}``."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise BadRowError("turn without text", f"{where} has a part that is {type_name(part)}")
    if part.get("type", "text") != "text":
        raise BadRowError(
            "images, audio or video", f"{where} has a part of type {part.get('type')!r}; text is read alone"
        )
    text = part.get("text", part.get("value"))
    if not isinstance(text, str):
        raise BadRowError("turn without text", f"{where} has a part of type 'text' without it")
    return text


def _trained(item: Mapping[str, Any], where: str) -> bool:
    """``loss`` (a truth value), ``loss_scale`` or ``loss_weight`` (0 or 1), where a turn has one."""
    for key in ("loss", "loss_scale", "loss_weight"):
        value = item.get(key)
        if value is None:
            continue
        if value in (0, 1):  # True and False too
            return bool(value)
        raise BadRowError("weight of a turn", f"{key} = {value!r} of {where}; 0 and 1 are possible")
    return True


def read_calls(value: object, where: str) -> Tools:
    """Calls as a JSON text or as objects: ``{"name", "arguments"}``, or those under ``"function"``."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise BadRowError("unreadable tool call", f"{where} is no JSON: {str(error)[:120]}") from None
    calls = [value] if isinstance(value, Mapping) else value
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise BadRowError("unreadable tool call", f"{where} is {type_name(value)}")
    return tuple(_call(call, where) for call in calls)


def _call(call: object, where: str) -> dict[str, Any]:
    inner = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        raise BadRowError("unreadable tool call", f"{where} has a call without a name")
    arguments = inner.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise BadRowError("unreadable tool call", f"the arguments of {where} are no JSON") from None
    found: dict[str, Any] = {"type": "function", "function": {"name": inner["name"], "arguments": arguments}}
    if isinstance(call, Mapping) and isinstance(call.get("id"), str):
        found["id"] = call["id"]
    return found


def read_tools(value: object) -> Tools:
    """Descriptions of tools: a list or its JSON text; a bare function is put under ``"function"``."""
    if value is None or value == "" or value == []:
        return ()
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise BadRowError("unreadable tools", f"no JSON: {str(error)[:120]}") from None
    tools = [value] if isinstance(value, Mapping) else value
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise BadRowError("unreadable tools", f"{type_name(value)} where a list was expected")
    return tuple(_tool(tool) for tool in tools)


def _tool(tool: object) -> Mapping[str, Any]:
    inner = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        raise BadRowError("unreadable tools", "a tool without a name")
    return {"type": "function", "function": dict(inner)}


def refuse_media(row: Mapping[str, Any], columns: Sequence[str] = MEDIA) -> None:
    """Pictures, sounds and films are no text."""
    for column in columns:
        value = row.get(column)
        if value:
            count = len(value) if isinstance(value, Sequence) and not isinstance(value, str) else 1
            raise BadRowError("images, audio or video", f"{count} under {column!r}; text is read alone")
