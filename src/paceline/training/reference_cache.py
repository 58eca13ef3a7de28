"""Log-probabilities of a reference model, computed once before training and kept in a file.

While they are computed the trained model itself has the reference's weights, so there is no second model at any time.
A file is named after all that decides its numbers: the samples in their order, the reference's weights, the network
and how it rounds (precision, fp8 settings, frozen weights in fewer bits). A run that goes on, or another one on the
same samples, takes it as it is.

Dims: N samples of a split in the order of their use, D documents of a row.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.checkpoint.adapters import fingerprint
from paceline.checkpoint.ranks import Ranks
from paceline.config.plugins import Registry
from paceline.config.run import RunConfig
from paceline.data.batch import Batch
from paceline.data.build import Datasets, Split
from paceline.data.index_cache import store_array
from paceline.data.loader import Loader
from paceline.data.sources import Sample, SampleSource
from paceline.errors import DataError
from paceline.models.lora import adapters_off
from paceline.models.transformer import Transformer
from paceline.parallel.collectives import all_reduce
from paceline.tasks.documents import LABELS, REFERENCE
from paceline.training.foreign import open_weights
from paceline.training.reference import evaluating
from paceline.training.setup import Parts
from paceline.training.start_weights import fill_from, open_start, reference_path

log = logging.getLogger(__name__)

_SAME_NUMBERS = frozenset({"fp8_weight_cache", "fp8_weights_only", "fp8_amax_history", "fp8_scaling"})
"""Of `train.fp8_...`: what decides when weights are cast, not what they become; and scales of earlier steps, which are
for training alone."""


@dataclass(frozen=True)
class WithReference:
    """The samples of a source with what a reference model says of each. Is a `SampleSource`."""

    source: SampleSource
    log_probs: NDArray[np.float32]
    """[N, D]"""

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, i: int) -> Sample:
        sample = self.source[i]
        return sample._replace(fields={**sample.fields, REFERENCE: self.log_probs[i]})


class ModelItself:
    """The trained model as it is now, without its adapters. Is a `Reference`."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    @contextmanager
    def stages(self) -> Iterator[Sequence[Transformer]]:
        own = self._parts.stages
        with ExitStack() as stack:
            stack.enter_context(evaluating(own))
            stack.enter_context(adapters_off(*own))
            yield own
        self._parts.engine.publish_weights()


