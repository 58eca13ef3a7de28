"""Which command does a launch script run, with which flags and environment, on how many GPUs? Nothing is executed.

Read are assignments, arrays, `export`, `if` over tests of strings and numbers, `eval`, `sh -c "..."`, and the
prefixes `torchrun`, `python -m torch.distributed.launch`, `deepspeed`, `accelerate`, `srun` and `#SBATCH` lines. Loops,
`case` and functions are passed over; a test that cannot be decided (a file, a command) counts as false.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePath

from paceline.errors import ConfigError
from paceline.planner.shell_words import Token, Variables, expand, is_open, joined, tokens

_PASSED_OVER = {"for": "done", "while": "done", "until": "done", "select": "done", "case": "esac"}
_DECLARE = ("export", "declare", "local", "readonly", "typeset")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_SHELLS = ("sh", "bash", "zsh")
_FILES = (".yaml", ".yml", ".json")
_MODULES = ("torch.distributed.launch", "torch.distributed.run", "torch.distributed.elastic")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What a script starts."""

    program: str
    """The Python file; empty where flags were given alone."""
    flags: tuple[str, ...]
    environment: Mapping[str, str]
    """What the script exports, and what stands before the command."""
    nodes: int | None
    gpus_per_node: int | None
    undefined: tuple[str, ...]
    """Variables that the script reads and nothing sets."""
    passed_over: tuple[str, ...]
    """Keywords of what was not read: ``for``, ``case``, ``source``."""

    @property
    def world_size(self) -> int | None:
        return None if self.gpus_per_node is None else (self.nodes or 1) * self.gpus_per_node


def read_launch(text: str, given: Mapping[str, str] | None = None, programs: Collection[str] = ()) -> Launch:
    """Reads a script, a command line, or flags alone.

    Args:
        given: variables that are set before the script begins.
        programs: commands that are looked for beside Python files; they come first, and a file of arguments
            (``x.yaml``) will do where they have no flags.

    Raises:
        ConfigError: there is no command with flags in it.
    """
    if text.lstrip().startswith("--"):
        text = f"pretrain_gpt.py {text}"
    script = _Script(given or {}, _sbatch(text), programs)
    script.run(tokens(text))
    if not script.found:
        raise ConfigError(
            "no command with flags such as --num-layers was found",
            evidence="Looked for a Python file with flags behind it, by itself or behind torchrun, srun and the like.",
            next_step="Give the script that starts the training, or the flags alone: "
            'paceline plan megatron "--num-layers 32 ..."',
        )
    program, prefix, flags, environment = max(
        script.found, key=lambda found: (PurePath(found[0]).name in programs, len(found[2]))
    )
    nodes, gpus = _ranks(prefix, script.slurm)
    return Launch(
        program=program,
        flags=tuple(flags),
        environment=environment,
        nodes=nodes,
        gpus_per_node=gpus,
        undefined=tuple(script.variables.undefined),
        passed_over=tuple(dict.fromkeys(script.passed_over)),
    )


