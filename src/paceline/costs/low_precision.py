"""Which matrices of a block are multiplied in fp8, and what their products keep for the backward pass.

| input of | in bf16, bytes an element | in fp8 |
| --- | --- | --- |
| queries, keys, values (or the first latents); gate and up | 2 | 1 |
| latent attention's up projections | 2 | 1 |
| the MLP's last matrix | 2 | 1 |
| attention's last matrix | 2, which attention keeps anyway | 1 beside attention's 2 |

Matrices with the same input are one product, which keeps one copy of it; if some of them stay in bf16, so does the bf16
input. Scales of rows are fp32, one for each channel of an input; those of tensors, 4 bytes each, are left out.

`parallel/low_precision.py` does what is counted here; tests/costs/test_low_precision.py counts what it keeps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.config.model import AttentionSpec, BlockSpec, FeedForwardSpec
from paceline.config.run import RunConfig

MULTIPLE = 16
"""What the sizes of an fp8 product divide by; others stay in bf16."""
_SCALE_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class _Product:
    """Matrices that read the same input."""

    names: tuple[str, ...]
    channels: int
    """Of the input, on all ranks of tp together."""
    inner: int
    """Width that a rank sums over."""
    outputs: tuple[int, ...]
    """Width of each on a rank."""
    input_kept: bool = False
    """By what made it, whatever the product keeps."""
    whole_input: bool = False
    """Every rank of tp has all of its channels, of all tokens."""

    def in_fp8(self, asked: frozenset[str]) -> frozenset[str]:
        """Those of ``asked`` that are here, if their sizes fit."""
        outputs = sum(size for name, size in zip(self.names, self.outputs, strict=True) if name in asked)
        fits = self.inner % MULTIPLE == outputs % MULTIPLE == 0
        return asked.intersection(self.names) if fits else frozenset()


@dataclass(frozen=True, kw_only=True)
class KeptBytes:
    """Bytes a token, as they are more than in bf16 (or less: below 0)."""

    cut: int = 0
    """Before tp divides them."""
    gathered: int = 0
    """Whole on each rank of tp."""


def linears_in_fp8(config: RunConfig, block: BlockSpec) -> frozenset[str]:
    """Names of the block's linears that `train.precision = "fp8"` takes: none of experts or multi-token prediction."""
    train, layers = config.train, config.model.num_layers
    skipped = {index % layers for index in train.fp8_skip_layers}
    if train.precision != "fp8" or block.index >= layers or block.index in skipped:
        return frozenset()
    products = list(_products(block, config))
    asked = frozenset(name for each in products for name in each.names) - frozenset(train.fp8_skip_linears)
    return frozenset[str]().union(*(each.in_fp8(asked) for each in products))


def fp8_kept(config: RunConfig, block: BlockSpec) -> KeptBytes:
    """What the block keeps more than in bf16."""
    found, train = linears_in_fp8(config, block), config.train
    tokens = max(1, train.micro_batch_size * train.seq_len // config.parallel.cp)
    cut = gathered = 0
    for each in _products(block, config):
        if found.isdisjoint(each.names):
            continue
        alone = found.issuperset(each.names) and not each.input_kept
        # in fp8, in place of what is in bf16 where nothing else needs that
        more = each.channels * (1 - 2 * alone)
        more += -(-_SCALE_BYTES * each.channels // tokens) if train.fp8_scaling == "rowwise" else 0
        cut += more * (not each.whole_input)
        gathered += more * each.whole_input
    return KeptBytes(cut=cut, gathered=gathered)


def _products(block: BlockSpec, config: RunConfig) -> Iterator[_Product]:
    tp = config.parallel.tp
    yield from _attention(block.attention, tp, keeps_output=config.train.attention_kernel != "reference")
    if isinstance(block.feed_forward, FeedForwardSpec):
        yield from _mlp(block.feed_forward, tp)


def _attention(spec: AttentionSpec, tp: int, *, keeps_output: bool) -> Iterator[_Product]:
    hidden, heads = spec.hidden_size, spec.num_heads
    if spec.kind == "mla":
        queries, values = heads * spec.qk_head_dim // tp, heads * (spec.qk_nope_head_dim + spec.v_head_dim) // tp
        first, width = ("q_down_proj", spec.q_lora_rank) if spec.q_lora_rank else ("q_proj", queries)
        latent = spec.kv_lora_rank + spec.qk_rope_head_dim
        yield _Product(names=(first, "kv_down_proj"), channels=hidden, inner=hidden, outputs=(width, latent))
        ups = [("q_up_proj", spec.q_lora_rank, queries)] * (spec.q_lora_rank > 0)
        for name, rank, width in [*ups, ("kv_up_proj", spec.kv_lora_rank, values)]:
            yield _Product(names=(name,), channels=rank, inner=rank, outputs=(width,), whole_input=True)
    else:
        queries = heads * spec.qk_head_dim // tp
        keys = max(1, spec.num_kv_heads // tp) * spec.qk_head_dim
        outputs = (queries, keys, keys)
        yield _Product(names=("q_proj", "k_proj", "v_proj"), channels=hidden, inner=hidden, outputs=outputs)
    width = heads * spec.v_head_dim
    yield _Product(names=("o_proj",), channels=width, inner=width // tp, outputs=(hidden,), input_kept=keeps_output)


def _mlp(spec: FeedForwardSpec, tp: int) -> Iterator[_Product]:
    # the first ranks of an uneven cut have one column more: no multiple then, on one of them
    width = spec.ffn_size // tp if spec.ffn_size % tp == 0 else 1
    names = ("gate_proj", "up_proj") if spec.gated else ("up_proj",)
    yield _Product(names=names, channels=spec.hidden_size, inner=spec.hidden_size, outputs=(width,) * len(names))
    yield _Product(names=("down_proj",), channels=spec.ffn_size, inner=width, outputs=(spec.hidden_size,))
