"""Rotary position embedding: which angle each pair of dimensions turns by, and the turning.

One layout: dimension i is paired with i + R/2 ("half rotation", as in Hugging Face's Llama). Weights made for the
interleaved layout (pairs 2i, 2i + 1: Meta's originals, DeepSeek) are permuted when they are imported.

Dims: B batch, T positions, H heads, D head width, R rotated width (R <= D).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from paceline.config.model import ModelConfig, RopeScaling
from paceline.kernels.precision import at_least_fp32


class Rope(nn.Module):
    """Cosines and sines of positions, in fp32.

    The inverse frequencies are neither parameter nor buffer: casting the model, or filling it from the meta device,
    cannot spoil them.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.attention_factor = attention_factor(config.rope_scaling)
        self._inv_freq: dict[torch.device, Tensor] = {}

    def forward(self, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each [B, T, 1, R/2] in fp32 (the 1 stands for heads)."""
        angles = positions_BT[..., None, None].float() * self.inv_freq(positions_BT.device)
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor

    def inv_freq(self, device: torch.device) -> Tensor:
        """[R/2] on the device; copied there at the first call, which is the only one that waits for it."""
        if device in self._inv_freq:
            return self._inv_freq[device]
        inv_freq = inverse_frequencies(self.config).to(device)
        if type(inv_freq) is Tensor:  # not a fake tensor of a tracer, which must not outlive it
            self._inv_freq[device] = inv_freq
        return inv_freq


def apply_rope(x_BTHD: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Turns the first R dimensions of every head by the angles of its position, in at least fp32; the rest passes."""
    cos, sin = cos_sin
    half = cos.shape[-1]
    first, second = at_least_fp32(x_BTHD[..., :half]), at_least_fp32(x_BTHD[..., half : 2 * half])
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BTHD.dtype)
    if 2 * half == x_BTHD.shape[-1]:
        return turned
    return torch.cat((turned, x_BTHD[..., 2 * half :]), dim=-1)


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """[R/2] fp32 on the CPU: angle per position of each pair, scaling included."""
    exponent = torch.arange(0, config.rotary_dim, 2, dtype=torch.int64, device="cpu").float() / config.rotary_dim
    inv_freq = 1.0 / (config.rope_theta**exponent)
    scaling = config.rope_scaling
    if scaling.kind == "linear":
        return inv_freq / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(inv_freq, scaling)
    if scaling.kind == "yarn":
        return _yarn(inv_freq, scaling, config.rope_theta, config.rotary_dim)
    return inv_freq


def _llama3(inv_freq: Tensor, scaling: RopeScaling) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between interpolated (Llama 3.1)."""
    turns = scaling.original_max_seq_len * inv_freq / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (turns - low) / (high - low)
    between = (1 - smooth) * inv_freq / scaling.factor + smooth * inv_freq
    slow_or_between = torch.where(turns < low, inv_freq / scaling.factor, between)
    return torch.where(turns > high, inv_freq, slow_or_between)


def _yarn(inv_freq: Tensor, scaling: RopeScaling, theta: float, rotary_dim: int) -> Tensor:
    """Dimensions that turn often keep their angle, slow ones are interpolated, a ramp between (arXiv:2309.00071)."""

    def dimension_that_turns(times: float) -> float:
        return rotary_dim * math.log(scaling.original_max_seq_len / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension_that_turns(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension_that_turns(scaling.beta_slow)), rotary_dim - 1)
    # equal bounds would divide by zero; any small width gives the step that is meant
    width = (high - low) or 0.001
    ramp = ((torch.arange(rotary_dim // 2, dtype=torch.float32, device="cpu") - low) / width).clamp(0, 1)
    return inv_freq / scaling.factor * ramp + inv_freq * (1 - ramp)


def attention_factor(scaling: RopeScaling) -> float:
    """What cosines and sines are multiplied by (yarn; 1 otherwise)."""
    if scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_mscale(scaling.factor, scaling.mscale) / yarn_mscale(scaling.factor, scaling.mscale_all_dim)
    return yarn_mscale(scaling.factor, 1.0)


def softmax_scale(config: ModelConfig) -> float:
    """Scale of attention scores: given, or 1 / sqrt(head width), times DeepSeek's squared mscale where that is set."""
    scale = config.attention_scale or config.qk_head_dim**-0.5
    scaling = config.rope_scaling
    if config.attention == "mla" and scaling.kind == "yarn" and scaling.mscale_all_dim:
        scale *= yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 2
    return scale


def yarn_mscale(factor: float, mscale: float) -> float:
    """0.1 * mscale * ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
