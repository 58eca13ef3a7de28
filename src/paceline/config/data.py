"""The `[data]` section: what the model reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from paceline.config.base import Section


class DataSource(Section):
    """One dataset of a blend."""

    path: str
    """Prefix of the `.bin` and `.idx` files; for conversations and the like a file or folder of rows."""
    weight: float = Field(1.0, gt=0)
    """Share of the samples, relative to the other sources."""


def _paths_are_sources(value: Any) -> Any:
    return [{"path": item} if isinstance(item, str) else item for item in value] if isinstance(value, list) else value


Sources = Annotated[str | tuple[DataSource, ...], BeforeValidator(_paths_are_sources)]
"""One path, or a list of paths and `{path, weight}`."""

ROW_SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".txt", ".gz", ".zst")
"""Files that hold rows, not a dataset's tokens."""


class DataConfig(Section):
    """What the model reads. `paceline data build` makes datasets of text; Megatron-LM's own are read as they are.
    Conversations, preference pairs and other rows are read from their files (docs/data.md, post-training)."""

    train: Sources = "synthetic"
    """Prefix of a dataset (`corpus` for corpus.bin and corpus.idx), a file or folder of rows, an entry of
    LLaMA-Factory's description (`dataset_info.json#NAME`), a list of paths or `{path, weight}`, or `synthetic`."""
    valid: Sources = ""
    """Held-out data for evaluation while training; empty = none, unless `split` cuts it from `train` or that is
    synthetic: then other made-up tokens."""
    test: Sources = ""
    """Held-out data evaluated once, at the end."""
    split: str = ""
    """`"98,1,1"` cuts train, valid and test from `train` by document; empty = all of `train` is for training."""
    tokenizer: str = ""
    """A tokenizer.json, a SentencePiece .model, a run that used one, or `byte`; empty = the one recorded beside the
    dataset, for rows the one in the folder `model.init_from`."""
    template: str = ""
    """How conversations become text: a name (chatml, llama3, mistral, gemma, zephyr, alpaca, vicuna, qwen) or the path
    of a Jinja file; empty = the tokenizer's own chat template, or the one that the run named there used."""
    mask: Literal["assistant", "last", "all"] = "assistant"
    """What of a conversation is learned: all answers of the assistant, the last one, or every token."""
    packing: Literal["pack", "none", "buckets"] = "pack"
    """`pack` fills sequences of `train.seq_len` with whole examples that do not see each other, `none` gives each its
    own, `buckets` too, only as long as a global batch needs."""
    too_long: Literal["refuse", "truncate", "drop"] = "refuse"
    """What is done with examples longer than `train.seq_len`; those cut or left out are counted."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """What is done where rows cannot be used: `refuse` lists them and stops, `skip` counts them."""
    epochs: float = Field(0.0, ge=0)
    """Refuse to read the rows more often than this, naming the `train.steps` that fits; 0 = as often as steps need."""
    order: Literal["megatron", "epoch"] = "megatron"
    """`megatron` is bit-compatible with Megatron-LM; `epoch` does not depend on the length of the run."""
    reset_at_document_ends: bool = False
    """Positions start again, and attention stops, at each document's end."""
    document_tokens: float = Field(0.0, ge=0)
    """For `paceline plan`, which does not read data: the length of the document that a token lies in, in the mean over
    the tokens of rows that documents share without seeing each other. `paceline train --dry-run` prints it of data that
    are there; 0 = attention is counted over whole rows."""
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

    def reads_rows(self, task: str) -> bool:
        """Whether training data are rows of files (conversations and their like), not a dataset's tokens: always so
        after pre-training, before it where a file of rows is named."""
        if self.is_synthetic:
            return False
        return task in ROW_TASKS or any(names_rows(path) for path in self._paths())

    def _paths(self) -> Iterable[str]:
        return (self.train,) if isinstance(self.train, str) else [source.path for source in self.train]


ROW_TASKS = ("sft", "dpo", "orpo", "reward", "kto")
"""Tasks that learn from rows."""


def names_rows(path: str) -> bool:
    """Whether a path is one of rows by its name."""
    return "#" in path or path.endswith(ROW_SUFFIXES)
