"""Two runs or two logs: which settings differ, and only then, where does the time differ?

A different sequence length is no slower kernel. Settings come first; where they explain the work, tokens are compared.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.explain.cause import Cause, ranked
from paceline.explain.explanation import Explanation, bars
from paceline.explain.log_file import read_log
from paceline.explain.log_report import log_facts
from paceline.explain.loss_apart import loss_causes
from paceline.explain.rules import Diagnosis, diagnose
from paceline.explain.run_folder import RunView, read_run
from paceline.report import units
from paceline.report.table import Table, table

NOT_COMPARED = (
    *("run.dir", "run.name", "train.steps", "checkpoint.resume", "model.preset"),
    *("observe.record_limit_mb", "observe.stall_seconds", "observe.prometheus_port", "observe.progress"),
    *("observe.flops_convention", "observe.peak_tflops", "observe.sample_temperature"),
)
"""Keys that change no step, nor what happens between steps."""
WORK = (
    *("train.seq_len", "train.micro_batch_size", "train.global_batch_size", "train.precision"),
    *("seq_length", "micro_batch_size", "global_batch_size"),
)
"""What a step has to do."""

_SIZE = (
    *("num_layers", "hidden_size", "ffn_size", "ffn_hidden_size", "num_heads", "num_attention_heads", "num_kv_heads"),
    *("num_query_groups", "head_dim", "kv_channels", "vocab_size", "padded_vocab_size", "num_experts"),
)
"""Of the model, as recipes and Megatron-LM call them."""
_NOW_AND_THEN = re.compile(r"(^|[._])(eval|checkpoint|save|log|exit|tensorboard|capture|sample)([._]|$)")
"""In names of what happens between steps."""
_MOST_LISTED = 6
_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@dataclass(frozen=True, kw_only=True)
class Difference:
    key: str
    first: Any
    second: Any


def settings_apart(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Difference]:
    """Keys with different values: the size of the model first, then the rest of the work, what comes now and then
    last."""
    keys = [
        key
        for key in first.keys() | second.keys()
        if first.get(key) != second.get(key) and not key.startswith(NOT_COMPARED)
    ]
    keys.sort(key=lambda key: (_weight(key), key))
    return [Difference(key=key, first=first.get(key), second=second.get(key)) for key in keys]


def _weight(key: str) -> int:
    """The smaller, the more a step depends on it."""
    if key.removeprefix("model.") in _SIZE:
        return 0
    if key in WORK:
        return 1
    if key.startswith("model."):
        return 2
    if _NOW_AND_THEN.search(key):
        return 6
    if key.startswith(("parallel.", "train.", "ranks", "device")):
        return 3
    return 5 if key.startswith(("environment ", "version ")) else 4


def listed(items: Sequence[str], separator: str = ", ") -> str:
    """The first few, and how many more there are."""
    more = f" and {len(items) - _MOST_LISTED} more" if len(items) > _MOST_LISTED else ""
    return separator.join(items[:_MOST_LISTED]) + more


def compare_runs(first: Path, second: Path) -> Explanation:
    """Two run folders.

    Raises:
        ConfigError: one of them is none.
    """
    a, b = diagnose(read_run(first)), diagnose(read_run(second))
    recipes, unread = _recipes(a.view, b.view)
    differences = settings_apart(*(_settings(found, recipe) for found, recipe in zip((a, b), recipes, strict=True)))
    losses = [
        {record.step: record.loss if record.loss is not None else math.nan for record in found.view.metrics}
        for found in (a, b)
    ]
    rates = [float(recipe.get("optim.lr", math.nan)) for recipe in recipes]
    learning = [] if not all(recipes) or _data_differs(differences) else loss_causes(*losses, lr=max(rates))
    acted = acted_on(a, b, differences)
    causes = [*_settings_cause(differences), *_run_causes(a, b, differences), *_acted_causes(acted), *learning]
    return Explanation(
        title=f"{first.name} and {second.name}",
        tables=(
            _settings_table(differences, first.name, second.name, known=all(recipes), notes=unread),
            parts_table(_parts(a), _parts(b)),
        ),
        findings=tuple(cause.finding() for cause in ranked(causes)),
        data={
            "runs": [str(first), str(second)],
            "settings_known": all(recipes),
            "settings": [{"key": one.key, "first": one.first, "second": one.second} for one in differences],
            "step_seconds": [_seconds(a), _seconds(b)],
            "tokens_per_second": [_tokens(a), _tokens(b)],
            "parts": [_parts(a), _parts(b)],
            "acted_on": [
                {"id": one.id, "keys": list(one.keys), "expected": one.expected, "obtained": one.obtained}
                for one in acted
            ],
        },
        pictures=(bars("Where a step goes", ["first", "second"], [_parts(a), _parts(b)]),),
    )


def _data_differs(differences: list[Difference]) -> bool:
    """Whether the two read other samples, or have other models: their losses are then of other things."""
    return any(
        one.key.startswith(
            ("model.", "data.train", "data.order", "run.seed", "train.seq_len", "train.global_batch_size")
        )
        for one in differences
    )


def _recipes(a: RunView, b: RunView) -> tuple[tuple[Mapping[str, Any], Mapping[str, Any]], tuple[str, ...]]:
    """What both recipes say, and what kept one from being read.

    Where one is not valid here (a plugin that cannot be imported), both are taken as they are written; where one cannot
    be read at all, neither is: there is nothing to hold the other against.
    """
    unread = tuple(
        f"{view.path.name}: {problem.rstrip('.')}."
        for view in (a, b)
        for problem in view.problems
        if problem.startswith("recipe.toml")
    )
    if a.recipe and b.recipe:
        return (a.recipe, b.recipe), ()
    if a.written and b.written:
        return (a.written, b.written), (*unread, "Recipes are compared as they are written.")
    return ({}, {}), unread


def _settings(found: Diagnosis, recipe: Mapping[str, Any]) -> dict[str, Any]:
    view = found.view
    environment = {f"environment {name}": value for name, value in chosen_variables(view).items()}
    versions = {f"version of {name}": value for name, value in view.fact("versions", {}).items()}
    machine = {"ranks": view.world_size, "device": view.fact("device_name")}
    return {**recipe, **environment, **versions, **machine}


def chosen_variables(view: RunView) -> dict[str, str]:
    """The environment without what Paceline, torchrun or torch set by themselves, and without places of caches."""
    ranks = int(view.fact("local_world_size") or 1)
    own = {
        # `runtime/process.py`; torchrun gives 1
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("1", "3"),
        "CUDA_MODULE_LOADING": ("LAZY",),
        # a share of the processors by `runtime/elastic.py`; 1 by torchrun with several processes
        "OMP_NUM_THREADS": (str(max(1, int(view.fact("cpus") or 0) // ranks)), *(("1",) if ranks > 1 else ())),
    }
    return {
        name: value
        for name, value in view.fact("environment", {}).items()
        if name not in _CACHES and str(value) not in own.get(name, ())
    }


def _seconds(found: Diagnosis) -> float | None:
    return found.waterfall.step_seconds if found.waterfall else None


def _tokens(found: Diagnosis) -> float | None:
    """Tokens/s of one device."""
    seconds, tokens, world = _seconds(found), found.view.fact("tokens_per_step"), found.view.world_size
    return tokens / seconds / world if seconds and tokens and world else None


def _parts(found: Diagnosis) -> dict[str, float]:
    return {part.name: part.seconds for part in found.waterfall.parts} if found.waterfall else {}


def _settings_cause(differences: list[Difference]) -> list[Cause]:
    work = [one for one in differences if one.key in WORK or one.key.startswith("model.")]
    if not work:
        return []
    values = listed([f"{one.key} = {_show(one.first)} and {_show(one.second)}" for one in work], "; ")
    return [
        Cause(
            id="explain.not-the-same-work",
            subject="the two do not do the same work: their steps cannot be compared directly",
            evidence=f"{values}.",
            next_step="Compare tokens/s only where length of sequences, padding and model agree; repeat one of "
            "them with "
            "the other's values.",
            share=None,
            severity="warning",
            gain="-",
        )
    ]


def _run_causes(a: Diagnosis, b: Diagnosis, differences: list[Difference]) -> list[Cause]:
    first, second = _parts(a), _parts(b)
    before, after = _seconds(a), _seconds(b)
    if not before or not after:
        return []
    grown = {name: second.get(name, 0.0) - first.get(name, 0.0) for name in {**first, **second}}
    name = max(grown, key=lambda key: abs(grown[key]))
    slower = after > before
    others = [one for one in differences if not (one.key in WORK or one.key.startswith("model."))]
    settings = f" Settings that differ: {listed([one.key for one in others])}." if others else ""
    tokens = f" Tokens/s of a device: {_tokens(a) or 0:.0f} and {_tokens(b) or 0:.0f}."
    return [
        Cause(
            id="explain.difference",
            subject=f"a step of the second takes {abs(after / before - 1):.0%} {'more' if slower else 'less'}, "
            "most of it "
            f"in {name}",
            evidence=f"{units.duration(before)} and {units.duration(after)}; {name} {units.apart(grown[name])}."
            f"{tokens}{settings}",
            next_step="The table shows every part; act on the one that grew.",
            share=None,
            severity="note",
            gain="-",
        )
    ]


@dataclass(frozen=True, kw_only=True)
class Acted:
    """A finding of the first run whose change the second one has made. Shares of the first run's step."""

    id: str
    keys: tuple[str, ...]
    expected: float | None
    obtained: float


