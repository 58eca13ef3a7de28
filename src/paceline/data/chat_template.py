"""How does a conversation become text? The chat template of a tokenizer, or a named one.

Templates are Jinja, written for Hugging Face tokenizers; they are run as there: blocks trimmed, in a sandbox (they come
with downloaded models), with ``raise_exception``, ``tojson`` and ``{% generation %}`` at hand. ``strftime_now`` gives
one fixed day, so that the same data are the same tokens on every day.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.data.kept_tokenizer import TEMPLATE_FILES, TOOL_TEMPLATE
from paceline.data.named_templates import NAMED, OTHER_NAMES
from paceline.data.records import BadRowError, Message
from paceline.data.token_spans import BYTE_END
from paceline.data.tokenizer import Tokenizer
from paceline.errors import DataError

DAY = datetime(2024, 7, 26, tzinfo=UTC)
"""What ``strftime_now`` tells: the day that Llama's templates take where they are told none."""
_TELLS_NONE = re.compile(r"content['\"]?\]? is (not )?none", re.IGNORECASE)
"""In templates for which a turn without text has None for it."""
_BEGIN, _END = "\x02paceline generation\x03", "\x02paceline end of generation\x03"


class Rendered(NamedTuple):
    text: str
    generated: list[tuple[int, int]]
    """characters within ``{% generation %}`` blocks, in order; empty where the template has none"""


class ChatTemplate:
    """A compiled template; can be sent to other processes.

    Args:
        name: for messages.
        special: ``bos_token``, ``eos_token`` and so on, as texts.
        with_tools: another source for conversations with tools, where the tokenizer has one.
    """

    def __init__(self, name: str, source: str, special: Mapping[str, str], *, with_tools: str = "") -> None:
        self.name = name
        self.source = source
        self.special = dict(special)
        self.with_tools = with_tools

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self.name, self.source, self.special, self.with_tools))

    @property
    def fingerprint(self) -> str:
        """sha256 of all that decides what is rendered."""
        content = json.dumps([self.source, self.special, self.with_tools, DAY.isoformat()], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def marks_answers(self) -> bool:
        """Whether the template says itself what the assistant's part is."""
        return "endgeneration" in self.source

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, prompt: bool = False
    ) -> Rendered:
        """The text of a conversation.

        Args:
            prompt: end with what stands before an answer of the assistant.
        Raises:
            BadRowError: the template refuses the conversation, or fails on it.
        """
        compiled = self._compiled_with_tools if tools and self.with_tools else self._compiled
        turns = [message.for_template() for message in messages]
        if "tool_call_id" in self.source or "tool_call_id" in self.with_tools:
            _number_calls(turns)
        if _TELLS_NONE.search(self.source):
            _without_empty_texts(turns)
        values = {
            "messages": turns,
            "tools": [dict(tool) for tool in tools] or None,
            "documents": None,
            "add_generation_prompt": prompt,
            **self.special,
        }
        try:
            try:
                text = compiled.render(values)
            except TypeError:
                # some templates join the arguments of a call to text: they want them as JSON
                if not _arguments_to_text(turns):
                    raise
                text = compiled.render(values)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise BadRowError(
                "refused by the chat template", f"{self.name}: {str(error) or type(error).__name__}"
            ) from error
        return _without_marks(text)

    @cached_property
    def _compiled(self) -> jinja2.Template:
        return _compile(self.name, self.source)

    @cached_property
    def _compiled_with_tools(self) -> jinja2.Template:
        return _compile(self.name, self.with_tools)


def _rebuild(name: str, source: str, special: Mapping[str, str], with_tools: str) -> ChatTemplate:
    return ChatTemplate(name, source, special, with_tools=with_tools)


def _without_marks(marked: str) -> Rendered:
    if _BEGIN not in marked:
        return Rendered(marked, [])
    text, ranges = "", []
    first, *rest = marked.split(_BEGIN)
    text += first
    for piece in rest:
        inner, _, outer = piece.partition(_END)
        ranges.append((len(text), len(text) + len(inner)))
        text += inner + outer
    return Rendered(text, ranges)


def _number_calls(turns: list[dict[str, Any]]) -> None:
    """Ids for calls and answers that have none, in order: some templates refuse calls without."""
    number, open_calls = 0, []
    for turn in turns:
        for call in turn.get("tool_calls", ()):
            call.setdefault("id", f"call{number:05d}")
            number += 1
            open_calls.append(call["id"])
        if turn["role"] == "tool" and open_calls:
            turn.setdefault("tool_call_id", open_calls[0])
            open_calls.pop(0)


def _without_empty_texts(turns: list[dict[str, Any]]) -> None:
    """The text of a turn that only calls is None, not empty."""
    for turn in turns:
        if turn.get("tool_calls") and not turn["content"]:
            turn["content"] = None


