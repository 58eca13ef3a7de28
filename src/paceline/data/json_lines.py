"""The text in a line of JSON lines."""

from __future__ import annotations

import codecs
import json

MISSING_KEY = "missing key"
LONG_LINE = 1 << 22
"""Bytes; a longer line of JSON is parsed with memory in mind."""


def parse(line: str, key: str) -> str | tuple[str, str] | tuple[str, str, tuple[str, ...]]:
    """The text of a JSON line, or (kind of problem, detail, keys with text)."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        return "malformed JSON", f"{error.msg} at column {error.colno}"
    except RecursionError:
        return "malformed JSON", "nested too deeply"
    except ValueError as error:  # JSON has no limit to the digits of an integer, Python has
        return "unreadable number", str(error).partition(";")[0]
    if not isinstance(record, dict):
        return "malformed JSON", f"{type_name(record)} where an object was expected"
    if key not in record:
        others = sorted((k for k, value in record.items() if isinstance(value, str)), key=lambda k: -len(record[k]))
        seen = ", ".join(map(repr, list(record)[:8])) or "no keys"
        return MISSING_KEY, f"no {key!r}; it has {seen}", tuple(others[:4])
    text = record[key]
    if not isinstance(text, str):
        return "not text", f"{key!r} is {type_name(text)}"
    return text


def parse_long(line: bytes, key: str) -> str | None:
    """As `parse`, in less memory: one character beyond U+FFFF makes a str take four bytes a character, so the line is
    parsed with a character for each byte, and only the text becomes a wide str.

    None where this does not apply or something is wrong with the line.
    """
    if line.isascii() or b"\\u" in line:  # an escape may stand for a character that looks like a byte
        return None
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for start in range(0, len(line), LONG_LINE):
            decoder.decode(line[start : start + LONG_LINE], final=start + LONG_LINE >= len(line))
    except UnicodeDecodeError:
        return None
    narrow = line.decode("latin-1")
    del line
    wanted = key.encode("utf-8", "surrogateescape").decode("latin-1")
    try:
        value = json.loads(narrow)[wanted]
    except (ValueError, RecursionError, KeyError, TypeError):
        return None
    if not isinstance(value, str) or len(value) < len(narrow) // 2:
        return None
    del narrow
    content = value.encode("latin-1")
    del value
    return content.decode("utf-8")


def type_name(value: object) -> str:
    names = {
        type(None): "null",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), "text" if isinstance(value, str) else type(value).__name__)
