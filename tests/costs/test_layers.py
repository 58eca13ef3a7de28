"""Parameters equal the built model's, FLOPs equal torch's counter's and published tables'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from paceline.config.model import ModelConfig, MoEConfig
from paceline.config.presets import preset, preset_names
from paceline.costs.layers import Documents, count_parameters, keys_per_token, token_flops, training_flops_per_token
from paceline.kernels.attention import attention_core
from paceline.kernels.cross_entropy import PlainHeadLoss
from paceline.models.transformer import Transformer

LLAMA3_8B: dict[str, Any] = {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_heads": 32,
    "num_kv_heads": 8,
    "ffn_size": 14336,
    "vocab_size": 128256,
    "max_seq_len": 8192,
}
LLAMA3_70B = LLAMA3_8B | {"num_layers": 80, "hidden_size": 8192, "num_heads": 64, "ffn_size": 28672}
LLAMA2_7B = LLAMA3_8B | {"num_kv_heads": 32, "ffn_size": 11008, "vocab_size": 32000}
LLAMA2_13B = LLAMA2_7B | {"num_layers": 40, "hidden_size": 5120, "num_heads": 40, "num_kv_heads": 40, "ffn_size": 13824}
LLAMA2_70B = LLAMA3_70B | {"vocab_size": 32000}


def test_llama3_8b() -> None:
    model = ModelConfig(**LLAMA3_8B)
    counts = count_parameters(model)
    assert counts.total == counts.active == 8_030_261_248
    assert counts.embedding == counts.head == 128256 * 4096
    assert training_flops_per_token(model, 8192) == pytest.approx(51.47e9, rel=1e-4)
    flops = token_flops(model, 8192)
    assert flops.training == pytest.approx(3 * flops.forward) and flops.backward == 2 * flops.forward
    # scores are the only part that the convention changes
    assert token_flops(model, 8192, "full").forward - flops.forward == pytest.approx(flops.scores)


@pytest.mark.parametrize(
    ("shape", "seq_len", "tokens_per_second", "tflops"),
    [
        (LLAMA2_7B, 4096, 16154, 744),
        (LLAMA2_13B, 4096, 8344, 727),
        (LLAMA2_70B, 4096, 1659, 737),
        (LLAMA3_8B, 8192, 11879, 688),
        (LLAMA3_70B, 8192, 1444, 695),
        (LLAMA3_70B, 2048, 1107.185, 479.61),
    ],
)
def test_published_tables(shape: dict[str, Any], seq_len: int, tokens_per_second: float, tflops: float) -> None:
    """Case 1: tokens/s/GPU and TFLOPS/GPU of the same published runs, full-attention convention."""
    flops = training_flops_per_token(ModelConfig(**shape), seq_len, "full")
    assert tokens_per_second * flops / 1e12 == pytest.approx(tflops, rel=5e-3)


@pytest.mark.parametrize(
    ("name", "seq_len", "tokens_per_second", "tflops"),
    [
        ("llama3_8b", 8192, 10830, 557),
        ("llama3_1b", 8192, 52220, 471),
        ("gpt_13b", 2048, 6580, 523),
        ("qwen3_moe_12l", 4096, 14800, 106),
        ("qwen3_moe_12l", 4096, 21580, 155),
    ],
)
def test_measured_peers(name: str, seq_len: int, tokens_per_second: float, tflops: float) -> None:
    """Two figures of the same run on H200s, causal convention."""
    flops = training_flops_per_token(ModelConfig(**preset(name)), seq_len)
    assert tokens_per_second * flops / 1e12 == pytest.approx(tflops, rel=5e-3)


def test_sliding_window() -> None:
    assert keys_per_token(8192, 0, "causal") == 4096
    assert keys_per_token(8192, 8192, "causal") == keys_per_token(8192, 10**6, "causal") == 4096
    # exactly: the mean of min(t, w) over t = 1 ... s, up to the + 1/2 that the convention drops
    exact = sum(min(t, 1024) for t in range(1, 8193)) / 8192
    assert keys_per_token(8192, 1024, "causal") == pytest.approx(exact - 0.5 * 1024 / 8192, rel=1e-9)
    assert keys_per_token(8192, 1024, "full") == 1024
    every_third_full = ModelConfig(**LLAMA3_8B | {"sliding_window": 1024, "sliding_window_period": 4})
    per_layer = 4 * 4096
    assert token_flops(every_third_full, 8192, "full").scores == per_layer * (24 * 1024 + 8 * 8192)


def test_experts_cost_what_a_token_takes() -> None:
    shape = LLAMA3_8B | {"num_experts": 8, "top_k": 2}
    model = ModelConfig(**shape)
    flops, counts = token_flops(model, 4096), count_parameters(model)
    assert flops.experts == 2 * 2 * 3 * 4096 * 14336 * 32 and flops.mlp == 0
    assert flops.router == 2 * 4096 * 8 * 32
    assert counts.total - counts.active == 6 * 3 * 4096 * 14336 * 32
    assert token_flops(ModelConfig(**shape | {"num_experts": 16}), 4096).experts == flops.experts
    assert token_flops(ModelConfig(**shape | {"top_k": 4}), 4096).experts == 2 * flops.experts


def test_deepseek_v3_shape() -> None:
    """671B parameters, 37B of them active (arXiv:2412.19437), without multi-token prediction."""
    model = ModelConfig(
        num_layers=61,
        hidden_size=7168,
        num_heads=128,
        ffn_size=18432,
        vocab_size=129280,
        attention="mla",
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        num_experts=256,
        top_k=8,
        moe=MoEConfig(first_dense_layers=3, ffn_size=2048, num_shared_experts=1, num_groups=8, top_k_groups=4),
        mtp_layers=1,
    )
    counts = count_parameters(model)
    assert (counts.total - counts.mtp) / 1e9 == pytest.approx(671.0, rel=1e-3)
    main = ModelConfig.model_validate(model.model_dump() | {"mtp_layers": 0})
    assert count_parameters(main).active / 1e9 == pytest.approx(37.55, rel=5e-3)
    flops, without = token_flops(model, 4096), token_flops(main, 4096)
    assert flops.logits == 2 * without.logits and flops.mtp_merge == 4 * 7168**2 and without.mtp_merge == 0


@pytest.mark.parametrize("name", preset_names())
def test_parameters_equal_the_built_model(name: str) -> None:
    model = ModelConfig(**preset(name))
    built, counts = Transformer(model, device="meta"), count_parameters(model)
    assert counts.total == sum(parameter.numel() for parameter in built.parameters())
    assert counts.embedding == sum(parameter.numel() for parameter in built.embed.parameters())
    assert counts.head == sum(parameter.numel() for parameter in built.head.parameters())
    assert counts.mtp == sum(parameter.numel() for parameter in built.mtp.parameters())
    of_blocks = [sum(parameter.numel() for parameter in block.parameters()) for block in built.blocks.values()]
    assert list(counts.blocks) == of_blocks


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_parameters_of_every_option(bias: bool, norm: str) -> None:
    """Options that no preset combines."""
    model = ModelConfig(
        **TINY
        | MLA
        | {"norm": norm, "post_norm": True, "qkv_bias": bias, "attention_out_bias": bias, "mlp_bias": bias}
        | {"num_experts": 4, "top_k": 2, "mtp_layers": 2},
        moe=MoEConfig(first_dense_layers=1, num_shared_experts=2, ffn_size=24, shared_gate=True, bias_balance=True),
    )
    built = Transformer(model, device="meta")
    assert count_parameters(model).total == sum(parameter.numel() for parameter in built.parameters())


TINY: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "ffn_size": 48, "vocab_size": 64}
MLA: dict[str, Any] = {
    "attention": "mla",
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_kv_heads": 2, "qkv_bias": True, "activation": "gelu", "tie_embeddings": True},
        {"num_experts": 4, "top_k": 2},
        {"num_experts": 4, "top_k": 1, "moe": MoEConfig(num_shared_experts=1, ffn_size=24, shared_gate=True)},
        MLA,
        MLA | {"q_lora_rank": 0},
        {"mtp_layers": 2},
    ],
    ids=["llama", "gqa_gelu_tied", "moe", "moe_shared", "mla", "mla_direct_queries", "mtp"],
)
def test_flops_equal_torchs_counter(options: dict[str, Any]) -> None:
    """Forward and backward. The reference attention computes all scores and masks them, so the counter sees the full
    convention; scores of a query head and shared key heads are counted for each query head."""
    model = ModelConfig(**TINY | options)
    built = Transformer(model, core=attention_core("reference"), head_loss=PlainHeadLoss())
    built.init_weights(seed=0)
    tokens = torch.randint(0, 64, (2, 16))
    with FlopCounterMode(display=False) as counter:
        output = built(tokens, tokens)
    expected = token_flops(model, 16, "full")
    assert counter.get_total_flops() == pytest.approx(expected.forward * tokens.numel(), rel=1e-9)
    assert output.loss_sum is not None
    with FlopCounterMode(display=False) as counter:
        output.loss_sum.backward()
    assert counter.get_total_flops() == pytest.approx(expected.backward * tokens.numel(), rel=1e-9)


def test_documents_that_share_a_row_see_themselves_alone() -> None:
    """Projections as before; scores by each document's own length, and none of what fills a row up."""
    model = ModelConfig(**preset("llama3_8b"))
    whole = token_flops(model, 8192)
    packed = token_flops(model, 8192, documents=Documents(counts={1024: 6, 512: 3}, tokens=8192))
    assert packed.forward - packed.scores == whole.forward - whole.scores
    expected = (6 * 1024 * token_flops(model, 1024).scores + 3 * 512 * token_flops(model, 512).scores) / 8192
    assert packed.scores == pytest.approx(expected)
    # a document as long as the row is the row
    assert token_flops(model, 8192, documents=Documents(counts={8192: 5}, tokens=5 * 8192)) == whole
    windowed = model.model_copy(update={"sliding_window": 256})
    short = token_flops(windowed, 8192, documents=Documents(counts={128: 64}, tokens=8192))
    assert short.scores == token_flops(model, 128).scores
