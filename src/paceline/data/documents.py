"""A record to documents: token ids, and which of them are learned.

    sft     one document: the conversation, its answers learned as `data.mask` says
    dpo, orpo, reward   two: prompt and chosen answer, prompt and rejected answer
    kto     one: prompt and answer; whoever packs adds the mismatched ones

Tokens after the last learned one are left out (nothing is predicted from them), so that a document ends with its
answer's end marker. Where a template ends answers with no control token, the end-of-document token is added and
learned: without it a model would never learn to stop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.data.chat_mask import masked_text
from paceline.data.chat_template import ChatTemplate
from paceline.data.named_templates import MARKERS, OTHER_NAMES
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
    check_record,
)
from paceline.data.token_spans import encode_spans, inside, special_tokens
from paceline.data.tokenizer import Tokenizer
from paceline.errors import DataError

Mask = Literal["assistant", "last", "all"]


class Document(NamedTuple):
    """n tokens that see only each other."""

    ids: NDArray[np.int32]
    """[n]"""
    trained: NDArray[np.bool_]
    """[n]: token t is learned, from the tokens before it; never the first one"""

    @property
    def answer_start(self) -> int:
        """The first learned token: what stands before it is the prompt."""
        return int(np.argmax(self.trained))


class Example(NamedTuple):
    """What becomes of one record."""

    documents: tuple[Document, ...]
    desirable: int = -1
    """1 or 0 for a judged answer"""
    reference_logps: tuple[float, float] | None = None
    margin: float | None = None


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Encodes records for one task; can be sent to other processes.

    Args:
        template: or why there is none: raised where a record has turns (text and token ids need none).
        task: a task of `records.TASKS`.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | DataError
    task: str
    mask: Mask = "assistant"
    _special: dict[str, int] = field(default_factory=dict, compare=False)
    _places: set[str] = field(default_factory=set, compare=False)
    """what the template was seen to have a place for"""

    def __post_init__(self) -> None:
        self._special.update(special_tokens(self.tokenizer))

    @property
    def loose_markers(self) -> tuple[str, ...]:
        """Markers of a named template that this tokenizer reads as several tokens each."""
        if isinstance(self.template, DataError):
            return ()
        name = OTHER_NAMES.get(self.template.name, self.template.name)
        return tuple(marker for marker in MARKERS.get(name, ()) if len(self.tokenizer.encode(marker)) > 1)

    def encode(self, record: Record) -> Example:
        """The documents of a record.

        Raises:
            BadRowError: the task cannot learn from it, or the template not render it.
            DataError: the template has no place for what the record has: a system prompt, tools, their answers.
        """
        check_record(record, self.task)
        if isinstance(record, Text):
            return Example((self._text(record),))
        if isinstance(record, Tokenized):
            return Example((self._tokenized(record),))
        template = self._template_for(record)
        if isinstance(record, Preference):
            chosen = self._answer(template, record.prompt, record.chosen, record.tools)
            rejected = self._answer(template, record.prompt, record.rejected, record.tools)
            if np.array_equal(chosen.ids, rejected.ids):
                raise BadRowError("equal answers", "chosen and rejected are the same tokens once rendered")
            return Example((chosen, rejected), reference_logps=record.reference_logps, margin=record.margin)
        if isinstance(record, Judged):
            document = self._answer(template, record.prompt, record.answer, record.tools)
            return Example((document,), desirable=int(record.desirable))
        said = [i for i, message in enumerate(record.messages) if message.role == "assistant" and message.trained]
        wanted = said[-1:] if self.mask == "last" else said
        return Example((self._conversation(template, record.messages, record.tools, wanted),))

    def _answer(self, template: ChatTemplate, prompt: Messages, answer: Messages, tools: Tools) -> Document:
        messages = prompt + answer
        wanted = [i for i in range(len(prompt), len(messages)) if messages[i].role == "assistant"]
        return self._conversation(template, messages, tools, wanted, whole=False)

    def _conversation(
        self, template: ChatTemplate, messages: Messages, tools: Tools, wanted: Sequence[int], *, whole: bool = True
    ) -> Document:
        text, answers = masked_text(template, messages, tools, wanted, self._special)
        _refuse_surrogates(text)
        spans = encode_spans(self.tokenizer, text)
        if self.mask == "all" and whole:
            trained = np.ones(len(spans.ids), dtype=bool)
        else:
            trained = inside(spans, answers)
        ids = spans.ids
        if not trained.any():
            raise BadRowError("nothing to learn", "the answer has no token")
        kept = int(np.flatnonzero(trained)[-1]) + 1
        ids, trained = ids[:kept], trained[:kept]
        last_is_answer = wanted[-1] == len(messages) - 1
        if last_is_answer and not self._ends(ids):
            ids, trained = np.append(ids, np.int32(self.tokenizer.eod_id)), np.append(trained, True)
        return _document(ids, trained)

    def _ends(self, ids: NDArray[np.int32]) -> bool:
        """Whether a control token is at the end, perhaps before white space."""
        controls = {*self._special.values(), self.tokenizer.eod_id}
        tail = ids[-4:].tolist()
        while tail and tail[-1] not in controls and not self.tokenizer.decode(tail[-1:]).strip():
            tail.pop()
        return bool(tail) and tail[-1] in controls

    def _text(self, record: Text) -> Document:
        text = "".join(piece for piece, _ in record.pieces)
        _refuse_surrogates(text)
        ranges, place = [], 0
        for piece, learned in record.pieces:
            if learned:
                ranges.append((place, place + len(piece)))
            place += len(piece)
        if all(learned for _, learned in record.pieces):
            # no places are needed, so any tokenizer will do
            ids = np.array(self.tokenizer.encode(text), dtype=np.int32)
            trained = np.ones(len(ids), dtype=bool)
        else:
            spans = encode_spans(self.tokenizer, text)
            ids, trained = spans.ids, inside(spans, ranges)
        if record.pieces[-1][1] and not self._ends(ids):
            ids, trained = np.append(ids, np.int32(self.tokenizer.eod_id)), np.append(trained, True)
        return _document(ids, trained)

    def _tokenized(self, record: Tokenized) -> Document:
        largest = max(record.ids)
        if largest >= self.tokenizer.vocab_size:
            raise BadRowError(
                "unreadable token ids", f"id {largest} is outside of the tokenizer's {self.tokenizer.vocab_size:,}"
            )
        return _document(np.array(record.ids, dtype=np.int32), np.array(record.trained, dtype=bool))

    # ---- does the template have a place for it?

    def _template_for(self, record: Conversation | Preference | Judged) -> ChatTemplate:
        if isinstance(self.template, DataError):
            raise self.template
        for need in _needs(record):
            if need not in self._places:
                self._probe(self.template, need)
                self._places.add(need)
        return self.template

    def _probe(self, template: ChatTemplate, need: str) -> None:
        """Renders a small conversation that has it: a template that refuses it or leaves it out has no place for it."""
        messages, tools, traces = _PROBES[need]
        try:
            text = template.render(messages, tools).text
            missing = [trace for trace in traces if trace not in text]
            why = "It leaves it out of the text." if missing else ""
        except BadRowError as error:
            why = f"It says: {error.detail}."
        if why:
            raise DataError(
                f"the chat template {template.name} has no place for {need}",
                evidence=f"The data have {need}. {why}",
                next_step=f"{_INSTEAD[need]} Or choose a template that has: data.template = 'chatml' has all.",
            )


def _needs(record: Conversation | Preference | Judged) -> Iterator[str]:
    for messages in _message_lists(record):
        for message in messages:
            if message.role in ("system", "tool"):
                yield _SYSTEM if message.role == "system" else _ANSWERS
            if message.tool_calls:
                yield _CALLS
    if record.tools:
        yield _TOOLS


def _message_lists(record: Conversation | Preference | Judged) -> tuple[Messages, ...]:
    if isinstance(record, Conversation):
        return (record.messages,)
    if isinstance(record, Judged):
        return (record.prompt, record.answer)
    return (record.prompt, record.chosen, record.rejected)


_SYSTEM, _TOOLS, _CALLS, _ANSWERS = "a system turn", "tools", "tool calls", "answers of tools"
_USER = Message(role="user", content="probe question")
_REPLY = Message(role="assistant", content="probe reply")
_PROBE_CALL = Message(
    role="assistant",
    content="",
    tool_calls=(
        {
            "type": "function",
            "id": "probe0001",
            "function": {"name": "probe_call", "arguments": {"a": "probe argument"}},
        },
    ),
)
_PROBE_RESULT = Message(role="tool", content="probe result", more={"tool_call_id": "probe0001", "name": "probe_call"})
_PROBE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_call",
        "description": "probe description",
        "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "probe"}}},
    },
}
_PROBES: Mapping[str, tuple[Messages, tuple[Mapping[str, Any], ...], tuple[str, ...]]] = {
    _SYSTEM: ((Message(role="system", content="probe system"), _USER, _REPLY), (), ("probe system",)),
    _TOOLS: ((_USER, _REPLY), (_PROBE_TOOL,), ("probe_call", "probe description")),
    _CALLS: ((_USER, _PROBE_CALL, _PROBE_RESULT, _REPLY), (), ("probe_call", "probe argument")),
    _ANSWERS: ((_USER, _PROBE_CALL, _PROBE_RESULT, _REPLY), (), ("probe result",)),
}
_INSTEAD = {
    _SYSTEM: "Put the system prompt at the beginning of the first user turn.",
    _TOOLS: "Describe the tools in the system or user turn.",
    _CALLS: "Write the calls as text of the assistant.",
    _ANSWERS: "Write the answers of tools as user turns.",
}


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRowError("lone surrogate", f"U+{ord(text[error.start]):04X} has no UTF-8 form") from None


def _document(ids: NDArray[np.int32], trained: NDArray[np.bool_]) -> Document:
    trained = trained.copy()
    trained[:1] = False  # nothing comes before the first token
    if not trained.any():
        raise BadRowError("nothing to learn", f"{len(ids)} tokens, and none that follows another is learned")
    kept = int(np.flatnonzero(trained)[-1]) + 1
    return Document(ids[:kept], trained[:kept])
