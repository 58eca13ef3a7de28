"""Where do the batches of a run come from, and how far has it read?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from paceline.checkpoint.ranks import Ranks
from paceline.config.data import DataSource
from paceline.config.plugins import Registry
from paceline.config.run import RunConfig
from paceline.costs.layers import Documents
from paceline.data.batch import Batch
from paceline.data.build import Datasets, Split, build_datasets
from paceline.data.document_lengths import document_lengths
from paceline.data.example_files import RowRequest
from paceline.data.example_sets import build_row_datasets
from paceline.data.loader import Loader
from paceline.data.sources import SampleSource
from paceline.errors import ConfigError
from paceline.parallel.mesh import ParallelMesh


@dataclass(frozen=True, kw_only=True)
class SourceContext:
    """What the factory of a plugin's data source is told beside the text after ``scheme:``."""

    seq_len: int
    vocab_size: int
    seed: int
    num_samples: int


def open_datasets(config: RunConfig, registry: Registry, *, train_samples: int) -> Datasets:
    """The train, valid and test datasets of a recipe; held-out ones hold every token exactly once.

    Raises:
        DataError, ConfigError: a dataset is missing, damaged, too short or has other tokens than the model.
    """
    plugin = _plugin_source(config.data.train, registry)
    if plugin is None and config.data.reads_rows(config.task.kind):
        return build_row_datasets(config.data, RowRequest.of(config), train_samples=train_samples)
    data = config.data.model_copy(update={"train": "synthetic"}) if plugin else config.data
    made_up = config.data.is_synthetic and config.data.valid in ("", "synthetic")
    built = build_datasets(
        data.model_copy(update={"valid": ""}) if made_up else data,
        seq_len=config.train.seq_len,
        vocab_size=config.model.vocab_size,
        seed=config.run.seed,
        train_samples=train_samples,
        valid_samples=config.train.eval_steps * config.train.global_batch_size if made_up else None,
        test_samples=None,
    )
    if plugin is None:
        return built
    scheme, rest = plugin
    context = SourceContext(
        seq_len=config.train.seq_len,
        vocab_size=config.model.vocab_size,
        seed=config.run.seed,
        num_samples=train_samples,
    )
    source: SampleSource = registry.data_sources[scheme](rest, context)
    split = Split(source=source, identity=f"{scheme}:{rest}", reports=(), bytes_per_token=None)
    return replace(built, train=split)


def documents_of(datasets: Datasets, ranks: Ranks) -> Documents | None:
    """Lengths of the documents in the training rows; None where attention sees whole rows. Collective: the first rank
    looks."""
    found = ranks.from_first("looking at documents", lambda: document_lengths(datasets.train.source))
    return None if found is None else Documents(counts=found.counts, tokens=found.tokens)


def _plugin_source(train: str | tuple[DataSource, ...], registry: Registry) -> tuple[str, str] | None:
    if not isinstance(train, str):
        return None
    scheme, colon, rest = train.partition(":")
    return (scheme, rest) if colon and scheme in registry.data_sources else None


class Feed:
    """Hands the micro-batches of one optimizer step to this rank, on its device."""

    def __init__(self, loader: Loader, micro_batches: int, device: torch.device) -> None:
        self._loader = loader
        self._batches = iter(loader)
        self._micro_batches = micro_batches
        self._device = device

    @classmethod
    def open(
        cls, dataset: Split, config: RunConfig, mesh: ParallelMesh, device: torch.device, *, start_sample: int
    ) -> Feed:
        train = config.train
        loader = Loader(
            dataset,
            micro_batch_size=train.micro_batch_size,
            global_batch_size=train.global_batch_size,
            dp_rank=mesh.dp_rank,
            dp_size=mesh.dp_size,
            start_sample=start_sample,
            num_workers=config.data.num_workers,
            prefetch=config.data.prefetch,
        )
        return cls(loader, train.global_batch_size // (train.micro_batch_size * mesh.dp_size), device)

    def next_step(self) -> Sequence[Batch]:
        """The micro-batches of the next step; copies to the GPU are queued, not waited for."""
        return [next(self._batches).to(self._device) for _ in range(self._micro_batches)]

    @property
    def wait_seconds(self) -> float:
        """How long the step has waited for data, in all."""
        return self._loader.wait_seconds

    @property
    def ready(self) -> int:
        """Micro-batches that are read and wait for the step."""
        return self._loader.ready

    def close(self) -> None:
        self._loader.close()


def samples_needed(config: RunConfig, *, consumed: int, steps_done: int) -> int:
    """Samples from the dataset's first one to the end of the run."""
    left = config.train.steps - steps_done
    if left < 0:
        raise ConfigError(f"{steps_done} steps are done, the run has {config.train.steps}")
    return consumed + left * config.train.global_batch_size
