"""What around a Megatron-LM command line deserves a word: its environment, habits, and what was not understood."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.costs.workload import Cluster
from paceline.planner.megatron import MegatronRun
from paceline.planner.megatron_model import padded, vocabulary
from paceline.report.finding import Finding, Severity

_FILES = frozenset(
    {"data-path", "train-data-path", "valid-data-path", "test-data-path", "data-cache-path", "save", "load"}
    | {"vocab-file", "merge-file", "tensorboard-dir", "tokenizer-model", "tokenizer-name-or-path", "wandb-project"}
    | {"wandb-exp-name", "wandb-save-dir", "deepspeed-config", "deepspeed_config", "kill-switch-path"}
    | {"train-weighted-split-paths-path", "valid-weighted-split-paths-path"}
)
"""Flags whose values are places: they decide nothing here."""


def surroundings(run: MegatronRun, cluster: Cluster) -> Iterator[Finding]:
    """In no order of weight."""
    yield from _environment(run, cluster)
    yield from _habits(run)
    yield from _understood(run)


def remark(id_: str, severity: Severity, subject: str, evidence: str, step: str, gain: str | None = None) -> Finding:
    """A finding of this reader."""
    return Finding(
        id=f"megatron.{id_}", severity=severity, subject=subject, evidence=evidence, next_step=step, gain=gain
    )


def _environment(run: MegatronRun, cluster: Cluster) -> Iterator[Finding]:
    environment, layout = run.launch.environment, run.layout
    script = run.launch.program != "pretrain_gpt.py" or bool(environment)
    connections = environment.get("CUDA_DEVICE_MAX_CONNECTIONS")
    blackwell = cluster.gpu.name.startswith(("B", "GB"))
    if layout.fsdp and connections == "1":
        yield remark(
            "max-connections",
            "warning",
            "CUDA_DEVICE_MAX_CONNECTIONS=1 with FSDP",
            "One queue makes prefetched gathers wait behind computation; Megatron asserts that it is not 1.",
            "Unset it.",
        )
    elif not layout.fsdp and (layout.tp > 1 or layout.cp > 1) and connections != "1" and not blackwell:
        value = f"is {connections}" if connections else "is not set" if script else "is not said"
        yield remark(
            "max-connections",
            "warning",
            f"CUDA_DEVICE_MAX_CONNECTIONS {value} with tp {layout.tp}, cp {layout.cp}",
            "With one queue communication starts before the product that hides it; Megatron asserts 1 here before "
            "Blackwell.",
            "export CUDA_DEVICE_MAX_CONNECTIONS=1 before Python starts; from inside it has no effect.",
        )
    for name, bad, what in (
        ("NCCL_P2P_DISABLE", ("1",), "GPUs of a node talk through host memory"),
        ("NCCL_IB_DISABLE", ("1",), "nodes talk over sockets, about ten times slower"),
        ("CUDA_LAUNCH_BLOCKING", ("1",), "every kernel is waited for: nothing overlaps"),
        ("NCCL_DEBUG", ("INFO", "TRACE"), "a debug setting; NVIDIA says it has no place in production"),
    ):
        if environment.get(name) in bad:
            yield remark(
                "environment",
                "warning" if name != "NCCL_DEBUG" else "note",
                f"{name}={environment[name]}",
                f"{what[0].upper()}{what[1:]}.",
                f"Unset {name}, unless it works around a fault that is still there.",
            )
    if script and "expandable_segments:True" not in environment.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        yield remark(
            "allocator",
            "note",
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True is not set",
            "Runs close to the card's memory have failed by fragmentation alone.",
            "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        )


def _habits(run: MegatronRun) -> Iterator[Finding]:
    flags, model = run.flags, run.config.model
    if not flags.on("manual-gc") and run.gpus >= 64:
        yield remark(
            "gc",
            "note",
            "--manual-gc is off",
            f"Python collects garbage on each of {run.gpus} ranks when it likes, and all wait for the one that does.",
            "Add --manual-gc.",
        )
    if not flags.on("log-throughput"):
        yield remark(
            "log-throughput",
            "note",
            "--log-throughput is off",
            "The log then shows no TFLOP/s to compare with what is predicted here.",
            "Add --log-throughput.",
        )
    modern = model.norm == "rmsnorm" or model.position == "rope"
    if modern and (model.dropout > 0 or model.attention_dropout > 0):
        yield remark(
            "dropout",
            "warning",
            f"dropout is {model.dropout} and {model.attention_dropout} in attention (Megatron's defaults)",
            "Models with RMSNorm or rotary positions are trained without; masks cost memory and time.",
            "Add --hidden-dropout 0 --attention-dropout 0.",
        )


def _understood(run: MegatronRun) -> Iterator[Finding]:
    flags = run.flags
    rows, who = vocabulary(flags)
    whole = padded(rows, flags, run.layout.tp)
    if not who:
        yield remark(
            "vocabulary",
            "note",
            f"the vocabulary is not given; {rows:,} (GPT-2's) is assumed",
            "Embedding, head and logits are predicted from it.",
            "Give --vocab-size or a --tokenizer-model whose name says it.",
        )
    elif whole != rows:
        unit = flags.integer("make-vocab-size-divisible-by", 128)
        yield remark(
            "vocabulary-padding",
            "note",
            f"the vocabulary is padded from {rows:,} to {whole:,}, a multiple of {unit} x tp {run.layout.tp}",
            "The size, and with it checkpoints, changes with tp.",
            f"Choose --make-vocab-size-divisible-by so that it does not: {unit * run.layout.tp} with tp 1."
            if run.layout.tp > 1
            else "A vocabulary that is a multiple of 128 needs none.",
        )
    for unknown in flags.unknown:
        near = f"Did you mean --{unknown.near}? " if unknown.near else ""
        yield remark(
            "unknown-flag",
            "warning" if unknown.near else "note",
            f"{unknown} is not a flag that is known here, and was not taken into account",
            "Megatron refuses flags it does not know; forks have their own.",
            f"{near}Look whether it changes the model, the batch or the layout.",
        )
    if opened := {name: text for name, text in flags.open.items() if name not in _FILES}:
        yield remark(
            "open",
            "warning",
            f"values that nothing in the script sets: {', '.join(f'--{k} {v}' for k, v in opened.items())}",
            "They were taken as not given.",
            "Say them with --env NAME=VALUE.",
        )
    if run.launch.passed_over:
        yield remark(
            "passed-over",
            "note",
            f"not read in the script: {', '.join(run.launch.passed_over)}",
            "Loops, `case`, functions and other files are passed over.",
            "If flags are made there, print the command (`echo`) and give that.",
        )
