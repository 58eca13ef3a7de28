"""How good is the model on data that it does not learn from?"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice

import torch
from torch import Tensor

from paceline.config.run import RunConfig
from paceline.data.batch import IGNORE_INDEX, Batch
from paceline.data.build import Split
from paceline.data.loader import Loader
from paceline.parallel.collectives import all_reduce
from paceline.runtime.process import any_rank
from paceline.tasks.task import MEAN, LossTerms
from paceline.training.staged import StagedTask


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result on a held-out set, in nats a token unless said otherwise."""

    loss: float
    """The task's; of a loss with several terms, the sum of their means."""
    tokens: int
    """Labels that were scored."""
    unigram_loss: float
    """Entropy of the scored tokens' own frequencies: no model that ignores the context can be below it on them."""
    bytes_per_token: float | None
    """UTF-8 bytes of text a token stands for, on average over the dataset; None where it is not recorded."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Of a task whose loss is not of tokens: what it is the mean over, by name."""
    means: Mapping[str, float] = field(default_factory=dict)
    """Further means of the task, by name."""

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float | None:
        return self._bits(self.loss)

    @property
    def unigram_bits_per_byte(self) -> float | None:
        return self._bits(self.unigram_loss)

    def _bits(self, loss: float) -> float | None:
        return None if self.bytes_per_token is None else loss / math.log(2) / self.bytes_per_token

    def values(self) -> dict[str, float]:
        """For the metrics: names and numbers."""
        if self.counts:
            return {"loss": self.loss, **{name: float(count) for name, count in self.counts.items()}, **self.means}
        found = {
            "loss": self.loss,
            "perplexity": self.perplexity,
            "tokens": float(self.tokens),
            "unigram_loss": self.unigram_loss,
        }
        for name in ("bits_per_byte", "unigram_bits_per_byte"):
            value = getattr(self, name)
            if value is not None:
                found[name] = value
        return found


class Evaluator:
    """Scores a held-out split, the same samples each time, whatever the layout.

    Args:
        split: the held-out data; every sample exactly once, the last one padded.
    """

    def __init__(
        self,
        config: RunConfig,
        split: Split,
        *,
        staged: StagedTask,
        device: torch.device,
    ) -> None:
        self.config = config
        self.split = split
        self.staged = staged
        self.mesh = staged.mesh
        self.device = device

    def run(self, global_batches: int | None, *, should_stop: Callable[[], bool] | None = None) -> Evaluation | None:
        """Scores the first so many global batches, or everything. A collective; weights must be published.

        Args:
            should_stop: asked between micro-batches; once it is true on any rank, there is no result: None.
        """
        with self.staged.evaluating():
            scored = self._score(global_batches, should_stop)
        return None if scored is None else self._result(*scored)

    def _result(self, sums: Tensor, histogram: Tensor) -> Evaluation:
        """``sums`` are those of `_forward`, over all ranks."""
        traits = self.staged.traits
        terms = len(traits.units)
        pairs: list[list[float]] = sums.tolist()
        ratios = [total / number if number else math.nan for total, number in pairs]
        counts = {name: int(number) for name, (_, number) in zip(traits.units, pairs, strict=False)}
        loss = math.fsum(ratios[:terms])
        if traits.units != ("tokens",):
            means = {name: ratio for name, ratio in zip(traits.means, ratios[terms:], strict=True) if ratio == ratio}
            return Evaluation(
                loss=loss, tokens=0, unigram_loss=math.nan, bytes_per_token=None, counts=counts, means=means
            )
        if not counts["tokens"]:
            return Evaluation(loss=math.nan, tokens=0, unigram_loss=math.nan, bytes_per_token=None)
        return Evaluation(
            loss=loss,
            tokens=counts["tokens"],
            unigram_loss=_entropy(histogram),
            bytes_per_token=self.split.bytes_per_token,
        )

    def _score(
        self, global_batches: int | None, should_stop: Callable[[], bool] | None
    ) -> tuple[Tensor, Tensor] | None:
        sums = self._no_sums()
        histogram = torch.zeros(self.config.model.vocab_size, dtype=torch.int64, device=self.device)
        # of the ranks that have the same loss one counts: those of a tensor-parallel group, and where the loss is of
        # whole rows those of a context-parallel one
        first = self.mesh["tp"].index == 0 and (self.mesh["cp"].index == 0 or not self.staged.traits.whole)
        counts = first and self.staged.has_loss
        with self._loader() as loader:
            batches = iter(loader)
            for _ in count() if global_batches is None else range(global_batches):
                # a vote for each global batch, not each micro-batch: between votes a pipeline stays full
                group = list(islice(batches, loader.micro_batches_per_step))
                if not group:
                    break
                if should_stop is not None and any_rank(should_stop()):
                    return None
                group = self.staged.prepare([batch.to(self.device) for batch in group])
                scored = self._forward(group)
                if counts:
                    sums += scored
                    for batch in group:
                        histogram += _label_counts(batch, histogram.numel())
        all_reduce(sums, self.mesh["world"], "world/evaluation/loss")
        all_reduce(histogram, self.mesh["world"], "world/evaluation/labels")
        return sums, histogram

    def _forward(self, batches: Sequence[Batch]) -> Tensor:
        """float64 [K + M, 2], where the last stage is here: the sum and the number of each of the K terms of the loss,
        and of each of the task's M means."""
        sums = self._no_sums()

        def add(terms: LossTerms) -> None:
            # deliberately not loss_sum: with multi-token prediction it holds more than the next token's loss
            main = terms.stats.get("loss_sum_main", terms.loss_sum)
            found = [torch.stack((main.double(), terms.units.double()), dim=-1).reshape(-1, 2)]
            found += [terms.stats[MEAN + name].double()[None] for name in self.staged.traits.means]
            sums.add_(torch.cat(found))

        self.staged.evaluate(batches, add)
        return sums

    def _no_sums(self) -> Tensor:
        traits = self.staged.traits
        rows = len(traits.units) + len(traits.means)
        return torch.zeros(rows, 2, dtype=torch.float64, device=self.device)

    def _loader(self) -> Loader:
        train = self.config.train
        return Loader(
            self.split,
            micro_batch_size=train.micro_batch_size,
            global_batch_size=train.global_batch_size,
            dp_rank=self.mesh.dp_rank,
            dp_size=self.mesh.dp_size,
            num_workers=self.config.data.num_workers,
            prefetch=self.config.data.prefetch,
            at_end="pad",
        )


def _label_counts(batch: Batch, vocab_size: int) -> Tensor:
    labels = batch.labels.flatten()
    scored = labels != IGNORE_INDEX
    counts = torch.zeros(vocab_size, dtype=torch.int64, device=labels.device)
    return counts.scatter_add_(0, labels.clamp(min=0), scored.long())


def _entropy(histogram: Tensor) -> float:
    """Entropy in nats of the distribution that these counts are."""
    counts = histogram.double()
    shares = counts / counts.sum()
    return float(-torch.special.xlogy(shares, shares).sum())


def with_prefix(prefix: str, values: Mapping[str, float]) -> dict[str, float]:
    """``{"loss": 1}`` -> ``{"valid/loss": 1}``."""
    return {f"{prefix}/{name}": value for name, value in values.items()}