def acted_on(a: Diagnosis, b: Diagnosis, differences: list[Difference]) -> list[Acted]:
    """Expected against obtained; with several changes at once nobody knows whose the gain is."""
    before, after = _tokens(a), _tokens(b)
    changed = {one.key for one in differences}
    if not before or not after:
        return []
    found = []
    for finding in a.findings:
        keys = tuple(key for key in re.findall(r"--set '?([a-z_.0-9]+)=", finding.next_step) if key in changed)
        if keys:
            share = re.match(r"([\d.]+) ?% of the step", finding.gain or "")
            found.append(
                Acted(
                    id=finding.id,
                    keys=keys,
                    expected=float(share[1]) / 100 if share else None,
                    obtained=1 - before / after,
                )
            )
    return found


def _acted_causes(acted: list[Acted]) -> list[Cause]:
    causes = []
    for one in acted:
        expected = "not determined" if one.expected is None else f"{one.expected:.1%}"
        shared = " Other changes have a part in it." if len(acted) > 1 else ""
        causes.append(
            Cause(
                id="explain.acted-on",
                subject=f"the second run acts on {one.id} of the first ({', '.join(one.keys)})",
                evidence=f"Expected: {expected} of the time of a token; obtained: {one.obtained:.1%}.{shared}",
                next_step="Keep the change."
                if one.obtained > 0.01
                else "It brought nothing: take it back, or see what else differs.",
                share=None,
                severity="note",
                gain="-",
            )
        )
    return causes


