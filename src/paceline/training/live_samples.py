"""What does the model say while it trains?

The weights continue the prompts where they lie, in the layout of the training: each new token is a forward pass of all
texts as an evaluation makes it. No layout keeps keys and values of earlier tokens for that, and the model is not there
twice. Texts stand in rows of one length, filled up on the right with tokens that nothing before them sees.

Dims: B texts, T tokens of a row, V vocabulary.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.checkpoint.ranks import Ranks
from paceline.config.run import RunConfig
from paceline.costs.low_precision import MULTIPLE
from paceline.data.batch import IGNORE_INDEX, Batch
from paceline.data.tokenizer import Tokenizer, load_tokenizer
from paceline.errors import ConfigError, DataError
from paceline.generate.decode import DecodeParams, stream_text
from paceline.generate.load import refuse_tokenizer, tokenizer_in
from paceline.generate.sample import next_tokens
from paceline.parallel.collectives import all_reduce
from paceline.runtime.seed import generator
from paceline.training.samples import ask
from paceline.training.setup import Parts

log = logging.getLogger(__name__)

_TOKENS_AT_A_TIME = 2048
"""Of all rows of a micro-batch, where that is more than one: the head gives V numbers for each."""


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """The same on every rank."""

    ids: list[list[int]]
    params: DecodeParams
    why_not: str = ""
    """The reason why nothing is said; empty = it is."""


class LiveSampler:
    """Continues `observe.sample_prompts` by the present weights. `open` makes one."""

    def __init__(self, parts: Parts, found: _Asked, tokenizer: Tokenizer | None, length: int) -> None:
        """``tokenizer``: on rank 0. ``length``: T."""
        self._parts, self._asked, self._tokenizer, self._length = parts, found, tokenizer, length

    @classmethod
    def open(cls, parts: Parts, folder: Path, ranks: Ranks) -> LiveSampler | None:
        """None where the recipe asks for no samples in between, or where there can be none: the log says why.
        Collective.

        Args:
            folder: of the run, which its tokenizer is kept in already.
        """
        config = parts.config
        if not (config.observe.sample_interval and config.observe.sample_prompts and config.train.eval_interval):
            return None
        tokenizers: list[Tokenizer] = []
        # by rank 0 alone: the others may not see the tokenizer's file
        found = ranks.from_first("reading the prompts", lambda: _ask(folder, config, tokenizers))
        length = row_length(config, found.ids, found.params.max_tokens)
        why_not = found.why_not or _why_not(config, found.ids, length)
        if why_not:
            if parts.info.is_main:
                log.warning("no samples at evaluations: %s", why_not)
            return None
        return cls(parts, found, tokenizers[0] if tokenizers else None, length)

    def due(self, step: int) -> bool:
        """Whether the evaluation after ``step`` has samples."""
        config = self._parts.config
        return step // config.train.eval_interval % config.observe.sample_interval == 0

    def draw(self, step: int, *, should_stop: Callable[[], bool]) -> tuple[tuple[str, str], ...]:
        """(prompt, continuation) of each prompt on rank 0, also in its log; nothing on others, or once any rank is to
        stop. Collective; weights must be published."""
        with self._parts.staged.evaluating():
            grown = self._grow(should_stop)
        if self._tokenizer is None or grown is None:
            return ()
        texts = [
            "".join(stream_text(self._tokenizer, prompt, new))
            for prompt, new in zip(self._asked.ids, grown, strict=True)
        ]
        samples = tuple(zip(self._parts.config.observe.sample_prompts, texts, strict=True))
        for prompt, text in samples:
            log.info("step %d: %r goes on %r", step, prompt, text)
        return samples

    def _grow(self, should_stop: Callable[[], bool]) -> list[list[int]] | None:
        ids, params = self._asked.ids, self._asked.params
        grown: list[list[int]] = [[] for _ in ids]
        rooms = [min(params.max_tokens, self._length - len(prompt)) for prompt in ids]
        alive = [True] * len(ids)
        streams = [generator("cpu", params.seed, "generate", sequence=number) for number in range(len(ids))]
        while any(alive):
            uniform = [torch.rand((), generator=stream).item() for stream in streams]
            rows = [[*prompt, *new] for prompt, new in zip(ids, grown, strict=True)]
            tokens, stops = self._next(rows, uniform, should_stop())
            if stops:
                return None
            for index, token in enumerate(tokens):
                if not alive[index]:
                    continue
                if token in params.stop_ids:
                    alive[index] = False
                    continue
                grown[index].append(token)
                alive[index] = len(grown[index]) < rooms[index]
        return grown

    def _next(self, rows: list[list[int]], uniform: list[float], stop: bool) -> tuple[list[int], bool]:
        """The next token of each text, the same on every rank, and whether any rank is to stop.

        The rank that has the last token's logits draws, and the sum of what all have brings it to the others: ranks
        whose logits differ in their last bits would otherwise go on differently, and wait for each other forever.
        """
        mesh, params = self._parts.mesh, self._asked.params
        drawn = torch.zeros(len(rows) + 1, dtype=torch.int64, device=self._parts.device)
        drawn[-1] = int(stop)
        speaks = mesh.dp_rank == 0 and mesh["tp"].index == 0
        batches, first = self._batches(rows)

        def each(number: int, batch: Batch, logits_BTV: Tensor) -> None:
            if not speaks:
                return
            positions_BT = batch.positions
            for row in range(len(logits_BTV)):
                index = first[number] + row
                if index >= len(rows):
                    break  # filled up
                last = len(rows[index]) - 1
                here = last if positions_BT is None else _place(positions_BT[row], last)
                if here is not None:
                    logits_1V = logits_BTV[row, here][None].float()
                    logits_1V[:, params.vocab_size :] = float("-inf")
                    drawn[index] = next_tokens(logits_1V, params.sampling, [uniform[index]])[0]

        self._parts.staged.logits(batches, each)
        all_reduce(drawn, mesh["world"], "world/samples/tokens")
        *tokens, stops = drawn.tolist()
        return tokens, bool(stops)

    def _batches(self, rows: list[list[int]]) -> tuple[list[Batch], list[int]]:
        """Micro-batches of one shape, and the number of the first text of each."""
        most = max(1, _TOKENS_AT_A_TIME // self._length)
        count = math.ceil(len(rows) / most)
        each = math.ceil(len(rows) / count)
        tokens_BT = torch.zeros(count * each, self._length, dtype=torch.int64)
        for row, ids in zip(tokens_BT, rows, strict=False):
            row[: len(ids)] = torch.tensor(ids)
        tokens_BT = tokens_BT.to(self._parts.device)
        labels_BT = torch.full_like(tokens_BT, IGNORE_INDEX)
        first = list(range(0, count * each, each))
        batches = [Batch(tokens=tokens_BT[at : at + each], labels=labels_BT[at : at + each]) for at in first]
        return batches, first


def row_length(config: RunConfig, ids: list[list[int]], max_tokens: int) -> int:
    """T: room for the longest text in a length that the layout and fp8 can cut, within the model's longest sequence."""
    layout = config.parallel
    unit = layout.tp * (2 * layout.cp if layout.cp > 1 else 1)
    if config.train.precision == "fp8":
        unit *= MULTIPLE
    wanted = max((len(prompt) for prompt in ids), default=0) + max_tokens
    return min(math.ceil(wanted / unit), config.model.max_seq_len // unit) * unit


def _ask(folder: Path, config: RunConfig, tokenizers: list[Tokenizer]) -> _Asked:
    """On rank 0, which keeps the tokenizer."""
    try:
        tokenizer = load_tokenizer(tokenizer_in((folder,), config))
        refuse_tokenizer(tokenizer, config.model.vocab_size)
        ids, params = ask((folder,), config, tokenizer)
    except (ConfigError, DataError) as error:
        return _Asked(ids=[], params=DecodeParams(), why_not=error.subject)
    tokenizers.append(tokenizer)
    return _Asked(ids=ids, params=params)


def _why_not(config: RunConfig, ids: list[list[int]], length: int) -> str:
    """The reason why there are no samples; empty if there is none."""
    longest = max(len(prompt) for prompt in ids)
    if longest >= length:
        return f"a prompt has {longest} tokens, and a row of this layout at most {length} (model.max_seq_len)"
    if config.model.is_moe and (config.model.moe.capacity_factor or config.model.moe.eval_capacity_factor):
        return "experts drop tokens beyond their capacity, and what fills a row up would count (model.moe)"
    return ""


def _place(positions_T: Tensor, position: int) -> int | None:
    """Where a position lies in a part of a sequence; None where it is another rank's."""
    found: list[int] = (positions_T == position).nonzero().flatten().tolist()
    return found[0] if found else None
