"""Logits and gradients equal Transformers' for tiny random models of each family, in fp32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from paceline.config.model import ModelConfig
from paceline.kernels.attention import attention_core
from paceline.models.rope import inverse_frequencies
from tests.models.hf_reference import FAMILIES, VOCAB, gradients_of


def tokens(length: int = 48) -> torch.Tensor:
    return torch.randint(2, VOCAB, (2, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients(name: str) -> None:
    """1e-5 for logits of order 1: the sums run in another order. Gradients relative to the largest of each tensor."""
    reference, model = FAMILIES[name].build()
    ids = tokens()
    expected = reference(input_ids=ids).logits
    logits = model(ids).logits
    assert logits is not None and expected.abs().mean() > 0.1
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)

    F.cross_entropy(expected[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").backward()
    output = model(ids[:, :-1], ids[:, 1:])
    assert output.loss_sum is not None
    output.loss_sum.backward()
    gradients = FAMILIES[name].rename(gradients_of(reference), model.config)
    for parameter_name, parameter in model.named_parameters():
        theirs = gradients[parameter_name]
        assert parameter.grad is not None
        # + 2e-6: the gradient of a key bias is zero, and only rounding is left of it
        atol = 2e-5 * float(theirs.abs().max()) + 2e-6
        torch.testing.assert_close(parameter.grad, theirs, atol=atol, rtol=1e-3)


@pytest.mark.parametrize("name", ["llama", "mistral", "deepseek_v3"])
def test_reference_attention_gives_the_same_logits(name: str) -> None:
    _, model = FAMILIES[name].build()
    with torch.no_grad():
        fused = model(tokens()).logits
        model.set_attention_core(attention_core("reference"))
        torch.testing.assert_close(model(tokens()).logits, fused, atol=1e-5, rtol=1e-5)


def test_llama3_scaling_up_to_position_8000() -> None:
    """A base or factor that is dropped shows only at long range."""
    scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    family = FAMILIES["llama"]
    long = type(family)(
        hf_class="Llama",
        hf=family.hf
        | {
            "max_position_embeddings": 131072,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 32.0,
                "original_max_position_embeddings": 8192,
                **scaling,
            },
        },
        ours=family.ours
        | {
            "max_seq_len": 131072,
            "rope_scaling": {"kind": "llama3", "factor": 32.0, "original_max_seq_len": 8192, **scaling},
        },
    )
    reference, model = long.build()
    torch.testing.assert_close(
        model.rope.inv_freq(torch.device("cpu")), reference.model.rotary_emb.inv_freq, atol=0, rtol=1e-6
    )
    with torch.no_grad():
        ids = tokens(8001)[:1]
        expected = reference(input_ids=ids).logits[0, [10, 1000, 8000]]
        logits = model(ids).logits
    assert logits is not None
    torch.testing.assert_close(logits[0, [10, 1000, 8000]], expected, atol=1e-4, rtol=1e-4)
    by_factor = [
        inverse_frequencies(ModelConfig(rope_scaling={"kind": "llama3", "factor": factor})) for factor in (8.0, 32.0)
    ]
    assert not torch.equal(*by_factor)


def test_every_epsilon_follows_the_config() -> None:
    for name in ("llama_eps", "qwen3", "deepseek_v3", "gpt2", "gemma2"):
        _, model = FAMILIES[name].build()
        found = {module.eps for module in model.modules() if hasattr(module, "eps")}
        assert found == {model.config.norm_eps}, name