def _settings_table(
    differences: list[Difference], first: str, second: str, *, known: bool = True, notes: tuple[str, ...] = ()
) -> Table:
    """Args:
    known: whether both recipes could be read. If not, no difference found does not say that all agree.
    notes: how they were read.
    """
    rows = [(one.key, _show(one.first), _show(one.second)) for one in differences[:60]]
    if not known:
        rows.insert(0, ("settings of the recipes", "not known", "not known"))
    return table(
        ("setting", first, second),
        rows or [("all settings agree", "", "")],
        title="Settings that differ",
        notes=(*((f"{len(differences) - 60} more.",) if len(differences) > 60 else ()), *notes),
    )


def _show(value: Any) -> str:
    text = "not set" if value is None else str(value)
    return text if len(text) <= 50 else f"{text[:49]}…"


def parts_table(
    first: Mapping[str, float],
    second: Mapping[str, float],
    *,
    whole: str = "step",
    title: str = "Where the time differs",
) -> Table:
    """Parts side by side, the largest difference first; their sum is called ``whole``."""
    names = sorted({**first, **second}, key=lambda name: -abs(second.get(name, 0) - first.get(name, 0)))
    rows = [
        (
            name,
            units.duration(max(first.get(name, 0.0), 0.0)),
            units.duration(max(second.get(name, 0.0), 0.0)),
            units.apart(second.get(name, 0.0) - first.get(name, 0.0)),
        )
        for name in names
    ]
    total = (units.duration(sum(first.values())), units.duration(sum(second.values())))
    rows.append((whole, *total, units.apart(sum(second.values()) - sum(first.values()))))
    return table(("part", ">first", ">second", ">difference"), rows, title=title)


def compare_logs(first: Path, second: Path) -> Explanation:
    """Two logs.

    Raises:
        ConfigError: one of them is not known.
    """
    logs = read_log(first), read_log(second)
    facts = log_facts(logs[0]), log_facts(logs[1])
    arguments = [{**log.arguments, "framework": log.framework} for log in logs]
    for kept, fact in zip(arguments, facts, strict=True):
        if "batch" in fact:
            kept.setdefault("global_batch_size", f"{fact['batch']:.0f}")
    differences = settings_apart(*arguments)
    names = [name for name in facts[0] if name in facts[1]]
    rows = [(name, f"{facts[0][name]:.5g}", f"{facts[1][name]:.5g}", f"{_ratio(facts, name):.3f}") for name in names]
    causes = _settings_cause(differences)
    rate = max(log.number("lr") for log in logs)
    if not any(one.key in WORK for one in differences):
        causes += loss_causes(*({step.step: step.loss for step in log.steps} for log in logs), lr=rate)
    if not any(logs[index].arguments for index in (0, 1)):
        causes.append(
            Cause(
                id="explain.not-in-the-log",
                subject="not determined from these logs whether both do the same work",
                evidence="Neither prints its arguments: sequence length, batch and model may differ.",
                next_step="Compare their settings first.",
                share=None,
            )
        )
    return Explanation(
        title=f"{first.name} and {second.name}",
        tables=(
            _settings_table(differences, first.name, second.name),
            table(("number", ">first", ">second", ">ratio"), rows, title="Medians of settled steps"),
        ),
        findings=tuple(cause.finding() for cause in ranked(causes)),
        data={
            "logs": [str(first), str(second)],
            "settings": [{"key": one.key, "first": one.first, "second": one.second} for one in differences],
            "facts": list(facts),
        },
    )


def _ratio(facts: tuple[dict[str, float], dict[str, float]], name: str) -> float:
    return facts[1][name] / facts[0][name] if facts[0][name] else float("nan")
