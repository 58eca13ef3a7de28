"""Attention and whole models over the ranks of `cp`, against one process."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distributed import run
from paceline.config.model import ModelConfig, MoEConfig
from paceline.config.parallel import ParallelConfig
from paceline.data.batch import IGNORE_INDEX, Batch
from paceline.kernels.attention import AttentionMask, attention_core, reference_attention
from paceline.kernels.cross_entropy import PlainHeadLoss
from paceline.models.transformer import Transformer
from paceline.parallel import ring
from paceline.parallel.collectives import Axis, Traffic, all_reduce
from paceline.parallel.compile import compile_blocks
from paceline.parallel.context import context_part, shard_sequence
from paceline.parallel.expert.shard import shard_experts
from paceline.parallel.mesh import ParallelMesh
from paceline.parallel.recompute import recompute
from paceline.parallel.ring import RingAttention, ring_blocks
from paceline.parallel.sequence import ContextMethod, SequenceLayout
from paceline.parallel.shards import Shard
from paceline.parallel.tensor import shard_tensors
from paceline.parallel.ulysses import UlyssesAttention

METHODS: tuple[ContextMethod, ...] = ("ring", "ulysses")


# ---- where tokens lie


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_layout(method: ContextMethod, size: int) -> None:
    layout = SequenceLayout(size, method)
    length = 6
    whole = torch.randn(2, size * length, 3)
    parts = [layout.part(whole, index, dim=1) for index in range(size)]
    for index, part in enumerate(parts):
        positions = layout.positions(index, length)
        assert bool((positions.diff() > 0).all())
        torch.testing.assert_close(part, whole[:, positions], rtol=0, atol=0)
    torch.testing.assert_close(torch.cat(parts, 1)[:, layout.natural_order(length)], whole, rtol=0, atol=0)


def test_ring_layout_is_mirrored() -> None:
    layout = SequenceLayout(4, "ring")
    assert [layout.chunks(index) for index in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert layout.positions(1, 4).tolist() == [2, 3, 12, 13]
    with pytest.raises(AssertionError, match="do not divide"):
        layout.part(torch.zeros(1, 12), 0, dim=1)


def test_batches_are_cut() -> None:
    axis = Axis(name="cp", ranks=(0, 1), index=1)
    tokens = torch.arange(16).view(2, 8)
    documents = torch.tensor([[0] * 3 + [1] * 5] * 2, dtype=torch.int32)
    part = context_part(Batch(tokens=tokens, labels=tokens + 1, documents=documents), axis, "ring")
    assert part.tokens.tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
    assert part.labels.tolist() == [[3, 4, 5, 6], [11, 12, 13, 14]]
    assert part.positions is not None and part.positions.tolist() == [[2, 3, 4, 5]] * 2
    assert part.documents is not None and part.documents.tolist() == [[0, 1, 1, 1]] * 2
    given = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]] * 2)
    part = context_part(Batch(tokens=tokens, labels=tokens, positions=given), axis, "ulysses")
    assert part.positions is not None and part.positions.tolist() == [[1, 2, 3, 4]] * 2


# ---- which blocks are computed


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("documents", [False, True])
def test_every_rank_does_the_same_work(size: int, documents: bool) -> None:
    length = 10
    halves = []
    for index in range(size):
        pairs = 0.0
        for source in range(size):
            blocks = ring_blocks(index, source, size, length, documents=documents)
            area = {block.kind: 0.0 for block in blocks}
            for block in blocks:
                area[block.kind] += _length(block.queries) * _length(block.keys) / (length // 2) ** 2
            pairs += sum(area.values())
            # two half x half blocks with the keys of another rank; with the own ones the fourth is above the diagonal
            assert sum(area.values()) == (2 if index != source else 3 if documents else 4)
        halves.append(pairs)
    assert len(set(halves)) == 1


@pytest.mark.parametrize("window", [0, 1, 3, 5, 6, 12, 50])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("documents", [True, False])
def test_blocks_cover_what_is_seen(window: int, causal: bool, documents: bool) -> None:
    """Every pair that is seen is in one block; pairs in unmasked blocks are all seen; no block is masked whole."""
    size, length = 3, 10
    layout = SequenceLayout(size, "ring")
    for index in range(size):
        for source in range(size):
            q, k = layout.positions(index, length)[:, None], layout.positions(source, length)[None]
            seen = (q >= k if causal else q == q) & ((q - k < window) if window else (k == k))
            count = torch.zeros(length, length, dtype=torch.int64)
            for block in ring_blocks(index, source, size, length, causal=causal, window=window, documents=documents):
                count[block.queries, block.keys] += 1
                of_block = seen[block.queries, block.keys]
                assert bool(of_block.any())
                if block.kind == "full":
                    assert bool(of_block.all()) and not documents
                if block.kind == "causal":
                    torch.testing.assert_close(of_block, torch.ones_like(of_block).tril())
            assert int(count.max()) <= 1 and bool((count >= seen.long()).all())


def _length(part: slice) -> int:
    return int(part.stop - part.start)


# ---- attention


def _case(
    name: str, *, heads: int = 4, kv: int = 4, dim: int = 8, value: int = 8, half: int = 3, **more: Any
) -> dict[str, Any]:
    return {"name": name, "heads": heads, "kv": kv, "dim": dim, "value": value, "half": half, **more}


CASES = [
    _case("multi-head"),
    _case("grouped", kv=2),
    _case("one key head", kv=1, half=1),
    _case("three key heads", heads=12, kv=3, half=2),
    _case("not causal", kv=2, causal=False),
    _case("documents", kv=2, documents=True),
    _case("window", kv=2, window=4, half=5),
    _case("window of one", window=1),
    _case("window over ranks", kv=1, window=9, half=4),
    _case("window and documents", window=7, documents=True, half=4),
    _case("softcap", kv=2, softcap=1.5),
    _case("softcap, window and documents", kv=1, softcap=1.5, window=5, documents=True),
    _case("narrow values", kv=2, dim=12, value=8),
    _case("wide values", dim=4, value=8, documents=True),
]


def _whole_inputs(
    case: dict[str, Any], size: int, method: ContextMethod, dtype: torch.dtype
) -> tuple[list[Tensor], Tensor, AttentionMask]:
    generator = torch.Generator().manual_seed(len(case["name"]))
    # on a ring a rank has two chunks of `half` tokens; otherwise one, of an odd number
    B, S = 2, size * (2 * case["half"] - (method == "ulysses"))
    shapes = [(case["heads"], case["dim"]), (case["kv"], case["dim"]), (case["kv"], case["value"])]
    q, k, v = (torch.randn(B, S, *shape, generator=generator, dtype=torch.float64) for shape in shapes)
    grad = torch.randn(B, S, case["heads"], case["value"], generator=generator, dtype=torch.float64)
    documents = None
    if case.get("documents"):
        starts = torch.rand(B, S, generator=generator) < 0.2
        documents = starts.cumsum(1).to(torch.int32)
    mask = AttentionMask(causal=case.get("causal", True), window=case.get("window", 0), documents=documents)
    return [x.to(dtype).requires_grad_() for x in (q, k, v)], grad.to(dtype), mask


def _cp_axis(rank: int, size: int) -> Axis:
    return Axis(name="cp", ranks=tuple(range(size)), index=rank, group=dist.group.WORLD, traffic=Traffic())


def _core(method: ContextMethod, axis: Axis, *, reference: bool) -> Any:
    if method == "ring":
        return RingAttention(axis, reference=reference)
    return UlyssesAttention(axis, attention_core("reference" if reference else "auto"))


def _attention_errors(
    rank: int, size: int, method: ContextMethod, dtype: torch.dtype, reference: bool
) -> dict[str, list[float]]:
    axis, layout = _cp_axis(rank, size), SequenceLayout(size, method)
    core = _core(method, axis, reference=reference)
    errors = {}
    for case in CASES:
        inputs, grad, mask = _whole_inputs(case, size, method, dtype)
        wide = [x.detach().double().requires_grad_() for x in inputs]
        softcap = case.get("softcap", 0.0)
        out = reference_attention(*wide, mask, scale=0.4, softcap=softcap)
        expected = [out.detach(), *torch.autograd.grad(out, wide, grad.double())]

        own = [layout.part(x.detach(), rank, dim=1).requires_grad_() for x in inputs]
        documents = None if mask.documents is None else layout.part(mask.documents, rank, dim=1)
        own_mask = AttentionMask(causal=mask.causal, window=mask.window, documents=documents)
        found = core(*own, own_mask, scale=0.4, softcap=softcap)
        assert found.dtype == dtype and found.shape == (*own[0].shape[:3], own[2].shape[-1])
        own_grads = torch.autograd.grad(found, own, layout.part(grad, rank, dim=1))
        errors[case["name"]] = [
            float(
                (a.double() - layout.part(b, rank, dim=1)).norm() / (float(b.norm()) or 1.0)
            )  # where nothing flows: absolute
            for a, b in zip((found.detach(), *own_grads), expected, strict=True)
        ]
    return errors


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("method", METHODS)
def test_attention_in_float64(method: ContextMethod, size: int) -> None:
    for errors in run(_attention_errors, size, method, torch.float64, False):
        assert max(max(each) for each in errors.values()) <= 1e-12, errors


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("reference", [True, False])
def test_attention_in_fp32(method: ContextMethod, reference: bool) -> None:
    """With the reference, and with the CPU's fused kernel: measured against float64, 24 bits."""
    for errors in run(_attention_errors, 2, method, torch.float32, reference):
        assert max(max(each) for each in errors.values()) <= 2e-6, errors


