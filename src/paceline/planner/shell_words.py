"""Shell text as tokens, and words as the shell would expand them: as much of bash as launch scripts use.

Nothing is run: `$(command)` stays as it is written, and so does a variable that nothing sets (`${NAME}`), so that a
reader sees what is open in place of an empty value.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

OPERATORS = ("&&", "||", "|&", ";;", ";", "&", "|", "(", ")", "\n")
_REDIRECT = re.compile(r"\d*(>>|>&|<&|>\||>|<)&?\s*")
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_BLANK = re.compile(r"<[A-Za-z](?:[^<>\n]*[^<>\s\d&])?>")
"""A place to fill in, as published scripts have them: ``<path to the data>``. The shell would redirect."""
_ASSIGN = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_OPEN = re.compile(r"\$\{?\w|\$\(|`")


@dataclass(frozen=True, kw_only=True)
class Token:
    """A word as it is written (quotes and all), an operator, or the words of an array."""

    text: str
    is_operator: bool = False
    array: tuple[str, ...] | None = None
    """Of ``NAME=( ... )``; `text` is then ``NAME=`` or ``NAME+=``."""


@dataclass(kw_only=True)
class Variables:
    """What the script has set so far. ``undefined`` collects the names that were read and never set."""

    values: dict[str, tuple[str, ...]] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    undefined: list[str] = field(default_factory=list)

    def scalar(self, name: str) -> str | None:
        found = self.values.get(name)
        return None if found is None else " ".join(found[:1])

    def environment(self) -> dict[str, str]:
        return {name: self.scalar(name) or "" for name in sorted(self.exported) if name in self.values}


# ---- text to tokens


def tokens(text: str) -> list[Token]:
    """All words and operators; comments, redirections and here-documents are left out."""
    return list(_Lexer(text).run())


class _Lexer:
    def __init__(self, text: str) -> None:
        self.text = text.replace("\r\n", "\n")
        self.at = 0
        self.heredocs: list[str] = []

    def run(self, until: str = "") -> Iterator[Token]:
        while self.at < len(self.text):
            char = self.text[self.at]
            if until and char == until:
                self.at += 1
                return
            if self.text.startswith("\\\n", self.at):
                self.at += 2
            elif char == "\n":
                self.at += 1
                self._skip_heredocs()
                yield Token(text="\n", is_operator=True)
            elif char.isspace():
                self.at += 1
            elif char == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif found := _HEREDOC.match(self.text, self.at):
                self.heredocs.append(found[2])
                self.at = found.end()
            elif (found := _REDIRECT.match(self.text, self.at)) and not _BLANK.match(self.text, self.at):
                self.at = found.end()
                self._word()
            elif char in "&|;()":
                name = next(name for name in OPERATORS if self.text.startswith(name, self.at))
                self.at += len(name)
                yield Token(text=name, is_operator=True)
            else:
                yield self._token()

    def _token(self) -> Token:
        word = self._word()
        if _ASSIGN.fullmatch(word) and self.text[self.at : self.at + 1] == "(":
            self.at += 1
            inner = tuple(token.text for token in self.run(until=")") if not token.is_operator)
            return Token(text=word, array=inner)
        return Token(text=word)

    def _word(self) -> str:
        start = self.at
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "<" and (blank := _BLANK.match(self.text, self.at)):
                self.at = blank.end()
                continue
            if char.isspace() or char in "&|;()<>":
                break
            self.at = skip_piece(self.text, self.at)
        return self.text[start : self.at].replace("\\\n", "")

    def _skip_heredocs(self) -> None:
        for name in self.heredocs:
            end = re.compile(rf"^\t*{name}$", re.MULTILINE).search(self.text, self.at)
            self.at = len(self.text) if end is None else end.end()
        self.heredocs.clear()


def skip_piece(text: str, at: int) -> int:
    """Where the quoted string, substitution or single character at ``at`` ends."""
    char = text[at]
    if char == "\\":
        return min(at + 2, len(text))
    if char in "'`":
        end = text.find(char, at + 1)
        return len(text) if end < 0 else end + 1
    if char == '"':
        at += 1
        while at < len(text) and text[at] != '"':
            at = skip_piece(text, at) if text[at] in "\\$`" else at + 1
        return at + 1
    if text.startswith("$(", at):
        return _closed(text, at + 2, "(", ")")
    if text.startswith("${", at):
        return _closed(text, at + 2, "{", "}")
    return at + 1


def _closed(text: str, at: int, opened: str, closed: str) -> int:
    depth = 1
    while at < len(text) and depth:
        char = text[at]
        depth += (char == opened) - (char == closed)
        at = skip_piece(text, at) if char in "'\"\\" else at + 1
    return at


# ---- words to values


def expand(word: str, variables: Mapping[str, object] | Variables, *, blank: bool = False) -> list[str]:
    """The fields that a word becomes: none, one or several.

    Args:
        blank: variables that nothing sets are empty, as the shell has it; else they stay as ``${NAME}``.
    """
    assert isinstance(variables, Variables)
    fields: list[str] = []
    current: list[str] = []
    started = False
    for text, quoted in _pieces(word, variables, blank):
        if quoted:
            # "${ARRAY[@]}" gives one field for each of its values
            current.append(text[0] if text else "")
            started = started or bool(text)
            for more in text[1:]:
                fields.append("".join(current))
                current = [more]
            continue
        joined = " ".join(text)
        parts = joined.split()
        if not parts:
            if joined and started:
                fields.append("".join(current))
                current, started = [], False
            continue
        if joined[0].isspace() and started:
            fields.append("".join(current))
            current = []
        current.append(parts[0])
        for part in parts[1:]:
            fields.append("".join(current))
            current = [part]
        started = True
        if joined[-1].isspace():
            fields.append("".join(current))
            current, started = [], False
    if started:
        fields.append("".join(current))
    return fields


def joined(word: str, variables: Variables, *, blank: bool = False) -> str:
    """A word where the shell does not split: the value of an assignment, a side of a comparison."""
    return "".join(" ".join(text) for text, _ in _pieces(word, variables, blank))


def is_open(text: str) -> bool:
    """Whether something in it was left as it is written, because nothing sets it."""
    return _OPEN.search(text) is not None


def _pieces(word: str, variables: Variables, blank: bool) -> Iterator[tuple[tuple[str, ...], bool]]:
    """(texts, whether they are kept together): literals and quoted text are, results of expansions are not."""
    at = 0
    while at < len(word):
        end = skip_piece(word, at)
        piece = word[at:end]
        at = end
        if piece[0] == "'":
            yield (piece[1:-1],), True
        elif piece[0] == '"':
            yield _quoted(piece[1:-1], variables, blank), True
        elif piece[0] == "\\":
            yield (piece[1:],), True
        elif piece[0] == "`" or piece.startswith("$("):
            yield _command(piece, variables, blank), False
        elif piece.startswith("${"):
            yield _parameter(piece[2:-1], variables, blank), False
        elif piece == "$" and (name := re.match(r"\w+|[@*#?]", word[at:])):
            at += name.end()
            yield _parameter(name[0], variables, blank), False
        else:
            yield (piece,), True


def _quoted(text: str, variables: Variables, blank: bool) -> tuple[str, ...]:
    values = [""]
    at = 0
    while at < len(text):
        end = skip_piece(text, at) if text[at] in "\\$`" else at + 1
        piece = text[at:end]
        at = end
        found: tuple[str, ...] = (piece,)
        if piece.startswith("\\"):
            found = ("" if piece == "\\\n" else piece[1:] if piece[1:] in '$`"\\' else piece,)
        elif piece.startswith(("$(", "`")):
            found = _command(piece, variables, blank)
        elif piece.startswith("${"):
            found = _parameter(piece[2:-1], variables, blank)
            if "[*]" in piece:
                found = (" ".join(found),)
        elif piece == "$" and (name := re.match(r"\w+|[@*#?]", text[at:])):
            at += name.end()
            found = _parameter(name[0], variables, blank)
        if found:
            values[-1] += found[0]
            values += found[1:]
    return tuple(values)


_PARAMETER = re.compile(r"(\w+|[@*#?])(\[[^\]]*\])?(?:(:?[-=+?])(.*))?", re.DOTALL)


def _parameter(text: str, variables: Variables, blank: bool) -> tuple[str, ...]:
    found = _PARAMETER.fullmatch(text)
    if found is None:  # ${#NAME}, ${NAME%%...} and the like
        return ("",) if blank else (f"${{{text}}}",)
    name, index, operation, word = found[1], found[2], found[3] or "", found[4] or ""
    value = variables.values.get(name)
    if value is not None and index and index not in ("[@]", "[*]"):
        position = index[1:-1]
        value = value[int(position) : int(position) + 1] if position.isdigit() else None
    elif value is not None and not index:
        value = value[:1]
    is_set = value is not None and (":" not in operation or any(value))
    if operation.endswith("+"):
        return (joined(word, variables, blank=blank),) if is_set else ()
    if is_set:
        assert value is not None
        return value
    if operation.endswith(("-", "=")):
        default = joined(word, variables, blank=blank)
        if operation.endswith("="):
            variables.values[name] = (default,)
        return (default,)
    if value is not None:  # set, and empty
        return value
    if name in ("@", "*"):  # arguments of the script, of which there are none
        return ()
    if blank:
        return ("",)
    if name not in variables.undefined:
        variables.undefined.append(name)
    return (f"${{{name}}}",)


def _command(piece: str, variables: Variables, blank: bool) -> tuple[str, ...]:
    if piece.startswith("$((") and piece.endswith("))"):
        value = arithmetic(piece[3:-2], variables)
        if value is not None:
            return (str(value),)
    return ("",) if blank else (" ".join(piece.split()).replace(" ", "\N{NO-BREAK SPACE}"),)


_OPERATIONS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


def arithmetic(text: str, variables: Variables) -> int | None:
    """``$((A * B + 1))``; None where a variable is open or there is more to it than + - * / % and parentheses."""
    plain = joined(text, variables)
    for name in set(re.findall(r"\b[A-Za-z_]\w*", plain)):
        value = variables.scalar(name)
        if value is None:
            return None
        plain = re.sub(rf"\b{name}\b", value, plain)
    try:
        return _evaluate(ast.parse(plain.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def _evaluate(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    raise ValueError(ast.dump(node))