class _Script:
    """Walks over the statements of a script once."""

    def __init__(self, given: Mapping[str, str], slurm: Mapping[str, str], programs: Collection[str]) -> None:
        self.variables = Variables(values={name: (value,) for name, value in given.items()})
        self.variables.exported.update(given)
        self.slurm = dict(slurm)
        self.programs = programs
        if nodes := slurm.get("nodes"):
            for name in ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"):
                self.variables.values.setdefault(name, (nodes,))
        self.found: list[tuple[str, list[str], list[str], dict[str, str]]] = []
        self.passed_over: list[str] = []

    def run(self, stream: Sequence[Token]) -> None:
        at = 0
        while at < len(stream):
            at = self._statement(stream, at)

    def _statement(self, stream: Sequence[Token], at: int) -> int:
        token = stream[at]
        if token.is_operator or token.text in ("{", "}", "!"):
            return at + 1
        if token.text == "if":
            return self._if(stream, at)
        if token.text in _PASSED_OVER:
            self.passed_over.append(token.text)
            return _behind(stream, at, _PASSED_OVER[token.text])
        if token.text == "function" or _is_function(stream, at):
            self.passed_over.append("function")
            return _behind_braces(stream, at)
        end = _end(stream, at)
        self._command(stream[at:end])
        return end

    # ---- if

    def _if(self, stream: Sequence[Token], at: int) -> int:
        """Runs the first branch whose test holds; returns where the statement behind `fi` begins."""
        end = _behind(stream, at, "fi")
        done = False
        for test, body in _branches(stream[at + 1 : end - 1]):
            if not done and (test is None or self._holds(test)):
                done = True
                self.run(body)
        return end

    def _holds(self, test: Sequence[Token]) -> bool:
        """Tests joined by && and ||, from left to right. What is not known does not hold."""
        result: bool | None = None
        joiner = "&&"
        part: list[Token] = []
        for token in (*test, Token(text=";", is_operator=True)):
            if not token.is_operator or token.text in ("(", ")"):
                part.append(token)
                continue
            if part:
                value = self._test([item.text for item in part])
                if result is None:
                    result = value
                elif joiner == "&&":
                    result = result and bool(value)
                else:
                    result = result or bool(value)
            part = []
            joiner = token.text if token.text in ("&&", "||") else joiner
        return bool(result)

    def _test(self, words: list[str]) -> bool | None:
        if words[0] == "!":
            value = self._test(words[1:])
            return None if value is None else not value
        if words[0] in ("true", ":"):
            return True
        if words[0] not in ("[", "[[", "test"):
            return None
        inside = [word for word in words[1:] if word not in ("]", "]]")]
        if inside[:1] == ["!"]:
            value = self._test(["[", *inside[1:]])
            return None if value is None else not value
        for joiner in ("-o", "-a"):
            if joiner in inside:
                where = inside.index(joiner)
                both = [self._test(["[", *inside[:where]]), self._test(["[", *inside[where + 1 :]])]
                return any(both) if joiner == "-o" else all(both)
        values = [joined(word, self.variables, blank=True) for word in inside]
        return _compare(values)

    # ---- commands

    def _command(self, words: Sequence[Token]) -> None:
        before: dict[str, str] = {}
        words = list(words)
        while words and (assigned := _ASSIGNMENT.fullmatch(words[0].text)):
            self._assign(words.pop(0), assigned, before)
        if not words:
            return
        name = words[0].text
        if name in _DECLARE:
            for token in words[1:]:
                assigned = _ASSIGNMENT.fullmatch(token.text)
                if assigned:
                    self._assign(token, assigned, {})
                if name == "export":
                    self.variables.exported.add(assigned[1] if assigned else token.text)
            return
        if name == "unset":
            for token in words[1:]:
                self.variables.values.pop(token.text, None)
            return
        if name in ("source", ".") and len(words) > 1:
            self.passed_over.append(f"{name} {words[1].text}")
            return
        fields = [text for token in words for text in expand(token.text, self.variables)]
        self._launch(fields, before)

    def _assign(self, token: Token, assigned: re.Match[str], before: dict[str, str]) -> None:
        name, more = assigned[1], bool(assigned[2])
        old = self.variables.values.get(name, ())
        if token.array is not None:
            values = tuple(text for word in token.array for text in expand(word, self.variables))
            self.variables.values[name] = (*old, *values) if more else values
            return
        value = joined(assigned[3], self.variables)
        self.variables.values[name] = ((old[0] if old else "") + value,) if more else (value,)
        before[name] = self.variables.values[name][0]

    def _launch(self, fields: list[str], before: Mapping[str, str]) -> None:
        """Keeps a command that starts a Python file with flags; looks into `eval` and `sh -c`."""
        if not fields:
            return
        inner = _inner_script(fields)
        if inner is not None:
            prefix, text = inner
            known = len(self.found)
            self.run(tokens(text))
            for index in range(known, len(self.found)):
                program, words, flags, environment = self.found[index]
                self.found[index] = (program, [*prefix, *words], flags, {**before, **environment})
            return
        split = next((index for index in range(len(fields)) if _is_program(fields, index, self.programs)), None)
        if split is None:
            return
        flags = fields[split + 1 :]
        if any(flag.startswith("--") or (self.programs and flag.endswith(_FILES)) for flag in flags):
            environment = {**self.variables.environment(), **before}
            self.found.append((fields[split], fields[:split], flags, environment))


def _is_program(fields: Sequence[str], index: int, programs: Collection[str]) -> bool:
    text = fields[index]
    if PurePath(text).name in programs:
        return True
    # a Python file that is no value of the launcher's own flags, or a module
    return (text.endswith(".py") and not text.startswith("-")) or (
        index > 0 and fields[index - 1] == "-m" and not text.startswith(_MODULES)
    )


def _inner_script(fields: list[str]) -> tuple[list[str], str] | None:
    """(words before it, text) of a script that the command runs itself."""
    if fields[0] == "eval":
        return [], " ".join(fields[1:])
    for index, text in enumerate(fields[:-1]):
        if text in ("-c", "-lc") and index and PurePath(fields[index - 1]).name in _SHELLS:
            return fields[: index - 1], fields[index + 1]
    # srun "${command}": one word that is a whole command
    long = next((text for text in fields if " --" in text and ".py" in text), None)
    return None if long is None else (fields[: fields.index(long)], long)


