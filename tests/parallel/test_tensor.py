"""A model cut over tp is the plain model: loss, logits and every gradient, in float64 to 1e-9 (cases 66, 67, 73, 76)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distributed import run
from paceline.config.model import ModelConfig, MoEConfig
from paceline.config.parallel import ParallelConfig
from paceline.kernels.attention import attention_core
from paceline.kernels.cross_entropy import IGNORE_INDEX, ChunkedHeadLoss, PlainHeadLoss
from paceline.models.transformer import Transformer
from paceline.parallel.compile import compile_blocks
from paceline.parallel.mesh import ParallelMesh
from paceline.parallel.recompute import recompute
from paceline.parallel.shards import Shard
from paceline.parallel.tensor import shard_tensors

B, T, V = 3, 8, 67  # 67 rows of the vocabulary divide by neither 2 nor 4

GPT: dict[str, Any] = {
    "norm": "layernorm",
    "activation": "gelu",
    "position": "learned",
    "qkv_bias": True,
    "attention_out_bias": True,
    "mlp_bias": True,
    "tie_embeddings": True,
}
MLA: dict[str, Any] = {
    "attention": "mla",
    "q_lora_rank": 8,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "top_k": 2,
    "moe": MoEConfig(ffn_size=8, num_shared_experts=1, shared_gate=True, first_dense_layers=1),
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": GPT,
    "llama": {"num_kv_heads": 2},  # with tp 4: each key/value head on two ranks
    "mqa": {"num_kv_heads": 1, "qkv_bias": True},
    "qwen3": {"num_kv_heads": 2, "qk_norm": True, "tie_embeddings": True},
    "gemma2": {
        "post_norm": True,
        "norm_unit_offset": True,
        "embedding_scale": True,
        "activation": "geglu",
        "attention_softcap": 5.0,
        "logit_softcap": 3.0,
        "sliding_window": 3,
        "sliding_window_period": 2,
        "tie_embeddings": True,
    },
    "deepseek": MLA,
    "deepseek lite": MLA | {"q_lora_rank": 0, "qkv_bias": True, "attention_out_bias": True},
    "experts": EXPERTS,
    "mtp": {"mtp_layers": 2, "num_kv_heads": 2},
    "odd width": {"ffn_size": 23, "mlp_bias": True},
}


def config_of(**more: Any) -> ModelConfig:
    shape = {"num_layers": 2, "hidden_size": 16, "num_heads": 4, "ffn_size": 24, "max_seq_len": T, "vocab_size": V}
    return ModelConfig(**(shape | {"init_std": 0.3} | more))


def plain_model(config: ModelConfig, loss: Any = None, dtype: torch.dtype = torch.float64) -> Transformer:
    core = attention_core("reference")
    model = Transformer(config, dtype=dtype, core=core, head_loss=loss or PlainHeadLoss())
    model.init_weights(3)
    with torch.no_grad():
        # biases and norms start as 0 and 1, which would hide mistakes
        generator = torch.Generator().manual_seed(5)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator).to(dtype)
    return model


def batch(documents: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(11)
    tokens, labels = (torch.randint(V, (B, T), generator=generator) for _ in range(2))
    labels[0, :3] = IGNORE_INDEX
    labels[2, -1] = IGNORE_INDEX
    fields = {"tokens": tokens, "labels": labels}
    if documents:
        fields["documents"] = torch.tensor([[0] * 3 + [1] * 5, [0] * 8, [0, 1, 1, 2, 2, 2, 3, 3]])
        fields["positions"] = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], list(range(8)), [0, 0, 1, 0, 1, 2, 0, 1]])
    return fields


def mesh_of(rank: int, world_size: int, tp: int) -> ParallelMesh:
    return ParallelMesh(ParallelConfig(tp=tp), world_size=world_size, rank=rank, device_type="cpu")


def backward(model: Transformer, fields: dict[str, Tensor]) -> dict[str, Tensor]:
    """Loss, gradients by name, and that of the embedding's output: the input of the first layer."""
    seen: list[Tensor] = []
    assert model.embed is not None
    handle = model.embed.register_forward_hook(lambda module, inputs, output: seen.append(output))
    output = model(**fields)
    handle.remove()
    assert output.loss_sum is not None and output.num_tokens is not None
    seen[0].retain_grad()
    (output.loss_sum / output.num_tokens).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    return {"loss": output.loss_sum.detach(), "embedded": seen[0].grad, **gradients}  # type: ignore[dict-item]


def own_box(whole: Tensor, shard: Shard, shape: torch.Size) -> Tensor:
    return whole[tuple(slice(start, start + size) for start, size in zip(shard.offsets, shape, strict=True))]


def error(found: Tensor, expected: Tensor) -> float:
    """Relative, per tensor; infinite where shapes or dtypes differ.

    Gradients are about 1e-1. One below 1e-6 is a zero (softmax ignores a bias on all keys), and is judged as if 1e-6.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    scale = expected.abs().max().clamp_min(1e-6)
    return float((found - expected).abs().max() / scale)


def errors(rank: int, model: Transformer, mesh: ParallelMesh, shards: dict[str, Shard], **options: Any) -> Any:
    """Relative errors by name of the cut model against `plain_model` of the same config."""
    fields = batch(**options)
    expected = backward(plain_model(model.config), fields)
    axis = mesh["tp"]
    found = backward(model, fields)
    result = {"loss": error(found["loss"], expected["loss"])}
    result["embedded"] = error(found["embedded"], expected["embedded"].chunk(axis.size, dim=1)[axis.index])
    assert set(found) == set(expected)
    for name, parameter in model.named_parameters():
        gradient = found[name].clone()
        if name not in shards:
            assert ".experts." in name
            dist.all_reduce(gradient, group=axis.group)
            result[name] = error(gradient, expected[name])
            continue
        shard = shards[name]
        for replica in shard.replicas:
            dist.all_reduce(gradient, group=replica.group)
        assert shard.whole == expected[name].shape
        result[name] = error(gradient, own_box(expected[name], shard, parameter.shape))
    return result


def _errors_of_cases(rank: int, world_size: int, cases: list[tuple[str, str, str, bool]]) -> dict[Any, Any]:
    mesh = mesh_of(rank, world_size, world_size)
    results = {}
    for case in cases:
        name, loss, recomputed, documents = case
        model = plain_model(config_of(**MODELS[name]), ChunkedHeadLoss(chunk_tokens=5) if loss == "chunked" else None)
        shards = shard_tensors(model, mesh)
        recompute(list(model.blocks.values()), recomputed)  # type: ignore[arg-type]
        results[case] = errors(rank, model, mesh, shards, documents=documents)
    return results


CASES = [(name, "plain", "none", False) for name in MODELS] + [
    ("gpt", "chunked", "full", True),
    ("llama", "chunked", "selective", True),
    ("gemma2", "chunked", "full", False),
    ("mtp", "chunked", "none", True),
]


@pytest.mark.parametrize("tp", [2, 4])
def test_loss_and_every_gradient_equal_the_plain_models(tp: int) -> None:
    for by_case in run(_errors_of_cases, tp, CASES):
        for case, found in by_case.items():
            worst = max(found, key=found.get)
            assert found[worst] <= 1e-9, f"{case}: {worst} is off by {found[worst]:.1e}"
