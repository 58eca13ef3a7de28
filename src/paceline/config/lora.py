"""The `[lora]` section: which linears learn by low-rank adapters, while all else stays as it was."""

from __future__ import annotations

import math
import re
from typing import Literal

from pydantic import Field, model_validator

from paceline.config.base import Section, Several
from paceline.errors import ConfigError

Target = Literal[
    "all-linear",
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "q_down_proj",
    "q_up_proj",
    "kv_down_proj",
    "kv_up_proj",
]
"""The linears of a block, in dense and in latent attention and in the MLP, or all of them."""

BaseFormat = Literal["bf16", "fp8", "nf4"]

_LINEAR = re.compile(r"(blocks\.\d+\.(?:attention|feed_forward(?:\.shared)?))\.(\w+_proj)\.weight")

SCORE = "score.weight"
"""What gives the score of a reward model, [1, hidden_size]. It learns whole beside adapters."""
LEAVES = ("lora_a", "lora_b", "lora_magnitude")
"""What an adapter adds to a linear: [rank, in], [out, rank] and, with `lora.dora`, [out]."""


class LoraConfig(Section):
    """Low-rank adapters (LoRA, arXiv:2106.09685): the weights of the model are frozen, and each linear that is named
    learns a product of two small matrices beside them. Off where `rank` is 0."""

    rank: int = Field(0, ge=0, le=4096)
    """Rows of the first matrix of a pair; 0 = no adapters, all weights are trained."""
    alpha: float = Field(16.0, gt=0)
    """What is added is scaled by `alpha / rank`."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """On the input of adapters alone. Linears that read the same input share one mask."""
    targets: Several[Target] = ("all-linear",)
    """Linears that learn: `["q_proj", "v_proj"]`; `all-linear` are those of attention, of dense MLPs and of shared
    experts. Embedding, head, norms, routers and routed experts are frozen."""
    use_rslora: bool = False
    """Scale by `alpha / sqrt(rank)` (rank-stabilised, arXiv:2312.03732)."""
    dora: bool = False
    """A learned length for each output's row, whose direction the pair changes (DoRA, arXiv:2402.09353)."""
    base: BaseFormat = "bf16"
    """How frozen linears are kept. `bf16`: as the model computes (fp32 with `train.precision = "fp32"`). `fp8`: with
    `train.precision = "fp8"`, cast once, without the bf16 weights. `nf4`: 4 bits with double quantisation (QLoRA,
    arXiv:2305.14314), multiplied in `train.precision`."""
    init: Literal["kaiming", "gaussian"] = "kaiming"
    """Of the first matrix of a pair: uniform within 1 / sqrt(inputs), as PEFT does by default, or normal with a
    deviation of 1 / rank. The second is 0."""
    init_adapter: str = ""
    """Begin with this adapter, a PEFT folder or a run of ours, in place of a new one."""

    @property
    def on(self) -> bool:
        """Whether there are adapters."""
        return self.rank > 0

    @property
    def scale(self) -> float:
        """What the product of a pair is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    def adapts(self, name: str) -> bool:
        """Whether the parameter ``name`` of the plain model is a matrix with an adapter beside it."""
        found = _LINEAR.fullmatch(name) if self.on else None
        return found is not None and ("all-linear" in self.targets or found[2] in self.targets)

    def adapts_linear(self, name: str) -> bool:
        """Whether the parameter ``name`` is a matrix that may have an adapter, whatever `targets` says: those that
        `base` is about."""
        return self.on and _LINEAR.fullmatch(name) is not None

    @staticmethod
    def learns(name: str) -> bool:
        """Whether the parameter ``name`` learns where there are adapters: theirs, and the score of a reward model,
        which no base has."""
        return is_adapter(name) or name == SCORE

    def adapter_shapes(self, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """The adapter's parameters beside the matrix ``name`` of that ``shape`` ([out, in]); empty if it has none."""
        if not self.adapts(name):
            return {}
        owner, (outputs, inputs) = name.removesuffix(".weight"), shape
        found: dict[str, tuple[int, ...]] = {
            f"{owner}.lora_a": (self.rank, inputs),
            f"{owner}.lora_b": (outputs, self.rank),
        }
        return found | ({f"{owner}.lora_magnitude": (outputs,)} if self.dora else {})

    @model_validator(mode="after")
    def _check(self) -> LoraConfig:
        if not self.targets:
            raise ConfigError("lora.targets is empty", next_step='Name linears, or "all-linear".')
        if "all-linear" in self.targets and len(self.targets) > 1:
            raise ConfigError(
                f"lora.targets = {list(self.targets)} names all linears and some of them",
                next_step='Set lora.targets = "all-linear", or leave "all-linear" out.',
            )
        if self.dora and self.dropout:
            raise ConfigError(
                f"lora.dropout = {self.dropout:g} does not go with lora.dora",
                evidence="DoRA scales the frozen product too, which would have to be computed again of dropped inputs.",
                next_step="Set lora.dropout = 0, or lora.dora = false.",
            )
        if self.dora and self.base != "bf16":
            raise ConfigError(
                f"lora.dora does not go with lora.base = {self.base!r}",
                evidence="DoRA needs the lengths of the rows of the frozen matrices, which are kept rounded there.",
                next_step="Set lora.base = 'bf16', or lora.dora = false.",
            )
        return self


def is_adapter(name: str) -> bool:
    """Whether a parameter is one of an adapter's."""
    return name.rpartition(".")[2] in LEAVES
