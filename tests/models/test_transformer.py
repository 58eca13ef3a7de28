"""The decoder as a whole: losses, documents, ties, multi-token prediction, recompute, compile, precision."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from paceline.config.model import ModelConfig
from paceline.config.presets import preset
from paceline.config.train import TrainConfig
from paceline.kernels.attention import AttentionKernel, RowDocuments, attention_core
from paceline.kernels.cross_entropy import IGNORE_INDEX, PlainHeadLoss
from paceline.models.attention import GroupedQueryAttention
from paceline.models.precision import fp32_parameters, model_dtype
from paceline.models.transformer import ModelOutput, Transformer

TINY = ["tiny_gpt", "tiny_llama", "tiny_moe", "tiny_switch", "tiny_deepseek"]


def build(name: str = "tiny_llama", **fields: Any) -> Transformer:
    model = Transformer(ModelConfig(**preset(name) | {"num_layers": 2, "vocab_size": 97, **fields}))
    model.init_weights(0)
    return model


def rows(sequences: int = 2, tokens: int = 24) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 97, (sequences, tokens + 1), generator=torch.Generator().manual_seed(2))
    return ids[:, :-1], ids[:, 1:].contiguous()


def total(output: ModelOutput) -> Tensor:
    assert output.loss_sum is not None and output.num_tokens is not None
    aux = 0.0 if output.aux_loss is None else output.aux_loss
    return output.loss_sum / 48 + aux / 2


@pytest.mark.parametrize("name", TINY)
def test_learns(name: str) -> None:
    """Two rows are learnt by heart; every parameter has a gradient on the first step."""
    torch.manual_seed(0)
    model, (tokens, labels) = build(name), rows()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(25):
        loss = total(model(tokens, labels))
        loss.backward()
        if step == 0:
            assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("name", TINY)
def test_loss_is_that_of_the_logits(name: str) -> None:
    model, (tokens, labels) = build(name, mtp_layers=0).eval(), rows()
    labels[0, :5] = IGNORE_INDEX
    output, logits = model(tokens, labels), model(tokens).logits
    assert logits is not None and output.logits is None
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(output.loss_sum, expected)
    torch.testing.assert_close(output.stats["loss_sum_main"], expected)
    assert int(output.num_tokens) == 43


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_deepseek"])
@pytest.mark.parametrize("kernel", ["reference", "sdpa", "auto"])
def test_packed_documents_do_not_see_each_other(name: str, kernel: AttentionKernel) -> None:
    """Case 63: changing A moves no logit of B; B in the pack equals B alone, with reset positions."""
    model = build(name).eval()
    model.set_attention_core(attention_core(kernel))
    tokens, _ = rows()
    documents = torch.tensor([[0] * 9 + [1] * 15] * 2, dtype=torch.int32)
    positions = torch.cat((torch.arange(9), torch.arange(15))).expand(2, -1)
    with torch.no_grad():
        packed = model(tokens, positions=positions, documents=documents).logits
        changed_tokens = tokens.clone()
        changed_tokens[:, :9] = (changed_tokens[:, :9] + 1) % 97
        changed = model(changed_tokens, positions=positions, documents=documents).logits
        alone = model(tokens[:, 9:]).logits
        leaking = model(changed_tokens, positions=positions).logits
        whole = model(tokens, positions=positions).logits
    assert packed is not None and changed is not None and alone is not None
    assert leaking is not None and whole is not None
    assert (changed[:, 9:] - packed[:, 9:]).abs().max() < 1e-6
    assert (alone - packed[:, 9:]).abs().max() < 1e-6
    assert (leaking[:, 9:] - whole[:, 9:]).abs().max() > 1e-4  # positions alone isolate nothing


def test_causality() -> None:
    model, (tokens, _) = build().eval(), rows()
    later = tokens.clone()
    later[:, 12:] = (later[:, 12:] + 1) % 97
    with torch.no_grad():
        before, after = model(tokens).logits, model(later).logits
    assert before is not None and after is not None
    assert (before[:, :12] - after[:, :12]).abs().max() < 1e-6
    assert (before[:, 12:] - after[:, 12:]).abs().max() > 1e-4


def test_window_layers_follow_the_period() -> None:
    model = build(sliding_window=8, sliding_window_period=2)
    windows = [block.attention.window for block in model.blocks.values()]  # type: ignore[union-attr]
    assert windows == [8, 0]


def test_tied_head_has_no_weight_of_its_own_and_both_uses_reach_the_gradient() -> None:
    model, (tokens, labels) = build(tie_embeddings=True), rows()
    assert "head.weight" not in model.state_dict()
    meta = Transformer(model.config, device="meta")
    meta.to_empty(device="cpu")
    meta.load_state_dict(model.state_dict())
    for each in (model, meta):
        total(each(tokens, labels)).backward()
    assert meta.embed.weight.grad is not None and model.embed.weight.grad is not None
    assert torch.equal(meta.embed.weight.grad, model.embed.weight.grad)
    assert model.embed.weight.grad[96 - tokens.unique().numel() :].any()


def test_multi_token_prediction_predicts_one_further() -> None:
    """By hand from the modules; the last position and document boundaries have no such label."""
    model, (tokens, labels) = build("tiny_llama", mtp_layers=2), rows()
    documents = torch.tensor([[0] * 9 + [1] * 15] * 2)
    output = model(tokens, labels, documents=documents)
    states: list[Tensor] = []
    model.norm.register_forward_hook(lambda module, inputs, result: states.append(result))
    model(tokens, labels, documents=documents)
    positions = torch.arange(24)[None]
    assert model.rope is not None
    expected, hidden = torch.zeros(()), states[0]
    for depth in (1, 2):
        ahead = torch.cat((tokens[:, depth:], torch.zeros(2, depth, dtype=torch.int64)), 1)
        seen = RowDocuments(documents)
        hidden, _ = model.mtp[str(depth)](hidden, model.embed(ahead, positions), model.rope(positions), seen)
        assert model.head.weight is not None
        logits = hidden @ model.head.weight.T
        for b in range(2):
            for t in range(24 - depth):
                if documents[b, t] == documents[b, t + depth]:
                    expected = expected + F.cross_entropy(logits[b, t], labels[b, t + depth]) / 2
    torch.testing.assert_close(output.stats["loss_sum_mtp"], expected.detach(), rtol=1e-5, atol=1e-4)
    assert output.loss_sum is not None
    torch.testing.assert_close(
        output.loss_sum.detach(), output.stats["loss_sum_main"] + 0.3 * output.stats["loss_sum_mtp"]
    )


def test_stats_of_expert_layers() -> None:
    model, (tokens, labels) = build("tiny_deepseek"), rows()
    stats = model(tokens, labels).stats
    assert stats["moe/load"].shape == (2, 8) and stats["moe/dropped"].tolist() == [0, 0]  # one layer, one of MTP
    assert stats["moe/load"].sum(1).tolist() == [96, 96]
    assert not any(value.requires_grad for value in stats.values())
    model.update_expert_bias(stats["moe/load"])
    biases = [layer.router.expert_bias for layer in model.moe_layers()]
    assert all(bias is not None and bias.any() for bias in biases)


@pytest.mark.parametrize("name", TINY)
def test_recomputed_blocks_give_the_same_loss_and_gradients(name: str) -> None:
    """Dropout and jitter are drawn again as they were; extras come back through the checkpoint."""
    tokens, labels = rows()
    gradients = []
    for recompute in (False, True):
        model = build(name, dropout=0.2, attention_dropout=0.1)
        if recompute:
            for block in model.blocks.values():
                plain = block.forward
                block.forward = partial(checkpoint, plain, use_reentrant=False)
        torch.manual_seed(5)
        loss = total(model(tokens, labels))
        loss.backward()
        gradients.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-7, rtol=1e-5)


def test_dropout_only_while_training() -> None:
    model, (tokens, labels) = build(dropout=0.3), rows()
    assert not torch.equal(total(model(tokens, labels)), total(model(tokens, labels)))
    model.eval()
    assert torch.equal(total(model(tokens, labels)), total(model(tokens, labels)))


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_deepseek"])
def test_dense_blocks_trace_into_one_graph(name: str) -> None:
    """No graph break, with and without documents; aot_eager, so that no kernel is built."""
    torch._dynamo.reset()
    model, (tokens, labels) = build(name, num_experts=0, top_k=0, moe={}), rows()
    documents = torch.tensor([[0] * 9 + [1] * 15] * 2)
    expected = [float(total(model(tokens, labels, documents=each))) for each in (None, documents)]
    for block in model.blocks.values():
        block.compile(fullgraph=True, backend="aot_eager")
    got = [float(total(model(tokens, labels, documents=each))) for each in (None, documents)]
    assert got == pytest.approx(expected, rel=1e-5)
    total(model(tokens, labels)).backward()


@pytest.mark.parametrize("name", TINY)
def test_bf16_model_is_near_fp32(name: str) -> None:
    tokens, labels = rows()
    model = build(name)
    low = Transformer(model.config, dtype=torch.bfloat16)
    low.load_state_dict(model.state_dict())
    model.eval()
    low.eval()
    exact, rounded = model(tokens, labels), low(tokens, labels)
    assert rounded.loss_sum is not None and rounded.loss_sum.dtype == torch.float32
    torch.testing.assert_close(rounded.loss_sum, exact.loss_sum, rtol=1e-2, atol=0)
    total(rounded).backward()
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in low.parameters())


def test_precision_of_a_recipe() -> None:
    assert model_dtype(TrainConfig(precision="fp32")) == torch.float32
    assert model_dtype(TrainConfig(precision="bf16")) == model_dtype(TrainConfig(precision="fp8")) == torch.bfloat16
    routers = fp32_parameters(build("tiny_moe"))
    assert routers == {f"blocks.{layer}.feed_forward.router.weight" for layer in (0, 1)}
    assert not fp32_parameters(build("tiny_moe", moe={"ffn_size": 8, "router_precision": "model"}))


def test_seams_take_other_objects() -> None:
    calls = []
    reference = attention_core("reference")

    def core(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(kwargs["scale"])
        return reference(*args, **kwargs)

    tokens, labels = rows()
    config = ModelConfig(**preset("tiny_llama") | {"num_layers": 2, "vocab_size": 97})
    model = Transformer(config, core=core, head_loss=PlainHeadLoss())
    model.init_weights(0)
    torch.testing.assert_close(model(tokens, labels).loss_sum, build()(tokens, labels).loss_sum)
    assert calls == [32**-0.5] * 2
    assert all(m.core is core for m in model.modules() if isinstance(m, GroupedQueryAttention))


def test_casting_the_whole_model_keeps_rotary_angles_exact() -> None:
    cast, (tokens, labels) = build().bfloat16(), rows()
    low = Transformer(cast.config, dtype=torch.bfloat16)
    low.load_state_dict(cast.state_dict())
    assert torch.equal(total(cast(tokens, labels)), total(low(tokens, labels)))


@pytest.mark.parametrize("name", ["tiny_gpt", "tiny_llama", "tiny_deepseek"])
def test_parts_in_a_row_are_the_model(name: str) -> None:
    config = ModelConfig(**preset(name) | {"num_layers": 4, "dropout": 0.0})
    model = Transformer(config)
    model.init_weights(1)
    tokens, labels = (torch.randint(config.vocab_size, (2, 9)) for _ in "ab")
    parts = [
        model.part(range(0, 1), first=True, last=False),
        model.part(range(1, 3), first=False, last=False),
        model.part(range(3, 4), first=False, last=True),
    ]
    whole = model(tokens, labels)
    hidden, aux_loss = None, 0.0
    for part in parts:
        output = part(tokens, labels, hidden=hidden)
        hidden = output.hidden
        aux_loss += 0.0 if output.aux_loss is None else float(output.aux_loss)
    assert torch.equal(output.loss_sum, whole.loss_sum)
    assert aux_loss == pytest.approx(0.0 if whole.aux_loss is None else float(whole.aux_loss))
    names = [name for part in parts for name, _ in part.named_parameters()]
    assert set(names) == {name for name, _ in model.named_parameters()}
    twice = {name for name in names if names.count(name) > 1}
    # tied, or read by multi-token prediction
    assert {name.partition(".")[0] for name in twice} == ({"embed"} if model.needs_embedding_last else set())
    hooked = parts[0].register_forward_pre_hook(lambda *_: None)
    assert not model._forward_pre_hooks and not parts[1]._forward_pre_hooks
    hooked.remove()