def _arguments_to_text(turns: list[dict[str, Any]]) -> bool:
    """Writes the arguments of calls as JSON; whether there are any."""
    calls = [call for turn in turns for call in turn.get("tool_calls", ())]
    for call in calls:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        call["function"] = {**call["function"], "arguments": arguments}
    return bool(calls)


# ---- Jinja as chat templates expect it


class _Generation(Extension):
    """``{% generation %}`` ... ``{% endgeneration %}``: what it holds is the assistant's."""

    tags = {"generation"}  # noqa: RUF012 - the name and type are Jinja's

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{_BEGIN}{caller()}{_END}"


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _compile(name: str, source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = DAY.strftime
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise DataError(
            f"the chat template {name} is not valid Jinja",
            evidence=f"Line {error.lineno}: {error.message}.",
            next_step="Mend it, or set data.template to a named one: " + ", ".join(NAMED) + ".",
        ) from error


# ---- finding it


def load_template(template: str, tokenizer: Tokenizer) -> ChatTemplate:
    """The template named in a recipe.

    Args:
        template: empty = the tokenizer's own, beside its file; a name of `NAMED`; or the path of a Jinja file.
    Raises:
        DataError: the tokenizer has none, or there is no such name or file.
    """
    folder = Path(tokenizer.name).parent
    special = _special_texts(folder, tokenizer)
    if not template:
        return _own_template(folder, tokenizer, special)
    return ChatTemplate(template, template_source(template), special)


def template_source(template: str) -> str:
    """The Jinja text that `data.template` names: a name of `NAMED`, or the path of a file.

    Raises:
        DataError: there is no such name or file.
    """
    name = OTHER_NAMES.get(template, template)
    if name in NAMED:
        return NAMED[name]
    path = Path(template)
    if path.is_file():
        return _read_text(path)
    near = get_close_matches(template, [*NAMED, *OTHER_NAMES], n=1)
    raise DataError(
        f"data.template = {template!r} is no template",
        evidence=f"Known: {', '.join([*NAMED, *OTHER_NAMES])}; any other text is the path of a Jinja file, and there "
        "is none of this name.",
        next_step=f"Did you mean {near[0]!r}?" if near else "Choose one, or leave it out for the tokenizer's own.",
    )


def _own_template(folder: Path, tokenizer: Tokenizer, special: Mapping[str, str]) -> ChatTemplate:
    sources = {} if tokenizer.name == "byte" else _sources(folder)
    if "default" not in sources:
        where = "The byte tokenizer has none." if tokenizer.name == "byte" else f"Looked for {_looked_for(folder)}."
        raise DataError(
            f"the tokenizer {tokenizer.name} has no chat template",
            evidence=where,
            next_step=f"Set data.template to the one that the model was trained with: {', '.join(NAMED)}, or the "
            "path of a Jinja file. A model that was never trained on turns takes any; chatml is a good choice.",
        )
    return ChatTemplate(f"of {tokenizer.name}", sources["default"], special, with_tools=sources.get("tool_use", ""))


def _looked_for(folder: Path) -> str:
    return ", ".join(str(folder / name) for name in TEMPLATE_FILES)


def _sources(folder: Path) -> dict[str, str]:
    """Templates by name: ``default``, perhaps ``tool_use``."""
    found: dict[str, str] = {}
    for name in reversed(TEMPLATE_FILES):  # the first of the list has the last word
        path = folder / name
        if not path.is_file():
            continue
        if path.suffix == ".jinja":
            found["default"] = _read_text(path)
            continue
        value = _read_json(path).get("chat_template")
        if isinstance(value, str):
            found["default"] = value
        elif isinstance(value, list):
            named = {str(item["name"]): str(item["template"]) for item in value if isinstance(item, Mapping)}
            found |= named
    more = folder / TOOL_TEMPLATE
    if more.is_file():
        found["tool_use"] = _read_text(more)
    return found


def _special_texts(folder: Path, tokenizer: Tokenizer) -> dict[str, str]:
    """``eos_token`` and its like, as `tokenizer_config.json` names them; the end of a document stands in for eos."""
    if tokenizer.name == "byte":
        return {"bos_token": "", "eos_token": BYTE_END}
    path = folder / "tokenizer_config.json"
    found: dict[str, str] = {}
    for key, value in (_read_json(path) if path.is_file() else {}).items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if key.endswith("_token") and isinstance(text, str):
            found[key] = text
    return {"bos_token": "", "eos_token": tokenizer.decode([tokenizer.eod_id]), **found}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read", evidence=str(error), next_step="Copy the file again.") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read_text(path))
    except ValueError as error:
        raise DataError(f"{path}: not JSON", evidence=str(error), next_step="Copy the file again.") from error
    return value if isinstance(value, dict) else {}
