"""Adapters around fp8 products: one operation where that can be, and the same numbers as products of their own.

Under layouts: tests/parity/test_lora.py and tests/parity/test_lora_fp8.py.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.config.lora import LoraConfig
from paceline.config.model import ModelConfig
from paceline.config.parallel import ParallelConfig
from paceline.models.lora import adapters_off, attach_adapters
from paceline.models.transformer import Transformer
from paceline.parallel.adapters import join_adapters
from paceline.parallel.collectives import Axis
from paceline.parallel.compile import compile_blocks
from paceline.parallel.delayed_scales import DelayedScales
from paceline.parallel.low_precision import Fp8Options, Fp8Weights, use_fp8
from paceline.parallel.mesh import ParallelMesh
from paceline.parallel.recompute import recompute
from tests.parallel.tiny import batches, loss_of, plain, tiny_config

LORA = LoraConfig(rank=4, alpha=6)
ALONE = Axis.alone("tp", 0)
MESH = ParallelMesh(ParallelConfig(), world_size=1, rank=0, device_type="cpu")
WIDE: dict[str, Any] = {"hidden_size": 32, "num_kv_heads": 1, "ffn_size": 48, "num_layers": 3}
LATENT = {
    "attention": "mla",
    "num_kv_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": WIDE,
    "biases": WIDE | {"qkv_bias": True, "mlp_bias": True, "attention_out_bias": True, "activation": "gelu"},
    "latent": WIDE | LATENT,
}


def adapted(
    config: ModelConfig,
    lora: LoraConfig = LORA,
    options: Fp8Options | None = None,
    *,
    in_one: bool = True,
    scales: DelayedScales | None = None,
) -> Transformer:
    """A model in fp8 with adapters that say something, in fp32, so that what is rounded otherwise is small."""
    model = plain(config)
    attach_adapters(model, lora)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    products = use_fp8(model, options or Fp8Options(), Fp8Weights(), cached=True, scales=scales)
    if scales is not None:
        scales.settle(torch.device("cpu"), MESH["stage"])
    join_adapters(model, ALONE, products if in_one else ())
    return model


def step(model: Transformer, number: int = 0) -> list[Tensor]:
    """The loss, and the gradients of all that learns."""
    tokens, labels = batches(number, length=8)
    loss = loss_of(model(tokens, labels), (labels != -100).sum(), len(tokens))
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [loss.detach(), *torch.autograd.grad(loss, learned)]


def assert_near(found: list[Tensor], expected: list[Tensor]) -> None:
    """To numbers that fp8 rounds to a neighbour because they were some places of fp32 away."""
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).norm()) <= 1e-2 * float(other.norm()) + 1e-6


class Operations(TorchDispatchMode):
    """Counts ours."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        if "lora" in name or "scaled" in name or "gated" in name:
            self.count[name] += 1
        return func(*args, **(kwargs or {}))


def counted(model: Transformer) -> Counter[str]:
    with Operations() as operations:
        step(model)
    return operations.count


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_equals_products_of_their_own(kind: str, scaling: Any) -> None:
    config, options = tiny_config(**MODELS[kind]), Fp8Options(scaling=scaling)
    model, apart = adapted(config, options=options), adapted(config, options=options, in_one=False)
    assert_near(step(model), step(apart))
    groups = 6 if kind == "latent" else 4
    assert counted(model) == {"lora_fp8_forward": 3 * groups, "lora_fp8_backward": 3 * groups}
    assert "lora_fp8_forward" not in counted(apart)


@pytest.mark.parametrize("skipped", [(), ("k_proj", "gate_proj"), ("q_proj", "k_proj", "v_proj", "down_proj")])
@pytest.mark.parametrize("targets", [("q_proj", "up_proj"), ("k_proj", "v_proj", "gate_proj", "down_proj")])
def test_some_linears_in_fp8_and_some_with_adapters(skipped: tuple[Any, ...], targets: Any) -> None:
    config, options = tiny_config(**WIDE), Fp8Options(skip_linears=skipped)
    lora = LORA.model_copy(update={"targets": targets})
    found, expected = (adapted(config, lora, options, in_one=in_one) for in_one in (True, False))
    assert_near(step(found), step(expected))


@pytest.mark.parametrize("more", [{"dropout": 0.3}, {"dora": True}], ids=["dropout", "dora"])
def test_what_is_more_than_a_pair_stays_beside(more: dict[str, Any]) -> None:
    config, lora = tiny_config(**WIDE), LORA.model_copy(update=more)
    found = []
    for in_one in (True, False):
        torch.manual_seed(3)
        found.append(step(adapted(config, lora, in_one=in_one)))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert "lora_fp8_forward" not in counted(adapted(config, lora))


def test_without_its_adapters_it_is_the_base() -> None:
    config = tiny_config(**WIDE)
    model, base = adapted(config), plain(config)
    use_fp8(base, Fp8Options(), Fp8Weights(), cached=True)
    tokens, _ = batches(0, length=8)
    with adapters_off(model):
        off = model(tokens).logits
    assert torch.equal(off, base(tokens).logits) and not torch.equal(model(tokens).logits, off)
    with torch.no_grad():
        evaluated = model(tokens).logits
    torch.testing.assert_close(evaluated, model(tokens).logits)