class ReferenceCache:
    """Gives the splits of a run the field `REFERENCE`. Everything here is collective.

    Args:
        folder: where files are kept.
    """

    def __init__(self, parts: Parts, registry: Registry, ranks: Ranks, folder: Path) -> None:
        self._parts, self._registry, self._ranks, self._folder = parts, registry, ranks, folder

    def attach(self, datasets: Datasets) -> Datasets:
        """The same splits, with the field. To be called before the model has its own weights, or, with adapters, when
        it has those that they belong to: what is not kept yet is computed with it.

        Raises:
            CheckpointError: the reference's weights cannot be read.
            DataError: a file cannot be written.
        """
        splits = {"train": datasets.train, "valid": datasets.valid, "test": datasets.test}
        there = {name: split for name, split in splits.items() if split is not None and not _has_it(split)}
        if not there:
            log.info("the data have log-probabilities of a reference model: those are taken")
            return datasets
        identity = self._ranks.from_first("looking at the reference model", self._identity)
        paths = {name: self._path(split, identity) for name, split in there.items()}
        kept = self._ranks.from_first(
            "looking for kept log-probabilities", lambda: {name: path.exists() for name, path in paths.items()}
        )
        if not all(kept.values()):
            self._load()
        for name, split in there.items():
            if not kept[name]:
                self._compute(name, split, paths[name])
            log_probs_ND = np.load(paths[name], mmap_mode="r")
            splits[name] = replace(split, source=WithReference(split.source, log_probs_ND))
        train = splits["train"]
        assert train is not None
        return replace(datasets, train=train, valid=splits["valid"], test=splits["test"])

    def _identity(self) -> str:
        config = self._parts.config
        path = reference_path(config)
        return f"seed {config.run.seed}" if path is None else fingerprint(open_weights(path, self._registry, config))

    def _path(self, split: Split, identity: str) -> Path:
        config = self._parts.config
        key = {
            "samples": [split.identity, len(split), config.train.seq_len],
            "reference": identity,
            "model": config.model.model_dump(mode="json", exclude={"preset", "init_from"}),
            "task": config.task.kind,
            "arithmetic": _arithmetic(config),
        }
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return self._folder / f"{digest[:24]}-reference.npy"

    def _load(self) -> None:
        """Gives the model the reference's weights; with adapters it has them already."""
        config, engine = self._parts.config, self._parts.engine
        path = reference_path(config)
        if config.lora.on or path is None:
            return
        source, into = open_start(path, config, self._registry, self._ranks), engine.weights()
        self._ranks.gather(f"reading the reference model {path}", lambda: fill_from(source, into))
        engine.publish_weights()

    def _compute(self, name: str, split: Split, path: Path) -> None:
        log.info("computing the reference's log-probabilities of %d samples (%s)", len(split), name)
        rows: list[NDArray[np.float32]] = []
        with self._loader(split) as loader, torch.no_grad():
            batches = iter(loader)
            while group := list(islice(batches, loader.micro_batches_per_step)):
                rows.append(self._of_group(group))
        self._ranks.from_first(
            f"keeping {path}", lambda: self._keep(path, np.concatenate(rows)[: len(split)].astype(np.float32))
        )

    def _keep(self, path: Path, log_probs_ND: NDArray[np.float32]) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            store_array(path, log_probs_ND)
        except OSError as error:
            raise DataError(
                f"the reference's log-probabilities cannot be kept in {path.parent}",
                evidence=str(error),
                next_step="Set data.cache_dir to a folder that can be written, or task.precompute_reference = false.",
            ) from error
        log.info("kept in %s (%.1f MB)", path, log_probs_ND.nbytes / 1e6)

    def _of_group(self, group: Sequence[Batch]) -> NDArray[np.float32]:
        """[G, D] for the G samples of a global batch, or what is left of one, in order; on every rank."""
        parts, mesh = self._parts, self._parts.mesh
        batches = parts.staged.prepare([batch.to(parts.device) for batch in group])
        found = parts.staged.reference_log_probs(batches, ModelItself(parts))
        micro, width = batches[0].fields[LABELS].shape
        table = torch.zeros(len(group), mesh.dp_size, micro, width, dtype=torch.float64, device=parts.device)
        if mesh["tp"].index == 0 and mesh["cp"].index == 0:
            for index, fields in found.items():
                if fields:
                    table[index, mesh.dp_rank] = fields[REFERENCE]
        all_reduce(table, mesh["world"], "world/reference")
        return table.flatten(0, 2).float().cpu().numpy()

    def _loader(self, split: Split) -> Loader:
        config, mesh = self._parts.config, self._parts.mesh
        return Loader(
            split,
            micro_batch_size=config.train.micro_batch_size,
            global_batch_size=config.train.global_batch_size,
            dp_rank=mesh.dp_rank,
            dp_size=mesh.dp_size,
            num_workers=config.data.num_workers,
            prefetch=config.data.prefetch,
            at_end="pad",
        )


def _arithmetic(config: RunConfig) -> dict[str, Any]:
    """All of a recipe that decides how numbers are rounded.

    What is cast to few bits shares scales, over a rank's part of a matrix or of a batch: then how these are cut counts
    too. All else differs by the order of sums alone, in any layout.
    """
    train, lora, parallel = config.train, config.lora, config.parallel
    found: dict[str, Any] = {"precision": train.precision, "base": lora.base if lora.on else "bf16"}
    if train.precision == "fp8":
        fields = {name for name in type(train).model_fields if name.startswith("fp8_")} - _SAME_NUMBERS
        found |= train.model_dump(mode="json", include=fields)
        if train.fp8_experts:
            found |= {"expert_kernels": parallel.expert_kernels, "ep": parallel.ep, "etp": parallel.etp}
        found["fp8_scaling"] = train.fp8_own_scaling
        if train.fp8_own_scaling == "tensorwise":
            found |= {"micro_batch_size": train.micro_batch_size, "cp": parallel.cp}
    if train.precision == "fp8" or found["base"] != "bf16":
        found["tp"] = parallel.tp
    return found


def _has_it(split: Split) -> bool:
    return len(split) > 0 and REFERENCE in split[0].fields
