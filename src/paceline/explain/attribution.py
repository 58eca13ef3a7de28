"""Which module, in which phase, caused each piece of work, and with which shapes?

A kernel is launched by a call on some thread. The spans that are open there at that time say whose it is: in forward
the innermost module; in backward the operator carries the number of the forward operator that it undoes, and that one
had a module; elsewhere the phase (optimizer, gradient reduction) is the owner. Operators carry their inputs' shapes,
from which FLOPs and bytes are counted. In a trace of the CPU alone operators stand for kernels, each with its own
time.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.explain.kinds import NAMES, kind_index
from paceline.explain.trace_events import events_of, number_of

MODULE, PHASE = "module: ", "phase: "
"""As `observe/capture.py` names spans."""
BACKWARD = "autograd::engine::evaluate_function: "
"""What names of operators of the backward pass begin with."""
_GPU = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
_RUNTIME = frozenset(("cuda_runtime", "cuda_driver", "hip_runtime"))
_WIDTHS = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "int": 4, "bool": 1}


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Whose a piece of work is. ``module`` is ``""`` where nobody is known."""

    module: str
    phase: str
    operator: str
    shapes: str
    flops: float
    bytes_moved: float
    call: int
    """Which call of the operator: it may launch several kernels."""


@dataclass(kw_only=True)
class Row:
    """Work of one owner: ``module`` with numbers of blocks left out, a phase, an operator with its shapes."""

    module: str
    phase: str
    operator: str
    shapes: str
    kind: str
    seconds: float = 0.0
    calls: int = 0
    flops: float = 0.0
    bytes_moved: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Attribution:
    rows: tuple[Row, ...]
    """The longest first."""
    seconds: float
    """Of all work."""
    attributed: float
    """Share of it whose module or phase is known, 0 ... 1."""
    on_gpu: bool
    steps: int = 0
    """Steps that were captured, by their updates; 0 where no phase is named. All numbers are sums over them."""

    def by_part(self) -> dict[str, float]:
        """Seconds of forward and backward by part of the waterfall: gemm, attention, memory_bound, recompute."""
        found = dict.fromkeys(("gemm", "attention", "memory_bound", "recompute"), 0.0)
        parts = {"matrix products": "gemm", "attention": "attention"}
        for row in self.rows:
            if row.kind == "communication" or row.phase not in ("forward", "backward", "recompute"):
                continue
            part = "recompute" if row.phase == "recompute" else parts.get(row.kind, "memory_bound")
            found[part] += row.seconds
        return found

    def by_module(self) -> dict[tuple[str, str], Row]:
        """Rows added up by module and phase."""
        found: dict[tuple[str, str], Row] = {}
        for row in self.rows:
            key = row.module, row.phase
            one = found.setdefault(key, Row(module=row.module, phase=row.phase, operator="", shapes="", kind=""))
            one.seconds += row.seconds
            one.calls += row.calls
            one.flops += row.flops
            one.bytes_moved += row.bytes_moved
        return dict(sorted(found.items(), key=lambda item: -item[1].seconds))


@dataclass(kw_only=True)
class _Span:
    start: float
    end: float
    category: str
    name: str
    arguments: Mapping[str, Any]


def attribute(path: Path) -> Attribution:
    """Reads a capture.

    Raises:
        ConfigError: it cannot be read.
    """
    threads: dict[Any, list[_Span]] = defaultdict(list)
    kernels: list[tuple[str, str, float, int]] = []
    for event in events_of(path):
        category = event.get("cat")
        if event.get("ph") != "X" or category is None or not isinstance(event.get("ts"), int | float):
            continue
        start, length = float(event["ts"]), float(event.get("dur", 0) or 0)
        arguments = event.get("args") or {}
        if category in _GPU:
            kernels.append(
                (str(event.get("name", "")), str(category), length * 1e-6, number_of(arguments.get("correlation")))
            )
        elif category in _RUNTIME or category in ("cpu_op", "user_annotation"):
            span = _Span(
                start=start,
                end=start + length,
                category=str(category),
                name=str(event.get("name", "")),
                arguments=arguments,
            )
            threads[event.get("tid")].append(span)
    return _attribute(threads, kernels)


