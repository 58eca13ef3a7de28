"""How does a text grow, token by token?

Prompts of different lengths share a batch by padding on the left: the newest token of every sequence is in the last
column, positions count from each sequence's own beginning, and padding is a document that nobody else sees.

Dims: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from paceline.data.tokenizer import Tokenizer
from paceline.errors import ConfigError
from paceline.generate.cache import KVCache
from paceline.generate.sample import SamplingParams, next_tokens
from paceline.kernels.attention import AttentionCore
from paceline.models.transformer import Transformer
from paceline.runtime.seed import generator

_PREFILL_TOKENS = 512
# prompts are read in parts of so many tokens: the model gives logits for every position, V numbers each


@dataclass(frozen=True, kw_only=True)
class DecodeParams:
    max_tokens: int = 128
    """New tokens at most; fewer where the model's longest sequence is reached."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    """Sequence i of a call draws from its own stream (seed, i)."""
    stop_id: int | None = None
    """End of document: ends the sequence and is not part of it."""
    stop_ids: tuple[int, ...] = ()
    """More such tokens: chat models end an answer and a text by different ones."""
    vocab_size: int | None = None
    """Ids the tokenizer knows: the model's padding rows beyond are never drawn."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    prompt: str
    text: str
    """What was added to the prompt."""
    token_ids: list[int]
    finish_reason: Literal["stop", "length"]


# as a decorator: a context inside a generator would reach into the caller between two steps
@torch.no_grad()
def generate_ids(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    params: DecodeParams,
    *,
    numbers: Sequence[int] | None = None,
    core: AttentionCore | None = None,
) -> Iterator[list[int | None]]:
    """Yields the next token of every sequence, step by step; None for one that has ended.

    ``numbers`` are the sequences' numbers for their seeds; 0, 1, ... if left out.

    Experts with a capacity drop tokens by their number in the sequence: padding would count, so such a model takes
    prompts of one length. Its new tokens are never dropped, as each comes alone.

    Raises:
        ConfigError: a prompt has no token, or fills the model's longest sequence.
    """
    _check_prompts(model, prompts)
    rows = _Rows.pad(prompts, device=next(model.parameters()).device)
    longest = model.config.max_seq_len
    rooms = [min(params.max_tokens, longest - len(prompt)) for prompt in prompts]
    cache = KVCache(len(prompts), rows.longest + max(rooms), core)
    numbers = range(len(prompts)) if numbers is None else numbers
    streams = [generator("cpu", params.seed, "generate", sequence=number) for number in numbers]
    alive = [True] * len(prompts)
    was_training = model.training
    model.eval()
    try:
        stops = {params.stop_id, *params.stop_ids}
        with cache.attached(model):
            logits_BV = _read_prompts(model, cache, rows)
            seen_BV = _seen(rows, logits_BV)
            for step in range(max(rooms)):
                if params.vocab_size is not None:
                    logits_BV[:, params.vocab_size :] = float("-inf")
                uniform = [torch.rand((), generator=stream).item() for stream in streams]
                tokens_B = next_tokens(logits_BV, params.sampling, uniform, seen_BV)
                seen_BV.scatter_(1, tokens_B[:, None], True)
                found: list[int] = tokens_B.tolist()
                alive = [was and token not in stops for was, token in zip(alive, found, strict=True)]
                yield [token if is_alive else None for token, is_alive in zip(found, alive, strict=True)]
                alive = [was and step + 1 < room for was, room in zip(alive, rooms, strict=True)]
                if not any(alive):
                    return
                # a row that is at its end goes along with the others, and nobody reads what it says
                positions_B1 = rows.positions_of(step).clamp(max=longest - 1)
                logits_BV = _last(cache.forward(model, tokens_B[:, None], positions_B1, rows.one_more()))
    finally:
        model.train(was_training)


def generate_text(
    model: Transformer, tokenizer: Tokenizer, prompts: Sequence[str], params: DecodeParams
) -> list[Completion]:
    """Completes each prompt; an empty one begins a document. Errors as in ``generate_ids``."""
    return complete(model, tokenizer, prompts, [encode_prompt(tokenizer, prompt) for prompt in prompts], params)


def complete(
    model: Transformer,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    ids: Sequence[Sequence[int]],
    params: DecodeParams,
) -> list[Completion]:
    """Completes prompts that are given as ids; ``prompts`` are what they are called."""
    grown: list[list[int]] = [[] for _ in ids]
    ended: set[int] = set()
    rooms = [min(params.max_tokens, model.config.max_seq_len - len(prompt)) for prompt in ids]
    for batch in equal_length_batches(ids) if has_capacity(model) else [list(range(len(ids)))]:
        for tokens in generate_ids(model, [ids[index] for index in batch], params, numbers=batch):
            for index, token in zip(batch, tokens, strict=True):
                if token is None:
                    if len(grown[index]) < rooms[index]:
                        ended.add(index)
                else:
                    grown[index].append(token)
    texts = ["".join(stream_text(tokenizer, prompt, new)) for prompt, new in zip(ids, grown, strict=True)]
    return [
        Completion(prompt=prompt, text=text, token_ids=new, finish_reason="stop" if index in ended else "length")
        for index, (prompt, text, new) in enumerate(zip(prompts, texts, grown, strict=True))
    ]


def encode_prompt(tokenizer: Tokenizer, prompt: str, begins: Sequence[int] = ()) -> list[int]:
    """Ids of a prompt behind ``begins``; an empty one becomes the end-of-document token, which is what every document
    follows where nothing else begins one."""
    return [*begins, *(int(token) for token in tokenizer.encode(prompt))] or [tokenizer.eod_id]


def equal_length_batches(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Indices of prompts, those of one length together."""
    by_length: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(index)
    return list(by_length.values())