@pytest.mark.parametrize("reference", [True, False])
def test_attention_in_bf16(reference: bool) -> None:
    """8 bits: inputs are the same, results are rounded, and so are probabilities in the fused kernel."""
    for errors in run(_attention_errors, 2, "ring", torch.bfloat16, reference):
        assert max(max(each) for each in errors.values()) <= 1e-2, errors


def _packing_leaks(rank: int, size: int, method: ContextMethod) -> list[float]:
    """How far outputs of the second document move when the first changes; and from the second document alone."""
    axis, layout = _cp_axis(rank, size), SequenceLayout(size, method)
    core = _core(method, axis, reference=False)
    S, first = 24, 7
    documents = (torch.arange(S) >= first).to(torch.int32)[None]
    inputs = [torch.randn(1, S, 4, 8, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    changed = [torch.cat((x[:, :first] + 5.0, x[:, first:]), dim=1) for x in inputs]
    mask = AttentionMask(documents=layout.part(documents, rank, dim=1))
    outs = [core(*(layout.part(x, rank, dim=1) for x in xs), mask, scale=0.3) for xs in (inputs, changed)]
    positions = layout.positions(rank, S // size)
    second = positions >= first
    alone = reference_attention(*(x[:, first:] for x in inputs), AttentionMask(), scale=0.3)
    own = alone[:, positions[second] - first]
    return [float((outs[0] - outs[1])[:, second].abs().amax()), float((outs[0][:, second] - own).abs().amax())]


@pytest.mark.parametrize("method", METHODS)
def test_packed_documents_do_not_see_each_other(method: ContextMethod) -> None:
    """Case 63."""
    for moved, apart in run(_packing_leaks, 2, method):
        assert moved == 0.0 and apart <= 1e-6


def _dropout(rank: int, size: int, method: ContextMethod) -> tuple[float, float, bool, bool]:
    axis, layout = _cp_axis(rank, size), SequenceLayout(size, method)
    core = _core(method, axis, reference=True)
    case = _case("dropout", heads=2, kv=2, half=4)
    inputs, grad, mask = _whole_inputs(case, size, method, torch.float64)
    own, own_grad = [layout.part(x.detach(), rank, dim=1) for x in inputs], layout.part(grad, rank, dim=1)
    directions = [torch.randn_like(x, generator=None) for x in own]

    def dropped(parts: list[Tensor], seed: int) -> Tensor:
        torch.manual_seed(seed + 1000 * rank)
        return core(*parts, mask, scale=0.4, dropout=0.25)

    leaves = [x.clone().requires_grad_() for x in own]
    grads = torch.autograd.grad(dropped(leaves, 1), leaves, own_grad)
    slope = sum((g * d).sum() for g, d in zip(grads, directions, strict=True))
    moved = [
        (dropped([x + sign * 1e-5 * d for x, d in zip(own, directions, strict=True)], 1) * own_grad).sum()
        for sign in (1, -1)
    ]
    slopes = torch.stack((torch.as_tensor(slope), (moved[0] - moved[1]) / 2e-5))
    dist.all_reduce(slopes)
    mean = torch.stack([dropped(own, 2 + n) for n in range(200)]).mean(0)
    plain = layout.part(reference_attention(*inputs, mask, scale=0.4).detach(), rank, dim=1)
    same = torch.equal(dropped(own, 1), dropped(own, 1))
    return (
        float(slopes[0] / slopes[1]),
        float((mean - plain).norm() / plain.norm()),
        same,
        torch.equal(dropped(own, 1), dropped(own, 3)),
    )


@pytest.mark.parametrize("method", METHODS)
def test_dropout(method: ContextMethod) -> None:
    """Exactness is impossible (other draws than one process): the slope is that of the dropped function, on average
    it is the plain one, and draws follow the seed."""
    for ratio, apart, same, constant in run(_dropout, 2, method):
        assert ratio == pytest.approx(1.0, rel=1e-6) and apart < 0.1 and same and not constant


def _traffic(rank: int, size: int) -> dict[str, dict[str, tuple[int, int]]]:
    counted = {}
    for method in METHODS:
        axis, layout = _cp_axis(rank, size), SequenceLayout(size, method)
        inputs, grad, mask = _whole_inputs(_case("traffic", kv=2), size, "ring", torch.float32)
        own = [layout.part(x.detach(), rank, dim=1).requires_grad_() for x in inputs]
        out = _core(method, axis, reference=False)(*own, mask, scale=0.4)
        counted[f"{method} forward"] = axis.traffic.take()
        out.backward(layout.part(grad, rank, dim=1))
        counted[f"{method} backward"] = axis.traffic.take()
    return counted


def test_only_key_heads_travel() -> None:
    size, T = 4, 6
    kv_bytes = 2 * T * 2 * (8 + 8) * 4
    for counted in run(_traffic, size):
        assert counted["ring forward"] == {"cp/attention/ring": (size - 1, (size - 1) * kv_bytes)}
        assert counted["ring backward"] == {"cp/attention/ring": (2 * size - 1, (2 * size - 1) * kv_bytes)}
        q_bytes = 2 * T * 4 * 8 * 4
        assert counted["ulysses forward"] == {"cp/attention/all_to_all": (2, 4 * q_bytes)}
        assert counted["ulysses backward"] == counted["ulysses forward"]


# ---- models

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_kv_heads": 2},
    "gpt": {"position": "learned", "norm": "layernorm", "tie_embeddings": True},
    "windows": {"sliding_window": 5, "qk_norm": True},
}


def _model(more: dict[str, Any]) -> Transformer:
    shape: dict[str, Any] = {"vocab_size": 37, "num_layers": 2, "hidden_size": 16, "num_heads": 4, "ffn_size": 24}
    config = ModelConfig(**(shape | {"max_seq_len": 32, "init_std": 0.2} | more))
    model = Transformer(config, dtype=torch.float64, core=attention_core("reference"), head_loss=PlainHeadLoss())
    model.init_weights(3)
    return model


def _batch(*, documents: bool) -> Batch:
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(37, (2, 16), generator=generator)
    labels = torch.randint(37, (2, 16), generator=generator)
    labels[0, :5] = IGNORE_INDEX
    labels[1, 11:] = IGNORE_INDEX
    if not documents:
        return Batch(tokens=tokens, labels=labels)
    numbers = torch.tensor([[0] * 3 + [1] * 9 + [2] * 4, [0] * 16], dtype=torch.int32)
    positions = torch.cat((torch.arange(3), torch.arange(9), torch.arange(4), torch.arange(16))).view(2, 16)
    return Batch(tokens=tokens, labels=labels, positions=positions, documents=numbers)


def _step(model: Transformer, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    out = model(batch.tokens, batch.labels, positions=batch.positions, documents=batch.documents)
    assert out.loss_sum is not None
    (out.loss_sum if out.aux_loss is None else out.loss_sum + out.aux_loss).backward()
    return out.loss_sum.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _model_errors(
    rank: int, size: int, method: ContextMethod, kinds: list[str], changes: list[str]
) -> dict[str, float]:
    mesh = ParallelMesh(ParallelConfig(cp=size), world_size=size, rank=rank, device_type="cpu")
    errors = {}
    for kind in kinds:
        for documents in (False, True):
            batch = _batch(documents=documents)
            plain = _model(MODELS[kind])
            loss, grads = _step(plain, batch)
            for change in changes:
                model = _model(MODELS[kind])
                shard_sequence(model, mesh, method)
                _change(model, change)
                found_loss, found = _step(model, context_part(batch, mesh["cp"], method))
                dist.all_reduce(found_loss)
                error = float((found_loss - loss).abs() / loss.abs())
                assert found.keys() == grads.keys()
                for name, grad in found.items():
                    dist.all_reduce(grad)
                    error = max(error, float((grad - grads[name]).norm() / grads[name].norm()))
                errors[f"{kind} {documents=} {change}"] = error
    return errors


def _change(model: Transformer, change: str) -> None:
    blocks = list(model.blocks.values())
    if change in ("selective", "full"):
        recompute(blocks, change)  # type: ignore[arg-type]
    if change == "compiled":
        torch._dynamo.reset()
        compile_blocks(blocks, backend="aot_eager")


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("method", METHODS)
def test_models(method: ContextMethod, size: int) -> None:
    for errors in run(_model_errors, size, method, list(MODELS), ["plain"]):
        assert max(errors.values()) <= 1e-9, errors


@pytest.mark.parametrize("method", METHODS)
def test_recomputed_and_compiled_models(method: ContextMethod) -> None:
    for errors in run(_model_errors, 2, method, ["llama"], ["selective", "full", "compiled"]):
        assert max(errors.values()) <= 1e-9, errors


def _dropped_gradients(rank: int, size: int, method: ContextMethod) -> list[float]:
    """How far gradients under dropout are from those without recompute, from the same seed."""
    mesh = ParallelMesh(ParallelConfig(cp=size), world_size=size, rank=rank, device_type="cpu")
    batch, found = context_part(_batch(documents=True), mesh["cp"], method), []
    for change in ("plain", "selective", "full"):
        model = _model(MODELS["llama"] | {"attention_dropout": 0.3, "dropout": 0.2})
        shard_sequence(model, mesh, method)
        _change(model, change)
        torch.manual_seed(rank)
        found.append(torch.cat([grad.flatten() for grad in _step(model, batch)[1].values()]))
    return [float((grads - found[0]).norm() / found[0].norm()) for grads in found[1:]]


@pytest.mark.parametrize("method", METHODS)
def test_recompute_draws_the_same_dropout(method: ContextMethod) -> None:
    for errors in run(_dropped_gradients, 2, method):
        assert max(errors) <= 1e-12, errors


SPREAD: dict[str, dict[str, Any]] = {
    "llama": {"num_kv_heads": 2},
    "deepseek": {
        "attention": "mla",
        "kv_lora_rank": 6,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 2,
        "v_head_dim": 4,
    },
    # a large coefficient, so that a router loss that depends on the layout is seen (case 70)
    "experts": {
        "num_experts": 4,
        "top_k": 2,
        "moe": MoEConfig(ffn_size=8, layer_period=2, layer_offset=1, aux_loss_coef=1.0),
    },
}


def _spread_errors(rank: int, size: int, parallels: list[dict[str, Any]]) -> dict[str, float]:
    """Models that are cut in other ways too: gradients summed as the engines do."""
    errors = {}
    for parallel in parallels:
        config = ParallelConfig(**parallel)
        mesh = ParallelMesh(config, world_size=size, rank=rank, device_type="cpu")
        layout, cp = SequenceLayout(config.cp, config.cp_method), mesh["cp"]
        batch = _batch(documents=True)
        for kind, more in SPREAD.items():
            plain, model = _model(more), _model(more)
            loss, grads = _step(plain, batch)
            shards = shard_tensors(model, mesh) | shard_experts(model, mesh, layout)
            shard_sequence(model, mesh, config.cp_method)
            recompute(list(model.blocks.values()), "selective")
            found_loss, found = _step(model, context_part(batch, cp, config.cp_method))
            dist.all_reduce(found_loss, group=cp.group)
            error = float((found_loss - loss).abs() / loss.abs())
            assert found.keys() == grads.keys()
            for name, grad in found.items():
                shard = shards.get(name) or Shard.of_whole(grad)
                for axis in (mesh["edp"] if shard.expert else cp, *shard.replicas):
                    all_reduce(grad, axis, "test")
                box = tuple(slice(o, o + n) for o, n in zip(shard.offsets, grad.shape, strict=True))
                error = max(error, float((grad - grads[name][box]).norm() / grads[name].norm()))
            errors[f"{kind} {parallel}"] = error
    return errors


def test_models_that_are_cut_in_other_ways_too() -> None:
    parallels = [
        {"cp": 2, "tp": 2},
        {"cp": 2, "tp": 2, "cp_method": "ulysses"},
        {"cp": 2, "tp": 2, "ep": 2},
        {"cp": 4, "ep": 2},
        {"cp": 4, "ep": 4, "cp_method": "ulysses"},
    ]
    for errors in run(_spread_errors, 4, parallels):
        assert max(errors.values()) <= 1e-9, errors


def _keys_sent(rank: int, size: int) -> dict[str, int]:
    """How often keys and values went to another rank in one step of a two-layer model."""
    mesh = ParallelMesh(ParallelConfig(cp=size), world_size=size, rank=rank, device_type="cpu")
    calls = {}
    for mode in ("none", "selective", "full"):
        model = _model(MODELS["llama"])
        shard_sequence(model, mesh, "ring")
        _change(model, mode)
        with mock.patch.object(ring, "_unpack", wraps=ring._unpack) as visits:
            _step(model, context_part(_batch(documents=False), mesh["cp"], "ring"))
        calls[mode] = visits.call_count
    return calls


def test_selective_recompute_keeps_the_ring() -> None:
    """Of two layers on two ranks: keys are unpacked at each of two steps forward, and backward with their gradients."""
    forward, backward = 2 * 2, 2 * (2 + 2 + 1)
    once = forward + backward
    assert run(_keys_sent, 2) == [{"none": once, "selective": once, "full": once + forward}] * 2


def test_one_rank_is_the_plain_model() -> None:
    mesh = ParallelMesh(ParallelConfig(), world_size=1, rank=0, device_type="cpu")
    model = _model(MODELS["llama"])
    shard_sequence(model, mesh, "ring")
    assert model.blocks["0"].attention.core is reference_attention
    batch = _batch(documents=False)
    assert context_part(batch, mesh["cp"], "ring") is batch
