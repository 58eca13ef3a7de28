"""The `[data]` section: what the model reads."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.config.base import Section


class DataSource(Section):
    """One dataset of a blend."""

    path: str
    """Prefix of the `.bin` and `.idx` files."""
    weight: float = Field(1.0, gt=0)
    """Share of the samples, relative to the other sources."""


class DataConfig(Section):
    """What the model reads. `paceline data build` makes such datasets; Megatron-LM's own are read as they are."""

    train: str | tuple[DataSource, ...] = "synthetic"
    """Prefix of a dataset (`corpus` for corpus.bin and corpus.idx), a list of `{path, weight}`, or `synthetic`."""
    valid: str | tuple[DataSource, ...] = ""
    """Held-out data for evaluation while training; empty = none, unless `split` cuts it from `train` or that is
    synthetic: then other made-up tokens."""
    test: str | tuple[DataSource, ...] = ""
    """Held-out data evaluated once, at the end."""
    split: str = ""
    """`"98,1,1"` cuts train, valid and test from `train` by document; empty = all of `train` is for training."""
    tokenizer: str = ""
    """A tokenizer.json, a SentencePiece .model, or `byte`; empty = the one recorded beside the dataset."""
    order: Literal["megatron", "epoch"] = "megatron"
    """`megatron` is bit-compatible with Megatron-LM; `epoch` does not depend on the length of the run."""
    reset_at_document_ends: bool = False
    """Positions start again, and attention stops, at each document's end."""
    eod_mask_loss: bool = False
    """No loss where the input token is the end-of-document token."""
    cache_dir: str = ""
    """Where sample indices are kept; empty = beside the dataset."""
    num_workers: int = Field(2, ge=0)
    """Threads that prepare batches ahead of the step, per rank; 0 = in the step itself."""
    prefetch: int = Field(4, ge=1)
    """Micro-batches kept ready."""

    @property
    def is_synthetic(self) -> bool:
        return self.train == "synthetic"
