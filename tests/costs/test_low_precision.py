"""What fp8 products keep for the backward pass, counted on a built block."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distributed import run
from paceline.config.load import resolve
from paceline.config.run import RunConfig
from paceline.costs.activations import block_activations
from paceline.costs.low_precision import MULTIPLE, KeptBytes, fp8_kept, linears_in_fp8
from paceline.kernels import fp8_cast
from paceline.models.transformer import Transformer
from paceline.parallel.low_precision import Fp8Options, Fp8Weights, use_fp8
from paceline.parallel.mesh import ParallelMesh
from paceline.parallel.tensor import shard_tensors

TOKENS = 128
SHAPE = {
    "num_layers": 2,
    "hidden_size": 256,
    "num_heads": 8,
    "num_kv_heads": 8,
    "ffn_size": 1024,
    "norm": "layernorm",
    "vocab_size": 64,
}
LATENT = {
    "attention": "mla",
    "num_kv_heads": 0,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}


def config_of(model: dict[str, Any], *sets: str) -> RunConfig:
    tables = {"model": SHAPE | model, "train": {"seq_len": TOKENS, "precision": "fp8"}}
    return resolve(tables, sets).config


def saved_bytes(config: RunConfig, mesh: ParallelMesh | None = None) -> int:
    """Of the first block's tensors for backward; weights, in bf16 and in fp8, and rotary tables left out."""
    built, weights = Transformer(config.model, dtype=torch.bfloat16), Fp8Weights()
    built.init_weights(seed=0)
    axis = None if mesh is None else mesh["tp"]
    if mesh is not None:
        shard_tensors(built, mesh)
    if config.train.precision == "fp8":
        use_fp8(built, Fp8Options.of(config.train), weights, cached=True, axis=axis)
    block = built.blocks["0"]
    cos_sin = built.rope(torch.arange(TOKENS)[None]) if built.rope is not None else None
    x = torch.randn(1, TOKENS // config.parallel.tp, config.model.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    with torch.no_grad():
        block(x, cos_sin, None)  # casts the weights
    copies = [tensor for each in weights._members.get(block, []) for operand in each.cached or () for tensor in operand]
    ours = {each.untyped_storage().data_ptr() for each in (*built.parameters(), *(cos_sin or ()), *copies)}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ours:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output, _ = block(x, cos_sin, None)
    assert output is not None
    return sum(kept.values())


@pytest.mark.parametrize(
    ("model", "sets"),
    [
        pytest.param({}, (), id="gated"),
        pytest.param({"activation": "gelu", "mlp_bias": True}, (), id="plain"),
        pytest.param({"position": "learned", "max_seq_len": TOKENS}, (), id="learned"),
        pytest.param({}, ("train.fp8_scaling=rowwise",), id="rowwise"),
        pytest.param({}, ('train.fp8_skip_linears=["k_proj", "down_proj"]',), id="some in bf16"),
        pytest.param({}, ("train.fp8_skip_layers=[0]",), id="all in bf16"),
        pytest.param({"ffn_size": 1000}, (), id="down does not fit"),
        # which a CPU computes without a kernel that keeps its output
        pytest.param(LATENT, ("train.attention_kernel=reference",), id="latent"),
    ],
)
def test_what_a_block_keeps_is_what_is_counted(model: dict[str, Any], sets: tuple[str, ...]) -> None:
    """The change from bf16, to the byte but for scales of tensors, 4 bytes each; all of it within 1 %."""
    fp8, bf16 = config_of(model, *sets), config_of(model, *sets, "train.precision=bf16")
    if "rowwise" in str(sets) and torch.__version__ < "2.13":
        pytest.skip("no rowwise products on a CPU")
    found, before = saved_bytes(fp8), saved_bytes(bf16)
    block = fp8.model.blocks()[0]
    more = fp8_kept(fp8, block)
    assert found - before == pytest.approx(TOKENS * (more.cut + more.gathered), abs=64)
    if model is not LATENT:
        assert found == pytest.approx(TOKENS * block_activations(fp8.model, block, fp8), rel=0.01)


def test_which() -> None:
    config = config_of({}, "train.fp8_skip_layers=[-1]", 'train.fp8_skip_linears=["o_proj"]')
    first, last = config.model.blocks()
    assert linears_in_fp8(config, first) == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"}
    assert not linears_in_fp8(config, last) and fp8_kept(config, last) == KeptBytes()
    experts = config_of({"num_experts": 4, "top_k": 2, "moe": {"ffn_size": 64}})
    assert linears_in_fp8(experts, experts.model.blocks()[0]) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    deeper = config_of({"mtp_layers": 1})
    assert not linears_in_fp8(deeper, deeper.model.mtp_blocks()[0])
    assert MULTIPLE == fp8_cast.MULTIPLE


def test_a_rank_s_sizes_decide() -> None:
    """32 heads of 8: with tp 32 a rank's output has 8 channels to sum over."""
    model = {"num_heads": 32, "num_kv_heads": 32, "head_dim": 8}
    tables = {"model": SHAPE | model, "train": {"seq_len": TOKENS, "precision": "fp8"}, "parallel": {"tp": 32}}
    config = RunConfig.model_validate(tables)
    found = linears_in_fp8(config, config.model.blocks()[0])
    assert found == {"gate_proj", "up_proj", "down_proj"}


def _saved_over_tp(rank: int, world_size: int, precision: str) -> int:
    config = config_of({}, f"train.precision={precision}", "parallel.tp=2")
    mesh = ParallelMesh(config.parallel, world_size=world_size, rank=rank, device_type="cpu")
    return saved_bytes(config, mesh)


def test_a_rank_of_tp_keeps_its_part() -> None:
    """Also of what products gather: its own tokens, in fp8."""
    more = fp8_kept(config_of({}, "parallel.tp=2"), config_of({}).model.blocks()[0])
    for fp8, bf16 in zip(run(_saved_over_tp, 2, "fp8"), run(_saved_over_tp, 2, "bf16"), strict=True):
        assert fp8 - bf16 == pytest.approx(TOKENS * more.cut / 2 + TOKENS * more.gathered, abs=64)
