"""A model cut over tp is the plain model: loss, logits and every gradient, in float64 to 1e-9 (cases 66, 67, 73)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

from distributed import run
from paceline.config.model import ModelConfig, MoEConfig
from paceline.config.parallel import ParallelConfig
from paceline.kernels.attention import attention_core
from paceline.kernels.cross_entropy import IGNORE_INDEX, ChunkedHeadLoss, PlainHeadLoss
from paceline.models.transformer import Transformer
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


def _stages(rank: int, world_size: int) -> dict[str, float]:
    """Two stages of one rank, with the embedding in both; the gradient between them is handed on by hand."""
    mesh = mesh_of(rank, world_size, world_size)
    config = config_of(**GPT)
    model, fields = plain_model(config), batch(documents=True)
    expected = backward(plain_model(config), fields)
    first = model.part(range(0, 1), first=True, last=False)
    last = model.part(range(1, 2), first=False, last=True)
    shards = shard_tensors(first, mesh) | shard_tensors(last, mesh)
    between = first(**fields).hidden
    handed_on = between.detach().requires_grad_()
    output = last(**fields, hidden=handed_on)
    (output.loss_sum / output.num_tokens).backward()
    between.backward(handed_on.grad)
    result = {"loss": error(output.loss_sum.detach(), expected["loss"])}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        for replica in shards[name].replicas:
            dist.all_reduce(gradient, group=replica.group)
        result[name] = error(gradient, own_box(expected[name], shards[name], parameter.shape))
    return result


def test_stages_of_one_rank_may_share_the_embedding() -> None:
    for found in run(_stages, 2):
        assert max(found.values()) <= 1e-9, found


def _logits(rank: int, world_size: int) -> list[float]:
    mesh, fields = mesh_of(rank, world_size, world_size), batch()
    found = []
    for name in ("gpt", "gemma2"):
        config = config_of(**MODELS[name])
        model = plain_model(config)
        shard_tensors(model, mesh)
        logits = model(fields["tokens"]).logits
        found.append(error(logits.detach(), plain_model(config)(fields["tokens"]).logits.detach()))
    return found


def test_every_rank_has_all_logits() -> None:
    for found in run(_logits, 4):
        assert max(found) <= 1e-12, found


def _meta(rank: int, world_size: int) -> None:
    """On the meta device the same parameters come out, and the entries cover each of them exactly."""
    mesh = mesh_of(rank, world_size, world_size)
    for name, shape in MODELS.items():
        config = config_of(**shape)
        real, meta = plain_model(config), Transformer(config, device="meta")
        whole = {key: value.detach().clone() for key, value in real.named_parameters()}
        shards, same = shard_tensors(real, mesh), shard_tensors(meta, mesh)
        assert shards == same, name
        shapes = {key: value.shape for key, value in real.named_parameters()}
        assert shapes == {key: value.shape for key, value in meta.named_parameters()}
        assert set(shards) == {key for key in whole if ".experts." not in key}
        for key, value in real.named_parameters():
            if key not in shards:
                assert torch.equal(value, whole[key])
                continue
            shard = shards[key]
            assert torch.equal(value, own_box(whole[key], shard, value.shape)) and value.is_contiguous()
            copies = max((axis.size for axis in shard.replicas), default=1)
            elements = torch.tensor(value.numel())
            dist.all_reduce(elements)
            assert int(elements) == whole[key].numel() * copies, (name, key)


@pytest.mark.parametrize("tp", [2, 4])
def test_parameters_are_cut_and_described(tp: int) -> None:
    run(_meta, tp)


def test_alone_nothing_changes() -> None:
    model = plain_model(config_of(**GPT))
    before = dict(model.named_parameters())
    mesh = mesh_of(0, 1, 1)
    assert shard_tensors(model, mesh) == {}
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert isinstance(model.head_loss, PlainHeadLoss) and "forward" not in vars(model.blocks["0"].attention)  # type: ignore[arg-type]


def _compiled(rank: int, world_size: int, name: str, recomputed: str) -> tuple[float, int]:
    """Largest error, and number of graphs."""
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    mesh = mesh_of(rank, world_size, world_size)
    model = plain_model(config_of(**MODELS[name]))
    shards = shard_tensors(model, mesh)
    recompute(list(model.blocks.values()), recomputed)  # type: ignore[arg-type]
    for block in model.blocks.values():
        block.forward = torch.compile(block.forward, backend=backend, dynamic=False, fullgraph=True)
    found = errors(rank, model, mesh, shards)
    return max(found.values()), len(graphs)


@pytest.mark.parametrize(("name", "recomputed"), [("gpt", "none"), ("deepseek", "full")])
def test_blocks_compile_into_one_graph_for_all_layers(name: str, recomputed: str) -> None:
    for worst, graphs in run(_compiled, 2, name, recomputed):
        assert worst <= 1e-9
        assert graphs == 1


def _traffic(rank: int, world_size: int, recomputed: str) -> dict[str, tuple[int, int]]:
    mesh = mesh_of(rank, world_size, world_size)
    model = plain_model(config_of(num_layers=1, num_kv_heads=2))
    shard_tensors(model, mesh)
    recompute(list(model.blocks.values()), recomputed)  # type: ignore[arg-type]
    mesh.traffic.take()
    backward(model, batch())
    return mesh.traffic.take()


def test_traffic_of_a_layer() -> None:
    stream, tokens = B * T * 16 * 8, B * T
    ends = {
        "tp/embedding/reduce_scatter": (1, stream),
        "tp/embedding/all_gather": (1, stream),
        "tp/head/all_gather": (1, stream),
        "tp/head/reduce_scatter": (1, stream),
        "tp/loss/all_gather": (1, 2 * 2 * tokens * 8),
    }
    sublayers = ("tp/attention", "tp/feed_forward")
    for traffic in run(_traffic, 2, "none"):
        # one of the three is the input again, which is not kept
        gathers = {f"{name}/all_gather": (3, 3 * stream) for name in sublayers}
        scatters = {f"{name}/reduce_scatter": (2, 2 * stream) for name in sublayers}
        assert traffic == ends | gathers | scatters


def _train(rank: int, world_size: int, tp: int, shape: dict[str, Any], steps: int, lr: float) -> dict[str, Any]:
    """SGD in fp32 on one batch, with the sums over replicas that an engine does: losses, and first gradient norm."""
    mesh = mesh_of(rank, world_size, tp)
    model, fields = plain_model(config_of(**shape), dtype=torch.float32), batch()
    shards = shard_tensors(model, mesh)
    losses, norm, whole = [], 0.0, {}
    for step in range(steps):
        model.zero_grad()
        output = model(**fields)
        (output.loss_sum / output.num_tokens).backward()
        for name, parameter in model.named_parameters():
            for replica in shards[name].replicas if shards else ():
                dist.all_reduce(parameter.grad, group=replica.group)
        if step == 0:
            norm, whole = _norm(model, shards, mesh), _whole_gradients(model, shards, mesh)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= lr * parameter.grad
        losses.append(float(output.loss_sum.detach() / output.num_tokens))
    return {"losses": losses, "norm": norm, "whole": whole}


def _norm(model: Transformer, shards: dict[str, Shard], mesh: ParallelMesh) -> float:
    """Every element counts once: where several ranks have it, on the first of them."""
    total = torch.zeros(())
    for name, parameter in model.named_parameters():
        if not shards or all(axis.index == 0 for axis in shards[name].replicas):
            total += parameter.grad.square().sum()
    if mesh.size("tp") > 1:
        dist.all_reduce(total, group=mesh["tp"].group)
    return float(total.sqrt())


def _whole_gradients(model: Transformer, shards: dict[str, Shard], mesh: ParallelMesh) -> dict[str, Tensor]:
    """Of parameters that every rank of tp has."""
    axis = mesh["tp"]
    is_whole = {name for name, shard in shards.items() if any(r.ranks == axis.ranks for r in shard.replicas)}
    return {name: p.grad.clone() for name, p in model.named_parameters() if not shards or name in is_whole}


def test_whole_gradients_are_bit_equal_on_all_ranks_and_near_one_process() -> None:
    """Cases 66 and 73 in fp32, with a vocabulary that does not divide."""
    (single,) = run(_train, 1, 1, GPT, 1, 0.1)
    ranks = run(_train, 2, 2, GPT, 1, 0.1)
    assert len(ranks[0]["whole"]) > 10
    for result in ranks:
        assert result["losses"] == pytest.approx(single["losses"], abs=1e-5)
        assert result["norm"] == pytest.approx(single["norm"], rel=1e-4)
        for name, gradient in result["whole"].items():
            assert torch.equal(gradient, ranks[0]["whole"][name]), name
            torch.testing.assert_close(gradient, single["whole"][name], rtol=0, atol=1e-6)


def test_one_key_head_trains_like_one_process() -> None:
    """Case 67: with a partial gradient at the layer's input the loss is fine at first, then explodes."""
    shape = {"num_kv_heads": 1, "init_std": 0.1}
    (single,) = run(_train, 1, 1, shape, 200, 0.1)
    assert single["losses"][-1] < single["losses"][0] - 1.0
    for result in run(_train, 2, 2, shape, 200, 0.1):
        assert result["losses"] == pytest.approx(single["losses"], abs=1e-4)