def stream_text(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Iterator[int] | Sequence[int]) -> Iterator[str]:
    """The text that each new token adds, as soon as it is certain.

    A character may be spread over several tokens, and some tokenizers write a token differently at the start of a text:
    so a few tokens are decoded together with those before them, and what ends in an incomplete character waits.
    """
    known = [int(token) for token in prompt[-_CONTEXT_TOKENS:]]
    begin, shown = 0, len(known)
    for token in tokens:
        known.append(int(token))
        before = tokenizer.decode(known[begin:shown])
        text = tokenizer.decode(known[begin:])
        if len(text) > len(before) and not text.endswith(_INCOMPLETE):
            yield text[len(before) :]
            begin, shown = shown, len(known)
    if shown < len(known):
        yield tokenizer.decode(known[begin:])[len(tokenizer.decode(known[begin:shown])) :]


_CONTEXT_TOKENS = 8
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


def _check_prompts(model: Transformer, prompts: Sequence[Sequence[int]]) -> None:
    limit = model.config.max_seq_len
    for prompt in prompts:
        if not prompt:
            raise ConfigError("a prompt has no token", next_step="Begin with the end-of-document token.")
        if len(prompt) >= limit:
            raise ConfigError(
                f"the prompt has {len(prompt)} tokens, but the model's longest sequence is {limit}",
                evidence="model.max_seq_len of the recipe it was trained with; nothing could be added.",
                next_step=f"Shorten the prompt to {limit - 1} tokens or fewer.",
            )
    assert not has_capacity(model) or len(equal_length_batches(prompts)) == 1, "capacity: prompts of one length only"


def has_capacity(model: Transformer) -> bool:
    """Whether experts drop tokens beyond their capacity, so that padding must not be among them."""
    return model.config.is_moe and bool(model.config.moe.capacity_factor or model.config.moe.eval_capacity_factor)


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Prompts as a rectangle, padded on the left."""

    tokens: Tensor
    """int64 [B, T]"""
    lengths: Tensor
    """int64 [B]"""
    is_padded: bool

    @classmethod
    def pad(cls, prompts: Sequence[Sequence[int]], device: torch.device) -> _Rows:
        longest = max(len(prompt) for prompt in prompts)
        tokens = torch.zeros(len(prompts), longest, dtype=torch.int64)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[longest - len(prompt) :] = torch.tensor(prompt, dtype=torch.int64)
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        return cls(tokens=tokens.to(device), lengths=lengths.to(device), is_padded=bool((lengths != longest).any()))

    @property
    def longest(self) -> int:
        return self.tokens.shape[1]

    def columns(self) -> Tensor:
        """[B, T]: how far each column is from the beginning of the row's text; negative = padding."""
        numbers_T = torch.arange(self.longest, device=self.tokens.device)
        return numbers_T[None] - (self.longest - self.lengths)[:, None]

    def positions_of(self, step: int) -> Tensor:
        """[B, 1]: position of the new token number ``step``."""
        return (self.lengths + step)[:, None]

    def one_more(self) -> Tensor | None:
        """[B, 1]: the document of a new token; None where there is no padding to keep apart."""
        return torch.ones_like(self.lengths)[:, None] if self.is_padded else None


def _read_prompts(model: Transformer, cache: KVCache, rows: _Rows) -> Tensor:
    """Logits [B, V] after the last token of every prompt."""
    columns_BT = rows.columns()
    positions_BT = columns_BT.clamp_min(0)
    documents_BT = (columns_BT >= 0).long() if rows.is_padded else None
    logits_BV: Tensor | None = None
    for start in range(0, rows.longest, _PREFILL_TOKENS):
        part = slice(start, start + _PREFILL_TOKENS)
        documents = None if documents_BT is None else documents_BT[:, part]
        logits_BV = _last(cache.forward(model, rows.tokens[:, part], positions_BT[:, part], documents))
    assert logits_BV is not None
    return logits_BV


def _last(logits_BTV: Tensor) -> Tensor:
    return logits_BTV[:, -1].float()


def _seen(rows: _Rows, logits_BV: Tensor) -> Tensor:
    """Boolean [B, V]: tokens of each prompt."""
    seen_BV = torch.zeros_like(logits_BV, dtype=torch.bool)
    is_real = rows.columns() >= 0
    # padding marks what the last token marks anyway
    return seen_BV.scatter_(1, torch.where(is_real, rows.tokens, rows.tokens[:, -1:]), True)
