"""A plugin: one file that adds a preset, a data source, a task and a hook to Paceline.

    paceline train examples/plugin/recipe.toml

The recipe names this file in `run.plugins`; Paceline imports it on every rank and calls `register`. Nothing here
needs a change to Paceline itself.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from torch import Tensor

from paceline.config.plugins import Registry
from paceline.config.run import RunConfig
from paceline.data.batch import IGNORE_INDEX, Batch
from paceline.data.sources import Sample
from paceline.errors import DataError
from paceline.observe.hooks import Hook, RunEnd, RunStart, StepEnd
from paceline.tasks.pretrain import Pretrain
from paceline.tasks.task import Forward, LossTerms
from paceline.training.feed import SourceContext


def register(registry: Registry) -> None:
    """Called once, before the recipe is checked."""
    registry.preset("pocket", POCKET)
    registry.data_source("bytes", open_bytes)
    registry.task("with_context", WithContext)
    registry.hook(BestLoss)


# ---- a preset: fields of the [model] section; the recipe's own fields win over them

POCKET = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_size": 192,
    "vocab_size": 256,
    "max_seq_len": 256,
    "tie_embeddings": True,
}


# ---- a data source: data.train = "bytes:PATH" reads a file as it is, a byte a token


class ByteFile:
    """Windows of ``seq_len`` bytes at places that depend on the seed and the sample's number alone.

    That is the one rule for a source: sample i is the same on every rank, with any number of ranks, and after a resume.
    """

    def __init__(self, content: bytes, context: SourceContext) -> None:
        self.content = np.frombuffer(content, dtype=np.uint8)
        self.context = context

    def __len__(self) -> int:
        return self.context.num_samples

    def __getitem__(self, i: int) -> Sample:
        seq_len = self.context.seq_len
        start = np.random.default_rng((self.context.seed, i)).integers(len(self.content) - seq_len)
        window = self.content[start : start + seq_len + 1].astype(np.int64)  # one more than seq_len: the last label
        return Sample(tokens=window[:-1], labels=window[1:])


def open_bytes(path: str, context: SourceContext) -> ByteFile:
    """``path`` is what stands after ``bytes:`` in the recipe."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read", evidence=str(error), next_step="Mend data.train.") from error
    if len(content) <= context.seq_len:
        raise DataError(
            f"{path} has {len(content)} bytes, a sample needs {context.seq_len + 1}",
            next_step=f"Give a longer file, or set train.seq_len to at most {len(content) - 1}.",
        )
    return ByteFile(content, context)


# ---- a task: what is learned from a batch


class WithContext:
    """Next-token prediction, scored only where at least half of the sequence stands before the token.

    A task says how many units its loss is averaged over (`count`) and returns sums (`loss`); the training step divides
    by the count of the whole global batch. So accumulation and data parallelism are right for every task at once.
    """

    kind = "with_context"

    def __init__(self, config: RunConfig) -> None:
        self.unscored = config.train.seq_len // 2
        self._inner = Pretrain()

    def prepare(self, batch: Batch) -> Batch:
        labels = batch.labels.clone()
        labels[:, : self.unscored] = IGNORE_INDEX
        return Batch(tokens=batch.tokens, labels=labels, positions=batch.positions, documents=batch.documents)

    def count(self, batch: Batch) -> Tensor:
        return batch.num_tokens()

    def loss(self, model: Forward, batch: Batch) -> LossTerms:
        return self._inner.loss(model, batch)


# ---- a hook: looks on at six moments of a run, and changes nothing


class BestLoss(Hook):
    """Leaves ``best_loss.json`` in the run folder: the lowest logged training loss, and its step.

    A hook lives on every rank; this one writes on the first only.
    """

    def __init__(self, config: RunConfig) -> None:
        self.folder: Path | None = None
        self.best: tuple[float, int] | None = None

    def on_start(self, start: RunStart) -> None:
        self.folder = start.run_dir if start.rank == 0 else None

    def on_step_end(self, end: StepEnd) -> None:
        # a record is there on logged steps only: asking for numbers on others would make the GPU wait
        if end.record is not None and end.record.loss is not None:
            found = (end.record.loss, end.step)
            self.best = found if self.best is None else min(self.best, found)

    def on_end(self, end: RunEnd) -> None:
        if self.folder is not None and self.best is not None:
            loss, step = self.best
            (self.folder / "best_loss.json").write_text(json.dumps({"loss": loss, "step": step}) + "\n")