def _attribute(threads: Mapping[Any, list[_Span]], kernels: Sequence[tuple[str, str, float, int]]) -> Attribution:
    phases = _phases(threads.values())
    forward = _modules_by_number(threads.values())
    rows: dict[tuple[str, str, str, str, str], Row] = {}
    launches: dict[int, Owner] = {}
    total = known = 0.0
    for spans in threads.values():
        for span, stack, own in _nested(spans):
            owner = _owner(span, stack, phases, forward)
            if span.category in _RUNTIME:
                launches[int(span.arguments.get("correlation", -1))] = owner
            elif not kernels and span.category == "cpu_op":
                total += own
                known += _add(rows, owner, NAMES[kind_index(span.name)], own, counted=not _has_operator(stack))
    counted: set[int] = set()
    for name, category, seconds, correlation in kernels:
        owner = launches.get(correlation, _NOBODY)
        total += seconds
        known += _add(rows, owner, NAMES[kind_index(name, category)], seconds, counted=owner.call not in counted)
        counted.add(owner.call)
    return Attribution(
        rows=tuple(sorted(rows.values(), key=lambda row: -row.seconds)),
        seconds=total,
        attributed=known / total if total else 0.0,
        on_gpu=bool(kernels),
        steps=phases[2].count("optimizer"),
    )


_NOBODY = Owner(module="", phase="", operator="", shapes="", flops=0.0, bytes_moved=0.0, call=0)


def _add(rows: dict[Any, Row], owner: Owner, kind: str, seconds: float, *, counted: bool) -> float:
    """Adds a piece of work; the seconds of it whose owner is known."""
    module = _without_numbers(owner.module)
    key = (module, owner.phase, owner.operator, owner.shapes, kind)
    row = rows.setdefault(
        key, Row(module=module, phase=owner.phase, operator=owner.operator, shapes=owner.shapes, kind=kind)
    )
    row.seconds += seconds
    row.calls += 1
    if counted:
        row.flops += owner.flops
        row.bytes_moved += owner.bytes_moved
    return seconds if owner.module or owner.phase not in ("", "forward", "backward", "other") else 0.0


def _without_numbers(module: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module)


def _has_operator(stack: Sequence[_Span]) -> bool:
    """Whether an operator with shapes is open already: what it calls would count its FLOPs twice."""
    return any(span.category == "cpu_op" and _flops(span) > 0 for span in stack)


def _nested(spans: list[_Span]) -> Iterable[tuple[_Span, list[_Span], float]]:
    """(span, those that are open around it, outermost first; its own seconds without those inside)."""
    spans.sort(key=lambda span: (span.start, -span.end))
    inside = [0.0] * len(spans)
    stack: list[int] = []
    around: list[tuple[int, ...]] = []
    for index, span in enumerate(spans):
        while stack and spans[stack[-1]].end <= span.start:
            stack.pop()
        around.append(tuple(stack))
        # time inside counts against the innermost operator around, whatever annotations lie between
        for outer in reversed(stack):
            if spans[outer].category == "cpu_op":
                if span.category == "cpu_op":
                    inside[outer] += span.end - span.start
                break
        stack.append(index)
    for index, span in enumerate(spans):
        own = max(span.end - span.start - inside[index], 0.0) * 1e-6
        yield span, [spans[outer] for outer in around[index]], own


def _phases(threads: Iterable[list[_Span]]) -> tuple[list[float], list[float], list[str]]:
    """(starts, ends, names) of phases, by start."""
    found = sorted(
        (span.start, span.end, span.name.removeprefix(PHASE))
        for spans in threads
        for span in spans
        if span.name.startswith(PHASE)
    )
    return [start for start, *_ in found], [end for _, end, _ in found], [name for *_, name in found]


def _modules_by_number(threads: Iterable[list[_Span]]) -> dict[int, str]:
    """Sequence number of a forward operator -> its innermost module."""
    found: dict[int, str] = {}
    for spans in threads:
        for span, stack, _ in _nested(spans):
            number = span.arguments.get("Sequence number")
            if (
                span.category != "cpu_op"
                or not isinstance(number, int)
                or _undoes(stack)
                or span.name.startswith(BACKWARD)
            ):
                continue
            module = _module(stack)
            if module:
                found[number] = module
    return found


def _undoes(stack: Sequence[_Span]) -> bool:
    return any(span.name.startswith(BACKWARD) for span in stack)


def _module(stack: Sequence[_Span]) -> str:
    for span in reversed(stack):
        if span.name.startswith(MODULE):
            return span.name.removeprefix(MODULE)
    return ""


