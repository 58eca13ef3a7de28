"""How is a chat model asked? Turns become the ids that stand before its answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.checkpoint.weights import companions
from paceline.data.chat_template import ChatTemplate, load_template
from paceline.data.kept_tokenizer import has_template_files, kept_template
from paceline.data.messages import read_messages
from paceline.data.record_rows import find_record_files, read_rows
from paceline.data.records import BadRowError, Message, Messages, Tools
from paceline.data.token_spans import encode_spans, special_tokens
from paceline.data.tokenizer import Tokenizer, load_tokenizer
from paceline.errors import DataError
from paceline.generate.load import Speaker


@dataclass(frozen=True, kw_only=True)
class Question:
    """Turns to be answered; the last one is not the assistant's."""

    messages: Messages
    tools: Tools = ()
    where: str = ""
    """For messages: file and line."""

    def as_dicts(self) -> list[dict[str, Any]]:
        """The turns as they are written in a file."""
        return [message.for_template() for message in self.messages]


def asked(prompts: Iterable[str], system: str = "") -> list[Question]:
    """One question a prompt, each with the same system prompt."""
    before = (Message(role="system", content=system),) if system else ()
    return [Question(messages=(*before, Message(role="user", content=prompt))) for prompt in prompts]


def read_questions(path: Path, system: str = "") -> list[Question]:
    """Questions of a file: ``.json`` or ``.jsonl`` with objects ``{"messages": [...], "tools": [...]}``, or a ``.json``
    that is the list of turns of one conversation.

    Args:
        system: put before conversations that do not begin with a system prompt.

    Raises:
        DataError: the file cannot be read, a row is no conversation, or its last turn is the assistant's.
    """
    rows = [row for file in find_record_files([path]) for row in read_rows(file)]
    if rows and all(isinstance(row.value, Mapping) and "messages" not in row.value for row in rows):
        turns = [dict(row.value) for row in rows if isinstance(row.value, Mapping)]
        return [_question({"messages": turns}, str(path), system)]
    questions = []
    for row in rows:
        where = f"{row.path}, line {row.line}"
        if isinstance(row.value, BadRowError):
            raise DataError(f"{where}: {row.value}", next_step="Mend that line.")
        questions.append(_question(row.value, where, system))
    if not questions:
        raise DataError(f"{path} has no conversation", next_step='Write lines such as {"messages": [...]}.')
    return questions


def _question(row: Mapping[str, Any], where: str, system: str) -> Question:
    try:
        messages = read_messages(row.get("messages"))
    except BadRowError as error:
        raise DataError(
            f"{where}: {error}",
            next_step='A turn is {"role": "user", "content": "..."}; roles: system, user, assistant, tool.',
        ) from error
    if not messages or messages[-1].role == "assistant":
        raise DataError(
            f"{where}: the last turn is {'the assistant' if messages else 'nobody'}'s",
            evidence="There is nothing to answer.",
            next_step="End with a turn of the user or of a tool.",
        )
    if system and messages[0].role != "system":
        messages = (Message(role="system", content=system), *messages)
    return Question(messages=messages, tools=tuple(row.get("tools") or ()), where=where)


def template_of(speaker: Speaker, template: str = "") -> ChatTemplate:
    """The template named, or that of the recipe, or the tokenizer's own.

    Raises:
        DataError: there is none.
    """
    folder = None if speaker.checkpoint is None else speaker.checkpoint.folder
    folders = () if folder is None else (folder.parent.parent, folder)
    return template_in(folders, speaker.config.data.template, speaker.tokenizer, template)


def template_in(folders: Sequence[Path], of_recipe: str, tokenizer: Tokenizer, template: str = "") -> ChatTemplate:
    """As `template_of`, of a run.

    Args:
        folders: of the run, and of its checkpoint; none where the weights are of another program.
        of_recipe: its `data.template`.
        template: the one that is named instead.
    """
    named = template or kept_template(of_recipe, *folders)
    return load_template(named, tokenizer if named else _with_its_files(folders, tokenizer))


def _with_its_files(folders: Sequence[Path], tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer where its template lies beside it: a run keeps both of the model that it began from."""
    if not folders or has_template_files(Path(tokenizer.name).parent):
        return tokenizer
    came_along = companions(*folders)
    if "tokenizer.json" not in came_along:
        return tokenizer
    other = load_tokenizer(came_along["tokenizer.json"])
    return other if other.fingerprint == tokenizer.fingerprint else tokenizer


def prompt_ids(template: ChatTemplate, tokenizer: Tokenizer, question: Question) -> list[int]:
    """The ids that stand before the answer.

    Raises:
        DataError: the template refuses the turns, or leaves a role out; or the tokenizer knows no control tokens.
    """
    try:
        rendered = template.render(question.messages, question.tools, prompt=True)
    except BadRowError as error:
        raise DataError(
            f"the chat template {template.name} refuses these turns"
            + (f" ({question.where})" if question.where else ""),
            evidence=error.detail,
            next_step="Leave out the turn that it has no place for, or choose another: --template chatml.",
        ) from error
    for number, message in enumerate(question.messages):
        if message.content.strip() not in rendered.text and not _has_place(template, question, number):
            raise DataError(
                f"the chat template {template.name} leaves a turn of the {message.role} out",
                evidence=f"Not in what it renders: {_short(message.content)!r}.",
                next_step="Leave that turn out, or choose another template: --template chatml has all roles.",
            )
    return [int(token) for token in encode_spans(tokenizer, rendered.text).ids]


def _has_place(template: ChatTemplate, question: Question, number: int) -> bool:
    """Whether a turn whose text is not in what was rendered is there all the same: templates of models that think cut
    the thoughts out of earlier answers, others trim and reformat. Asked by another text in its place."""
    turns = list(question.messages)
    turns[number] = replace(turns[number], content=_PROBE)
    try:
        return _PROBE in template.render(turns, question.tools, prompt=True).text
    except BadRowError:
        return False


def answer_ends(template: ChatTemplate, tokenizer: Tokenizer, stop_ids: Sequence[int]) -> tuple[int, ...]:
    """``stop_ids``, and the control token that the template puts behind an answer, if it puts one."""
    turns = (Message(role="user", content="?"), Message(role="assistant", content=_ANSWER))
    try:
        behind = template.render(turns).text.partition(_ANSWER)[2]
    except BadRowError:
        return tuple(stop_ids)
    ids = encode_spans(tokenizer, behind).ids.tolist() if behind else []
    controls = set(special_tokens(tokenizer).values())
    return tuple(dict.fromkeys((*stop_ids, *(token for token in ids[:1] if token in controls))))


_ANSWER = "an answer of some words"
_PROBE = "7205839146"
"""In no text by chance, and the same in capitals."""


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
