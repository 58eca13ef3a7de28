"""A hub config means what a preset means, and says it all on the way back."""

from __future__ import annotations

import pytest

from paceline.config.hub import config_of, differences, model_of
from paceline.config.model import ModelConfig
from paceline.config.presets import preset, preset_names
from paceline.errors import ConfigError

# as published, without the keys that say nothing of the network
LLAMA_3_1 = {
    "model_type": "llama",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 128,
    "num_hidden_layers": 126,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
QWEN_2_5 = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}


@pytest.mark.parametrize(
    ("config", "name"), [(LLAMA_3_1, "llama3_405b"), (DEEPSEEK_V3, "deepseek_v3"), (QWEN_2_5, "qwen2.5_7b")]
)
def test_published_configs_are_our_presets(config: dict, name: str) -> None:
    assert differences(model_of(config), ModelConfig(**preset(name))) == []


@pytest.mark.parametrize("name", preset_names())
def test_presets_come_back_or_are_refused_by_field(name: str) -> None:
    model = ModelConfig(**preset(name))
    try:
        config = config_of(model)
    except ConfigError as error:
        assert name.startswith(("gemma", "switch", "tiny_switch", "gpt_13b", "tiny_deepseek")), name
        assert "has no words for" in error.evidence
    else:
        assert differences(model_of(config), model) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, "rope_type = 'longrope'"),
        ({"rope_scaling": {"type": "linear"}}, "linear needs factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "alpha": 3}}, "rope_scaling.alpha = 3"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu'"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"vocab_size": "many"}, "model.vocab_size = 'many'"),
        ({"model_type": "rwkv"}, "model_type = 'rwkv'"),
        ({"some_new_trick": 2}, "some_new_trick = 2: not a key that is known for llama"),
    ],
)
def test_what_cannot_be_said_is_refused_by_key(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        model_of(LLAMA_3_1 | changes)
    assert message in str(caught.value)


def test_keys_without_effect_pass() -> None:
    model_of(LLAMA_3_1 | {"some_old_switch": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "trick": None})
    model_of(LLAMA_3_1 | {"some_new_trick": 2}, ignore=["some_new_trick"])


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        model_of(LLAMA_3_1 | {"hidden_act": "relu", "hidden_size": None, "trick": 2})
    for part in ("hidden_act", "hidden_size", "trick"):
        assert part in str(caught.value)


def test_a_family_that_is_asked_for_says_what_it_lacks() -> None:
    with pytest.raises(ConfigError, match="qk_norm = True") as caught:
        config_of(ModelConfig(**preset("qwen3_8b")), "llama")
    assert "the family llama" in caught.value.subject
    with pytest.raises(ConfigError, match="bloom"):
        config_of(ModelConfig(), "bloom")
