"""Small runs for the tests of the training room: recipes, data, and a way to run them on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from paceline.config.load import resolve
from paceline.data.indexed_writer import IndexedWriter
from paceline.data.sidecar import Sidecar, write_sidecar
from paceline.data.tokenizer import load_tokenizer
from paceline.observe.events import StepRecord, read_metrics
from paceline.observe.hooks import Hook, StepEnd
from paceline.runtime.process import ProcessInfo
from paceline.runtime.signals import StopRequest
from paceline.training.run import run_in_group

VOCAB = 96


def write_dataset(prefix: Path, *, documents: int = 60, seed: int = 0) -> str:
    """A dataset of made-up documents in which a token says much about the next one."""
    random = np.random.default_rng(seed)
    with IndexedWriter(prefix, vocab_size=VOCAB) as writer:
        for _ in range(documents):
            start, stride = random.integers(1, VOCAB), random.integers(1, 4)
            writer.add_document((start + stride * np.arange(random.integers(20, 60))) % VOCAB)
    return str(prefix)


def write_text(prefix: Path, *, documents: int = 60, seed: int = 0) -> str:
    """A dataset of bytes, with its tokenizer on record: letters in an order that depends on the document."""
    random, tokenizer, tokens = np.random.default_rng(seed), load_tokenizer("byte"), 0
    with IndexedWriter(prefix, vocab_size=tokenizer.vocab_size) as writer:
        for _ in range(documents):
            start, stride, length = random.integers(26), random.integers(1, 4), int(random.integers(20, 60))
            writer.add_document(ord("a") + (start + stride * np.arange(length)) % 26)
            tokens += length
    assert tokenizer.eod_id is not None
    sidecar = Sidecar(
        tokenizer="byte",
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
        eod_appended=False,
        documents=documents,
        tokens=tokens,
        text_bytes=tokens,
    )
    write_sidecar(prefix, sidecar)
    return str(prefix)


def tiny(run_dir: Path, data: str, *overrides: str, steps: int = 8) -> list[str]:
    """Overrides of a tiny recipe on a dataset."""
    return [
        f"run.dir={run_dir}",
        f"data.train={data}",
        "data.num_workers=1",
        "model.num_layers=2",
        "model.hidden_size=32",
        "model.num_heads=4",
        "model.num_kv_heads=2",
        "model.ffn_size=64",
        f"model.vocab_size={VOCAB}",
        "model.max_seq_len=32",
        f"train.steps={steps}",
        "train.seq_len=16",
        "train.micro_batch_size=1",
        "train.global_batch_size=4",
        "train.precision=fp32",
        "optim.lr=0.01",
        "optim.warmup_steps=2",
        "train.gc_interval=0",
        "observe.log_interval=1",
        "observe.tensorboard=false",
        "observe.progress=none",
        "checkpoint.interval=3",
        "cluster.device=cpu",
        *overrides,
    ]


def run(rank: int, world_size: int, overrides: Sequence[str], stop_after: int = 0) -> list[StepRecord]:
    """Runs a recipe in the process group that is there; the metrics so far, on every rank.

    Args:
        stop_after: asks to stop when so many steps are done, as a signal would.
    """
    recipe = resolve({}, list(overrides))
    stop = StopRequest()
    if stop_after:
        recipe.registry.hook(lambda config: StopAt(stop_after, stop))
    info = ProcessInfo(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size)
    run_in_group(recipe, info, torch.device("cpu"), stop)
    return read_metrics(Path(recipe.config.run.folder))


def alone(overrides: Sequence[str], stop_after: int = 0) -> list[StepRecord]:
    """A run of one process, in this one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return run(0, 1, overrides, stop_after)
    finally:
        dist.destroy_process_group()


def losses(records: Sequence[StepRecord]) -> dict[int, float | None]:
    return {record.step: record.loss for record in records}


class StopAt(Hook):
    """Asks the run to stop after a step."""

    def __init__(self, step: int, stop: StopRequest) -> None:
        self.step, self.stop = step, stop

    def on_step_end(self, end: StepEnd) -> None:
        if end.step == self.step:
            self.stop.request("the test asked")