def _is_function(stream: Sequence[Token], at: int) -> bool:
    return [token.text for token in stream[at + 1 : at + 3]] == ["(", ")"]


def _behind_braces(stream: Sequence[Token], at: int) -> int:
    depth, begun = 0, False
    while at < len(stream) and not (begun and depth == 0):
        depth += (stream[at].text == "{") - (stream[at].text == "}")
        begun = begun or depth > 0
        at += 1
    return at


def _behind(stream: Sequence[Token], at: int, closing: str) -> int:
    """Behind the keyword that ends the statement at ``at``, with others of its kind inside."""
    opening = {"fi": ("if",), "done": ("for", "while", "until", "select"), "esac": ("case",)}[closing]
    depth = 0
    while at < len(stream):
        if _begins(stream, at):
            depth += (stream[at].text in opening) - (stream[at].text == closing)
        at += 1
        if depth == 0:
            break
    return at


def _begins(stream: Sequence[Token], at: int) -> bool:
    """Whether a keyword may stand here: at the beginning of a command."""
    if stream[at].is_operator:
        return False
    before = stream[at - 1] if at else None
    return before is None or before.is_operator or before.text in ("then", "else", "do", "{", "!")


def _branches(stream: Sequence[Token]) -> Iterator[tuple[Sequence[Token] | None, Sequence[Token]]]:
    """(test, body) of an if statement without its `if` and `fi`; the test of `else` is None."""
    marks, depth = [], 0
    for at, token in enumerate(stream):
        if not _begins(stream, at):
            continue
        if depth == 0 and token.text in ("then", "elif", "else"):
            marks.append(at)
        depth += (token.text in ("if", *_PASSED_OVER)) - (token.text in ("fi", "done", "esac"))
    start: int | None = 0
    test: Sequence[Token] | None = None
    for mark, following in pairwise([*marks, len(stream)]):
        word = stream[mark].text
        if word == "then":
            test = stream[start:mark]
            yield test, stream[mark + 1 : following]
        elif word == "elif":
            start = mark + 1
        else:
            yield None, stream[mark + 1 : following]


def _end(stream: Sequence[Token], at: int) -> int:
    while at < len(stream) and not stream[at].is_operator:
        at += 1
    return at


def _compare(values: list[str]) -> bool | None:
    match values:
        case ["-z", text]:
            return not text
        case ["-n", text] | [text]:
            return bool(text)
        case [left, "=" | "==", right]:
            return left == right
        case [left, "!=", right]:
            return left != right
        case [left, "-eq" | "-ne" | "-gt" | "-ge" | "-lt" | "-le" as operation, right]:
            try:
                first, second = int(left), int(right)
            except ValueError:
                return None
            order = {"eq": first == second, "ne": first != second, "gt": first > second, "ge": first >= second}
            return (order | {"lt": first < second, "le": first <= second})[operation[1:]]
    return None


# ---- how many ranks


def _sbatch(text: str) -> dict[str, str]:
    """Options of `#SBATCH` lines, and `gpus` of a node."""
    options: dict[str, str] = {}
    for line in re.findall(r"^#SBATCH\s+(.*)$", text, flags=re.MULTILINE):
        words = line.partition(" #")[0].replace("=", " ").split()
        for name, value in pairwise([*words, ""]):
            if name.startswith("-"):
                options[{"-N": "nodes", "-n": "ntasks"}.get(name, name.lstrip("-"))] = value
    return options


def _ranks(prefix: Sequence[str], slurm: Mapping[str, str]) -> tuple[int | None, int | None]:
    """(nodes, ranks of a node), from the launcher's flags first."""
    given = dict(slurm)
    words = [part for text in prefix for part in (text.split("=", 1) if text.startswith("-") else [text])]
    for name, value in pairwise([*words, ""]):
        if name.startswith("-"):
            key = {"-N": "nodes", "-n": "ntasks", "-np": "ntasks"}.get(name, name.lstrip("-").replace("_", "-"))
            given[key] = value
    nodes = _number(given, "nnodes", "num-nodes", "nodes", "num-machines")
    gpus = _number(given, "nproc-per-node", "num-gpus")
    if gpus is None:
        tasks, devices = _number(given, "ntasks-per-node"), _number(given, "gpus-per-node", "gres", "gpus-per-task")
        gpus = max((value for value in (tasks, devices) if value), default=None)
    if gpus is None and (ntasks := _number(given, "ntasks", "num-processes")):
        gpus = ntasks // (nodes or 1)
    return nodes, gpus


def _number(given: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        if (text := given.get(name)) and not is_open(text) and (found := re.search(r"(\d+)$", text.split("(")[0])):
            return int(found[1])
    return None