def _owner(
    span: _Span, stack: list[_Span], phases: tuple[list[float], list[float], list[str]], forward: Mapping[int, str]
) -> Owner:
    everything = [*stack, span]
    starts, ends, names = phases
    at = bisect_right(starts, span.start) - 1
    phase = names[at] if at >= 0 and span.start < ends[at] else ""
    module = _module(stack)
    backward = next((one for one in reversed(everything) if one.name.startswith(BACKWARD)), None)
    if module and (backward is not None or phase == "backward"):
        phase = "recompute"
    elif backward is not None:
        number = _number(everything[everything.index(backward) :])
        module = "" if number is None else forward.get(number, "")
        if not module and "AccumulateGrad" in backward.name:
            module = "gradient accumulation"
        phase = phase or "backward"
    innermost = next((one.name for one in reversed(everything) if one.category == "user_annotation"), "")
    if "/" in innermost:
        # a collective of ours: its name says whose it is, wherever it was called from
        module = innermost
    if not module and phase == "backward" and backward is None:
        module = "autograd engine"
    operator = next((one for one in everything if one.category == "cpu_op" and _flops(one) > 0), None)
    operator = operator or next(
        (one for one in reversed(everything) if one.category == "cpu_op" and not one.name.startswith(BACKWARD)), None
    )
    return Owner(
        module=module,
        phase=phase,
        operator=operator.name if operator else span.name.removeprefix(BACKWARD),
        shapes=_shapes(operator) if operator else "",
        flops=_flops(operator) if operator else 0.0,
        bytes_moved=_bytes(operator) if operator else 0.0,
        call=id(operator or span),
    )


def _number(backward: Sequence[_Span]) -> int | None:
    """Of the forward operator that is undone: the engine's own span lacks it now and then (torch 2.11), the node's
    span within has it."""
    numbers = (span.arguments.get("Sequence number") for span in backward[:2])
    return next((number for number in numbers if isinstance(number, int)), None)


def _dims(span: _Span) -> list[list[int]]:
    found = span.arguments.get("Input Dims")
    if not isinstance(found, list):
        return []
    return [one if isinstance(one, list) and all(isinstance(size, int) for size in one) else [] for one in found]


def _shapes(span: _Span) -> str:
    return " ".join("x".join(map(str, one)) for one in _dims(span) if one)


def _flops(span: _Span) -> float:
    """Of a matrix product or fused attention, 2 a multiply-add, half of it where attention is causal; other masks are
    not regarded; 0 of others."""
    dims = _dims(span)
    name = span.name.removeprefix("aten::")
    if name in ("addmm", "baddbmm", "addmm_", "baddbmm_"):
        dims = dims[1:]
    elif name not in ("mm", "bmm", "_scaled_mm", "_grouped_mm", "mv", "linear_backward"):
        attention = "attention" in name and len(dims) >= 2 and len(dims[0]) == 4 == len(dims[1])
        if not attention:
            return 0.0
        batch, heads, queries, width = dims[0]
        whole = (10.0 if "backward" in name else 4.0) * batch * heads * queries * dims[1][2] * width
        return whole / 2 if _is_causal(name, span.arguments.get("Concrete Inputs")) else whole
    if len(dims) < 2 or len(dims[0]) < 2 or not dims[1]:
        return 0.0
    return 2.0 * math.prod(dims[0]) * (dims[1][-1] if len(dims[1]) > 1 else 1)


_IS_CAUSAL = {
    "scaled_dot_product_attention": 5,
    "_scaled_dot_product_cudnn_attention": 6,
    "_scaled_dot_product_cudnn_attention_backward": 14,
    "_scaled_dot_product_efficient_attention": 6,
    "_scaled_dot_product_efficient_attention_backward": 11,
    "_scaled_dot_product_flash_attention": 4,
    "_scaled_dot_product_flash_attention_backward": 11,
    "_scaled_dot_product_flash_attention_for_cpu": 4,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 7,
    "_cudnn_attention_forward": 10,
    "_cudnn_attention_backward": 14,
    "_flash_attention_forward": 8,
    "_flash_attention_backward": 11,
}
"""Which argument of torch's operators says so."""


def _is_causal(name: str, values: object) -> bool:
    at = _IS_CAUSAL.get(name)
    return at is not None and isinstance(values, list) and len(values) > at and values[at] == "True"


def _bytes(span: _Span) -> float:
    kinds = span.arguments.get("Input type") or []
    return float(
        sum(math.prod(one) * _WIDTHS.get(str(kind), 4) for one, kind in zip(_dims(span), kinds, strict=False) if one)
    )
