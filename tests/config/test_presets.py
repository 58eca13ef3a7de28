"""Every preset builds, has the published number of parameters, and is found by nearly its name."""

from __future__ import annotations

import pytest

from paceline.config.model import ModelConfig
from paceline.config.presets import preset, preset_names
from paceline.errors import ConfigError
from paceline.models.transformer import Transformer

# exact: the tensors of the published checkpoints, counted once where tied
EXACT = {
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_1b": 1_235_814_400 + 128256 * 2048,  # the published one is tied
    "llama3_3b": 3_212_749_824,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "mistral_7b": 7_241_732_096,
    "mixtral_8x7b": 46_702_792_704,
    "mixtral_8x22b": 140_620_634_112,
    "qwen2.5_0.5b": 494_032_768,
    "qwen2.5_1.5b": 1_543_714_304,
    "qwen2.5_3b": 3_085_938_688,
    "qwen2.5_7b": 7_615_616_512,
    "qwen2.5_14b": 14_770_033_664,
    "qwen2.5_32b": 32_763_876_352,
    "qwen2.5_72b": 72_706_203_648,
    "qwen3_0.6b": 596_049_920,
    "qwen3_1.7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "gemma2_2b": 2_614_341_888,
    "gemma2_9b": 9_241_705_984,
    "gemma2_27b": 27_227_128_320,
    "deepseek_v2_lite": 15_706_484_224,
    "deepseek_v2": 235_741_434_880,
    "deepseek_v3": 671_026_404_352,  # 671,026,419,200 with the 58 * 256 selection biases, which are buffers here
}

# rounded: what the papers print, with the rounding (or, for Switch, the missing cross-attention) as tolerance
ROUNDED = {
    "gpt3_125m": (125e6, 0.01),
    "gpt3_350m": (350e6, 0.02),
    "gpt3_760m": (760e6, 0.01),
    "gpt3_1.3b": (1.3e9, 0.02),
    "gpt3_2.7b": (2.7e9, 0.02),
    "gpt3_6.7b": (6.7e9, 0.01),
    "gpt3_13b": (13.0e9, 0.02),
    "gpt3_175b": (175e9, 0.01),
    "gpt_13b": (40 * (4 * 5120**2 + 2 * 5120 * 20480 + 2 * 5120) + 2 * 50304 * 5120 + 5120, 1e-12),
    "qwen3_moe_12l": (8.1e9, 0.01),
    # the sizes of google/switch-base-*: checkpoint bytes / 4
    "switch_base_8": (0.62e9, 0.03),
    "switch_base_16": (1.07e9, 0.03),
    "switch_base_32": (1.98e9, 0.03),
    "switch_base_64": (3.80e9, 0.03),
    "switch_base_128": (7.41e9, 0.03),
    "switch_base_256": (14.7e9, 0.03),
}


def count(name: str) -> int:
    model = Transformer(ModelConfig(preset=name, **preset(name)), device="meta")
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", preset_names())
def test_parameter_count_is_the_published_one(name: str) -> None:
    number = count(name)
    if name in EXACT:
        assert number == EXACT[name]
    elif name in ROUNDED:
        published, tolerance = ROUNDED[name]
        assert number == pytest.approx(published, rel=tolerance)
    else:
        assert name.startswith("tiny_") and number < 5e6


def test_unknown_name_points_to_near_ones() -> None:
    with pytest.raises(ConfigError, match="llama3_8"):
        preset("llama3_8")
    with pytest.raises(ConfigError) as error:
        preset("qwen2_5_7b")
    assert "qwen2.5_7b" in str(error.value)


def test_what_preset_gives_is_the_callers() -> None:
    preset("tiny_moe")["moe"]["ffn_size"] = 1
    assert preset("tiny_moe")["moe"]["ffn_size"] == 96
