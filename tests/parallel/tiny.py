"""A tiny model, its data, and the training step, as every parallel test uses them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.checkpoint.pieces import Piece, ShardedValue
from paceline.config.model import ModelConfig, MoEConfig
from paceline.config.optim import OptimConfig
from paceline.kernels.attention import attention_core
from paceline.kernels.cross_entropy import PlainHeadLoss
from paceline.models.init import WeightInit
from paceline.models.transformer import ModelOutput, Transformer
from paceline.optim.build import Optimizer, build_optimizer
from paceline.parallel.engine import Engine


def tiny_config(*, tied: bool = False, vocab: int = 67, moe: bool = False, **more: Any) -> ModelConfig:
    experts: dict[str, Any] = {}
    if moe:
        routing = MoEConfig(layer_period=2, layer_offset=1, bias_balance=True, aux_loss_coef=0.01, ffn_size=8)
        experts = {"num_experts": 4, "top_k": 2, "moe": routing}
    shape = {"num_layers": 3, "hidden_size": 16, "num_heads": 2, "ffn_size": 24, "max_seq_len": 8, "init_std": 0.2}
    return ModelConfig(vocab_size=vocab, tie_embeddings=tied, **(shape | experts | more))


def tiny_model(config: ModelConfig, *, dtype: torch.dtype = torch.float32, device: Any = "meta") -> Transformer:
    core = attention_core("reference")
    return Transformer(config, dtype=dtype, device=device, core=core, head_loss=PlainHeadLoss())


def init(config: ModelConfig) -> WeightInit:
    return WeightInit(config, 7)


def shapes_of(model: Transformer) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def plain(config: ModelConfig, *, dtype: torch.dtype = torch.float32, device: Any = "cpu") -> Transformer:
    """The model of one process, with nothing around it."""
    model = tiny_model(config, dtype=dtype, device=device)
    model.init_weights(7)
    return model


def batches(step: int, *, sequences: int = 8, length: int = 6, vocab: int = 67) -> tuple[Tensor, Tensor]:
    """The global batch of a step; some labels count for nothing, more of them in some sequences."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(vocab, (sequences, length), generator=generator)
    labels = torch.randint(vocab, (sequences, length), generator=generator)
    for row in range(sequences):
        labels[row, : row % 4] = -100
    return tokens, labels


CLIPPED = OptimConfig(lr=1e-2, weight_decay=0.1, grad_clip=0.5)


@dataclass
class Log:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def loss_of(output: ModelOutput, total_tokens: Tensor, sequences: int) -> Tensor:
    """What is back-propagated for a micro-batch."""
    assert output.loss_sum is not None
    loss = output.loss_sum / total_tokens
    return loss if output.aux_loss is None else loss + output.aux_loss / sequences


def gradients_of_step(
    engine: Engine,
    step: int,
    *,
    dp_rank: int,
    dp_size: int,
    accumulation: int = 2,
    vocab: int = 67,
    device: Any = "cpu",
) -> Tensor:
    """One step up to the reduced gradients; returns this rank's part of the loss, already divided by all tokens."""
    tokens, labels = (tensor.to(device) for tensor in batches(step, vocab=vocab))
    total = (labels != -100).sum()
    own = [chunk.chunk(dp_size)[dp_rank].chunk(accumulation) for chunk in (tokens, labels)]
    loss_of_rank = torch.zeros((), device=device)
    engine.zero_gradients()
    for index, (micro_tokens, micro_labels) in enumerate(zip(*own, strict=True)):
        with engine.accumulate(last=index == accumulation - 1):
            loss = loss_of(engine.stages[0](micro_tokens, micro_labels), total, len(tokens))
            loss.backward()
        loss_of_rank += loss.detach().float()
    engine.reduce_gradients()
    return loss_of_rank


def square_norm(engine: Engine) -> Tensor:
    squares = [p.param.grad.float().square().sum() for p in engine.main_parameters() if p.counted]
    return engine.sum_over_shards(torch.stack(squares).sum()) if squares else engine.sum_over_shards(torch.zeros(()))


def train(
    engine: Engine,
    steps: int,
    *,
    dp_rank: int,
    dp_size: int,
    first_step: int = 0,
    sum_over_dp: Callable[[Tensor], Any] = lambda loss: None,
    optim: OptimConfig = CLIPPED,
    optimizer: Optimizer | None = None,
    **options: Any,
) -> Log:
    """Steps with the real optimizer. ``sum_over_dp`` sums a tensor in place over the data-parallel ranks."""
    log = Log()
    optimizer = optimizer or build_optimizer(optim, engine)
    for step in range(first_step, first_step + steps):
        loss = gradients_of_step(engine, step, dp_rank=dp_rank, dp_size=dp_size, **options)
        sum_over_dp(loss)
        norm = optimizer.gradient_norm()
        optimizer.step(1.0, norm)
        engine.publish_weights()
        log.losses.append(loss.item())
        log.norms.append(norm.norm.item())
    return log


def full_weights(engine: Engine) -> dict[str, Tensor]:
    """Main weights put together over all ranks of the default group; collective."""
    return full_values(engine.weights())


def full_values(values: Mapping[str, ShardedValue]) -> dict[str, Tensor]:
    """Global tensors from the pieces of all ranks of the default group, on every rank; collective."""
    full = {}
    for name, value in values.items():
        total, count = torch.zeros(value.global_shape, dtype=value.dtype), torch.zeros(value.global_shape)
        for piece in value.pieces:
            total[box_of(piece)], count[box_of(piece)] = piece.tensor.cpu(), 1
        dist.all_reduce(total)
        dist.all_reduce(count)
        assert bool((count >= 1).all()), name
        full[name] = total / count
    return full


def fill(values: Mapping[str, ShardedValue], full: Mapping[str, Tensor]) -> None:
    """Writes this rank's pieces of global tensors."""
    for name, value in values.items():
        for piece in value.pieces:
            piece.tensor.copy_(full[name][box_of(piece)])


def box_of(piece: Piece) -> tuple[slice, ...]:
    return tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.tensor.shape, strict=True))
