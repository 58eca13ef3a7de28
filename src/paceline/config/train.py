"""The `[train]` section: how much is trained, in which portions and precision."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from paceline.config.base import Section, Several
from paceline.errors import ConfigError

Fp8Linear = Literal[
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
"""The linears of a block, in dense and in latent attention and in the MLP."""


class TrainConfig(Section):
    """How much is trained, in which portions and precision."""

    steps: int = Field(100, ge=1, le=10**12)
    """Optimizer steps of the whole run (not of this start)."""
    micro_batch_size: int = Field(1, ge=1)
    """Sequences a rank computes at a time."""
    global_batch_size: int = Field(8, ge=1)
    """Sequences an optimizer step sees, over all ranks and micro-batches."""
    seq_len: int = Field(1024, ge=2)
    """Tokens of a sequence."""
    precision: Literal["fp32", "bf16", "fp8"] = "bf16"
    """Precision of matrix products; masters, moments, norms and the loss stay in fp32. `fp8`: the linears of blocks,
    all else as in bf16."""
    fp8_scaling: Literal["tensorwise", "rowwise", "delayed"] = "tensorwise"
    """`tensorwise`: one scale for each tensor, gradients in e5m2. `rowwise`: for each row of a product, all in e4m3
    (slower, more exact). `delayed`: as tensorwise, by the largest numbers of earlier steps, which no cast looks for
    (faster); larger ones saturate. Weights, the head, experts, evaluation, and what nothing is known of yet (the first
    step) then have scales of their own as ever."""
    fp8_amax_history: int = Field(16, ge=1, le=4096)
    """With `train.fp8_scaling = "delayed"`: steps whose largest numbers count."""
    fp8_skip_layers: tuple[int, ...] = ()
    """Layers that stay in bf16, by number; negative ones count from the end: `[0, -1]` is the first and the last."""
    fp8_skip_linears: Several[Fp8Linear] = ()
    """Linears that stay in bf16 in all layers: `["down_proj"]`."""
    fp8_head: bool = False
    """The head too, with `train.loss_kernel = "chunked"`: logits, which the loss is most sensitive to, and both
    gradients."""
    fp8_weight_cache: bool = True
    """Keep fp8 weights over the micro-batches of a step (2 bytes an element more, zero 0 and 1); else cast at each
    use."""
    fp8_weights_only: bool = False
    """Keep no bf16 weights beside the cached fp8 ones: they are gathered and cast a block at a time when the step after
    an update begins (2 bytes an element less, zero 0 and 1)."""
    fp8_cast_kernel: Literal["torch", "triton"] = "torch"
    """Who casts and transposes tensors that have one scale, on a GPU: operations of torch, which a compiled block fuses
    with what makes the tensor, or one Triton kernel, and two more that make a gated MLP's numbers and cast them."""
    fp8_experts: bool = False
    """With `parallel.expert_kernels` other than `plain`: also the products of experts, for outputs and for gradients of
    activations, with scales of rows. Their weight gradients stay in bf16."""
    attention_kernel: Literal["auto", "reference", "sdpa", "flash4"] = "auto"
    """`auto` takes the fastest of torch that fits mask and device; `flash4` the package flash-attn-4 where it fits
    (Hopper, Blackwell; whole rows, and within documents); `reference` materialises the scores."""
    loss_kernel: Literal["chunked", "plain"] = "chunked"
    """`chunked` computes head and loss over slices of the tokens; `plain` materialises all logits."""
    loss_chunk_tokens: int = Field(2048, ge=1)
    """Tokens of one slice."""
    eval_interval: int = Field(0, ge=0)
    """Evaluate on `data.valid` every so many steps; 0 = only at the end."""
    eval_steps: int = Field(20, ge=1)
    """Global batches of one evaluation, fewer if the data ends."""
    max_skipped_steps: int = Field(3, ge=1)
    """Stop after so many steps in a row whose loss or gradient was not finite."""
    on_nonfinite: Literal["skip", "stop"] = "skip"
    """A step with a non-finite loss or gradient is skipped and counted, or ends the run at once."""
    gc_interval: int = Field(100, ge=0)
    """Collect Python garbage every so many steps, on all ranks at once; 0 leaves it to Python."""

    @property
    def fp8_own_scaling(self) -> Literal["tensorwise", "rowwise"]:
        """How a tensor is scaled by its own largest numbers."""
        return "rowwise" if self.fp8_scaling == "rowwise" else "tensorwise"

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        if self.global_batch_size % self.micro_batch_size:
            below = self.global_batch_size // self.micro_batch_size * self.micro_batch_size
            choices = [value for value in (below, below + self.micro_batch_size) if value > 0]
            raise ConfigError(
                f"train.global_batch_size = {self.global_batch_size} is not a multiple of "
                f"train.micro_batch_size = {self.micro_batch_size}",
                next_step=f"The nearest global batch sizes are {' and '.join(map(str, choices))}.",
            )
        return self
