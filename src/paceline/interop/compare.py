"""Do two folders give the same logits for the same tokens?"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from paceline.config.hub import read_config
from paceline.errors import ConfigError
from paceline.interop.block_fp8 import CONFIG_KEY
from paceline.interop.sources import Opened
from paceline.models.transformer import Transformer

TOKENS = (2, 64)
"""Sequences and tokens of each that are compared."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The largest difference of two sets of logits, and how large the logits are."""

    largest_difference: float
    largest_logit: float
    ran_by: tuple[str, str]
    """Which program computed each side."""

    @property
    def is_close(self) -> bool:
        """1e-4 of the largest logit: fp32 sums in another order stay far below it, another layout far above."""
        return self.largest_difference <= 1e-4 * max(1.0, self.largest_logit)


def compare(one: Opened, other: Opened, *, rounded: torch.dtype | None = None) -> Comparison:
    """Runs both in fp32 on the CPU, one after the other, on tokens that both have.

    A Hugging Face folder is run by Transformers where that is installed: then the two sides share no code.

    Args:
        rounded: the dtype that the weights of one side were converted to: those of both are rounded to it first.
    """
    sides = (one, other)
    rows = min(side.model.vocab_size for side in sides)
    length = min(TOKENS[1], *(side.model.max_seq_len for side in sides))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(rows, (TOKENS[0], length), generator=generator)
    (first, by_first), (second, by_second) = (logits_of(side, tokens, rounded) for side in sides)
    first, second = first[..., :rows], second[..., :rows]
    return Comparison(
        largest_difference=float((first - second).abs().max()),
        largest_logit=float(first.abs().max()),
        ran_by=(by_first, by_second),
    )


def logits_of(side: Opened, tokens: Tensor, rounded: torch.dtype | None = None) -> tuple[Tensor, str]:
    """[B, T, V] in fp32, and the program that computed them."""
    # fp8 weights it would keep so, where it can run them at all
    quantized = side.format == "hf" and CONFIG_KEY in read_config(side.path)
    as_it_lies = side.format == "hf" and not quantized and not side.changed
    if as_it_lies and find_spec("transformers") is not None:
        return _by_transformers(side.path, tokens, rounded), "transformers"
    model = plain_model(side, torch.float32)
    _round(model, rounded)
    with torch.inference_mode():
        logits = model(tokens).logits
    assert logits is not None
    return logits, "paceline"


def plain_model(side: Opened, dtype: torch.dtype, device: torch.device | None = None) -> Transformer:
    """The model on one device, in evaluation mode, without multi-token prediction."""
    config = side.model.model_copy(update={"mtp_layers": 0})
    model = Transformer(config, dtype=dtype, device="meta")
    model.to_empty(device=device or torch.device("cpu"))
    model.reset_buffers()
    kept = model.state_dict().keys()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name in kept:
                tensor.copy_(side.weights.read(name))
    return model.eval()


@torch.no_grad()
def _round(model: nn.Module, dtype: torch.dtype | None) -> None:
    """What a conversion to ``dtype`` does to parameters; buffers are not converted."""
    if dtype is not None:
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))


def _by_transformers(path: Path, tokens: Tensor, rounded: torch.dtype | None) -> Tensor:
    try:
        with _quiet():
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, local_files_only=True, low_cpu_mem_usage=True
            )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"Transformers cannot load {path}",
            evidence=str(error),
            next_step="The folder was converted; the comparison alone failed.",
        ) from error
    _round(model, rounded)
    with torch.inference_mode():
        return model.eval()(input_ids=tokens).logits.float()


NOISE = {
    # of torchao 0.18: kernels for other machines, which no model here needs
    "torchao": "Failed to load ",
    # of torch 2.13, about enums that torchao 0.18 registers
    "torch.utils._pytree": "%s is an Enum subclass and is now natively supported",
}
"""Logger -> beginning of a message that Transformers brings when it imports torchao."""


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the messages of `NOISE` (all others are heard), and without the bar of Transformers."""
    filters = {
        logging.getLogger(name): lambda record, begins=begins: not str(record.msg).startswith(begins)
        for name, begins in NOISE.items()
    }
    for logger, only in filters.items():
        logger.addFilter(only)
    try:
        from transformers.utils import logging as theirs

        shown = theirs.is_progress_bar_enabled()
        theirs.disable_progress_bar()
        try:
            yield
        finally:
            if shown:
                theirs.enable_progress_bar()
    finally:
        for logger, only in filters.items():
            logger.removeFilter(only)
