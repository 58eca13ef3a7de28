"""Deals the samples of a global batch out to data-parallel ranks, ahead of time.

A global batch is ``global_batch_size`` consecutive samples, whatever the number of ranks or workers. Micro-step m of it
takes the next ``micro_batch_size * dp_size`` samples, of which rank r gets positions [r * mbs, (r + 1) * mbs). The
whole state is one number: the samples consumed by all ranks together.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.data.batch import IGNORE_INDEX, Batch
from paceline.data.boundaries import document_boundaries
from paceline.data.sources import Sample, SampleSource
from paceline.errors import ConfigError, DataError


class Loader:
    """Iterates over this rank's micro-batches, in host memory (page-locked where there is a GPU).

    Threads read ahead: samples come from memory maps, so the work is copying, which does not hold the interpreter lock
    for long. An error in a thread is raised at the step that would have got its batch. No random number is drawn.

    Args:
        start_sample: samples consumed before, by all ranks together (a multiple of what a micro-step takes).
        num_workers: threads; 0 = read in the consumer.
        prefetch: micro-batches kept ready.
        at_end: ``"error"``: asking for more samples than the dataset has is a DataError; ``"pad"``: the last global
            batch is filled with rows without loss and the iteration ends (for evaluation on a whole dataset).
    Raises:
        ConfigError: the batch sizes do not divide.
    """

    def __init__(
        self,
        dataset: SampleSource,
        *,
        micro_batch_size: int,
        global_batch_size: int,
        dp_rank: int,
        dp_size: int,
        start_sample: int = 0,
        num_workers: int = 2,
        prefetch: int = 4,
        at_end: Literal["error", "pad"] = "error",
    ) -> None:
        per_micro_step = micro_batch_size * dp_size
        if global_batch_size % per_micro_step:
            lower = global_batch_size // per_micro_step * per_micro_step
            raise ConfigError(
                f"train.global_batch_size = {global_batch_size} is not a multiple of micro_batch_size * "
                f"data-parallel size = {micro_batch_size} * {dp_size} = {per_micro_step}",
                evidence="Every rank must do the same number of micro-steps.",
                next_step=f"Nearest sizes: {lower or per_micro_step} and {lower + per_micro_step}.",
            )
        if start_sample % per_micro_step:
            raise ConfigError(
                f"{start_sample} samples are consumed, which is no multiple of micro_batch_size * data-parallel size = "
                f"{per_micro_step}",
                evidence="The next micro-step would begin within a batch of the one before.",
                next_step="Resume at the end of a global batch, or choose sizes that divide it.",
            )
        assert 0 <= dp_rank < dp_size
        self.dataset = dataset
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = global_batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.consumed_samples = start_sample
        self.wait_seconds = 0.0
        """time that the consumer spent waiting for batches, in all"""
        self._at_end = at_end
        self._prefetch = max(1, prefetch)
        self._pin = torch.cuda.is_available()
        self._next = start_sample  # first sample of the next micro-step to be started
        self._pending: deque[Future[Batch]] = deque()
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="paceline-data") if num_workers else None

    @property
    def micro_batches_per_step(self) -> int:
        return self.global_batch_size // (self.micro_batch_size * self.dp_size)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._is_over(self.consumed_samples):
            self.close()
            raise StopIteration
        began = time.perf_counter()
        batch = self._take()
        self.wait_seconds += time.perf_counter() - began
        self.consumed_samples += self.micro_batch_size * self.dp_size
        return batch

    @property
    def ready(self) -> int:
        """Micro-batches that wait for the consumer."""
        return sum(future.done() for future in self._pending)

    def state(self) -> dict[str, int]:
        """All that a resumed run needs: hand ``consumed_samples`` to the next loader as ``start_sample``."""
        return {"consumed_samples": self.consumed_samples}

    def close(self) -> None:
        """Stops the threads. Batches that are ready are dropped; the state stays where the consumer is."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
        self._pending.clear()
        self._next = self.consumed_samples

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take(self) -> Batch:
        if self._pool is None:
            start, self._next = self._next, self._next + self.micro_batch_size * self.dp_size
            return self._make(start)
        while len(self._pending) < self._prefetch and self._may_start(self._next):
            self._pending.append(self._pool.submit(self._make, self._next))
            self._next += self.micro_batch_size * self.dp_size
        return self._pending.popleft().result()

    def _may_start(self, start: int) -> bool:
        # past the end one batch is still started when nothing else is pending: it carries the error to the consumer
        if self._at_end == "pad":
            return not self._is_over(start)
        return start < len(self.dataset) or not self._pending

    def _is_over(self, start: int) -> bool:
        """With padding, the iteration ends after the global batch that holds the last sample."""
        if self._at_end == "error":
            return False
        return start >= -(-len(self.dataset) // self.global_batch_size) * self.global_batch_size

    def _make(self, start: int) -> Batch:
        first = start + self.dp_rank * self.micro_batch_size
        end = first + self.micro_batch_size
        size = len(self.dataset)
        if self._at_end == "error" and start + self.micro_batch_size * self.dp_size > size:
            raise DataError(
                f"the dataset has {size:,} samples and the run asks for sample {size:,} and more",
                evidence=f"{start:,} samples were consumed; the next micro-step takes "
                f"{self.micro_batch_size * self.dp_size} more.",
                next_step="The dataset is built for the samples that train.steps needs: raise train.steps "
                "rather than running past it.",
            )
        samples = [self.dataset[i] for i in range(first, min(end, size))]
        if len(samples) < self.micro_batch_size:
            model = samples[0] if samples else self.dataset[size - 1]
            samples += [_without_loss(model)] * (self.micro_batch_size - len(samples))
        batch = collate(samples)
        return batch.pin_memory() if self._pin else batch


def collate(samples: list[Sample]) -> Batch:
    """Rows to a batch."""

    def stack(arrays: list[NDArray]) -> torch.Tensor:
        return torch.from_numpy(np.stack(arrays))

    documents_BT = _stack_optional([sample.documents for sample in samples])
    return Batch(
        tokens=stack([sample.tokens for sample in samples]),
        labels=stack([sample.labels for sample in samples]),
        positions=_stack_optional([sample.positions for sample in samples]),
        documents=documents_BT,
        boundaries=None if documents_BT is None else document_boundaries(documents_BT),
        fields={name: stack([sample.fields[name] for sample in samples]) for name in samples[0].fields},
    )


def _stack_optional(arrays: list[NDArray | None]) -> torch.Tensor | None:
    present = [array for array in arrays if array is not None]
    assert len(present) in (0, len(arrays)), "rows of one batch must agree on positions and documents"
    return torch.from_numpy(np.stack(present)) if present else None


def _without_loss(sample: Sample) -> Sample:
    return sample._replace(labels=np.full_like(sample.labels, IGNORE_INDEX))