@pytest.mark.parametrize("targets", [("q_proj",), ("up_proj",), ("gate_proj", "up_proj", "down_proj"), ("down_proj",)])
@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
def test_with_one_kernel_for_casts_a_gated_mlp_is_one_operation(targets: Any, activation: Any) -> None:
    """Whichever of its linears have pairs, and if none has; but where nothing before its last one learns."""
    config, options = tiny_config(**WIDE, activation=activation), Fp8Options(kernel="triton")
    lora = LORA.model_copy(update={"targets": targets})
    model, apart = adapted(config, lora, options), adapted(config, lora, options, in_one=False)
    assert_near(step(model), step(apart))
    count = counted(model)
    # the first layer's input needs no gradient, nor does its attention's output where that has no pairs
    learns = 3 if targets != ("down_proj",) else 2
    assert count["gated_forward"] == count["gated_backward"] == learns
    assert count["lora_fp8_input_backward"] == (learns if "down_proj" in targets else 0)


@pytest.mark.parametrize("more", [{"dropout": 0.3}, {"dora": True}], ids=["dropout", "dora"])
def test_with_more_than_pairs_a_gated_mlp_is_two_layers(more: dict[str, Any]) -> None:
    lora = LORA.model_copy(update=more)
    count = counted(adapted(tiny_config(**WIDE), lora, Fp8Options(kernel="triton")))
    assert not any("gated" in name for name in count)


def test_a_gated_mlp_in_one_without_its_adapters_is_the_base() -> None:
    """Also with gradients, which only the adapters of another model then want."""
    model, base = (adapted(tiny_config(**WIDE), options=Fp8Options(kernel="triton")) for _ in range(2))
    for name, parameter in base.named_parameters():
        if ".lora_b" in name:
            parameter.data.zero_()
    tokens, _ = batches(0, length=8)
    with adapters_off(model):
        found = model(tokens).logits
    torch.testing.assert_close(found, base(tokens).logits, rtol=1e-2, atol=1e-3)
    assert not torch.allclose(found, model(tokens).logits, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("kernel", ["torch", "triton"])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_changes_nothing(mode: Any, kernel: Any) -> None:
    """And ``selective`` computes no product again."""
    config, options = tiny_config(**WIDE), Fp8Options(kernel=kernel)
    expected, model = step(adapted(config, options=options)), adapted(config, options=options)
    recompute(list(model.blocks.values()), mode)
    assert all(torch.equal(one, other) for one, other in zip(step(model), expected, strict=True))
    assert counted(model)["lora_fp8_forward"] == (12 if mode == "selective" else 24)


@pytest.mark.parametrize(
    ("backend", "mode", "history"),
    [
        ("aot_eager", "none", 2),
        ("aot_eager", "selective", 0),
        pytest.param("inductor", "none", 0, marks=pytest.mark.slow),
        pytest.param("inductor", "selective", 2, marks=pytest.mark.slow),
    ],
)
def test_one_graph_serves_all_layers_and_steps(backend: str, mode: Any, history: int) -> None:
    """But the first layer, whose input needs no gradient. ``history``: 0 for scales of tensors."""
    torch._dynamo.reset()
    graphs: list[Any] = []
    traced = torch._dynamo.lookup_backend(backend)

    def noted(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return traced(graph, inputs)

    config, options = tiny_config(**WIDE), Fp8Options(history=history, kernel="triton")
    found = []
    for compiled in (True, False):
        scales = DelayedScales(history) if history else None
        model = adapted(config, options=options, scales=scales)
        recompute(list(model.blocks.values()), mode)
        if compiled:
            compile_blocks(list(model.blocks.values()), backend=noted)  # type: ignore[arg-type]
        results = []
        for number in range(2):
            results += step(model, number)
            if scales is not None:
                scales.advance(torch.tensor(True))
        found.append(results)
    assert len(graphs) == 2
    for one, other in zip(*found, strict=True):
        if backend == "aot_eager":
            assert torch.equal(one, other)
        else:  # rounds less on the way, so that fp8 rounds other numbers
            assert float((one - other).norm() / other.norm()) < 0.1


def test_scales_of_earlier_steps_are_of_frozen_linears_too() -> None:
    """Inputs of all, and gradients of all but the first layer's first ones, which nobody needs."""
    config, options = tiny_config(**WIDE), Fp8Options(history=2)
    histories, results = [], []
    for in_one in (True, False):
        scales = DelayedScales(2)
        model = adapted(config, options=options, in_one=in_one, scales=scales)
        found = []
        for number in range(3):
            found += step(model, number)
            scales.advance(torch.tensor(True))
        results.append(found)
        histories.append({name: value.pieces[0].tensor for name, value in scales.values().items()})
    assert_near(*results)
    ours, theirs = histories
    assert ours.keys() == theirs.keys() and len(ours) == 12
    for name, history in ours.items():
        torch.testing.assert_close(history, theirs[name], rtol=0.05, atol=0)
        known = history > 0
        assert known[0].all() and known[1].all() != (name == "blocks.0.attention.q_proj+k_proj+v_proj"), name
