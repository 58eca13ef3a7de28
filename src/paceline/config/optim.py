"""The `[optim]` section: how weights are updated."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from paceline.config.base import Section
from paceline.errors import ConfigError


class OptimConfig(Section):
    """How weights are updated."""

    name: Literal["adamw", "adamw8bit", "muon"] = "adamw"
    """`adamw8bit` keeps moments in 8 bits (torchao); `muon` orthogonalises updates of matrices, AdamW does the rest."""
    lr: float = Field(3e-4, gt=0)
    """Peak learning rate."""
    min_lr: float = Field(0.0, ge=0)
    """Learning rate at the end of decay."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape after warm-up; `wsd` stays at the peak and decays over the last `decay_steps`."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear rise from 0."""
    decay_steps: int = Field(0, ge=0)
    """Steps of decay; 0 = to the end of the run (wsd: a tenth of it)."""
    decay_shape: Literal["linear", "cosine", "sqrt"] = "linear"
    """Shape of wsd's decay; `sqrt` is 1 - sqrt(progress)."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled; not on norms, biases and other one-dimensional parameters."""
    decay_embeddings: bool = True
    """Whether embeddings decay like other matrices."""
    grad_clip: float = Field(1.0, ge=0)
    """Largest global gradient norm; 0 = no clipping (the norm is still measured)."""
    fused_update: bool = False
    """AdamW in one pass over memory that also writes the weights the model computes with, and reads gradients in
    `parallel.accumulate_dtype`. Not for `adamw8bit`."""
    muon_momentum: float = Field(0.95, ge=0, lt=1)
    muon_lr: float = Field(0.02, gt=0)
    """Learning rate of the matrices that muon updates; `lr` is for the rest."""
    muon_steps: int = Field(5, ge=1)
    """Newton-Schulz iterations."""

    @property
    def reads_any_gradient(self) -> bool:
        """Whether the optimizer takes gradients in the dtype in which they were accumulated, and needs no fp32 copy."""
        return self.fused_update and self.name == "adamw"

    @model_validator(mode="after")
    def _check(self) -> OptimConfig:
        if self.min_lr > self.lr:
            raise ConfigError(
                f"optim.min_lr = {self.min_lr} is above optim.lr = {self.lr}",
                next_step="Learning rates fall from lr to min_lr: swap them, or set min_lr = 0.",
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(
                f"optim.betas = {self.betas} are not in [0, 1)", next_step="The usual values are [0.9, 0.95]."
            )
        return self
