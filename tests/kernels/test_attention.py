"""Every attention core against a plain softmax written here; masks; nothing leaks between documents (case 63)."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from paceline.kernels import attention
from paceline.kernels.attention import (
    AttentionKernel,
    AttentionMask,
    attention_core,
    block_mask,
    sdpa_order,
    why_not_flex,
)

CORES: tuple[AttentionKernel, ...] = ("reference", "sdpa", "auto", "flash4")
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7 + [2] * 4, [0] * 16])
MASKS = {
    "causal": AttentionMask(),
    "full": AttentionMask(causal=False),
    "window": AttentionMask(window=5),
    "documents": AttentionMask(documents=DOCUMENTS),
    "documents and window": AttentionMask(window=3, documents=DOCUMENTS),
}


def qkv(heads: int = 4, kv_heads: int = 2, tokens: int = 16, keys: int = 16, value_dim: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(heads + kv_heads + tokens)
    shapes = (2, tokens, heads, 8), (2, keys, kv_heads, 8), (2, keys, kv_heads, value_dim)
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


def plain(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, softcap: float = 0.0) -> Tensor:
    """One head, one query at a time."""
    out = torch.zeros(*q.shape[:3], v.shape[-1])
    offset = k.shape[1] - q.shape[1]
    for b, t, h in itertools.product(*(range(size) for size in q.shape[:3])):
        row, group = t + offset, h // (q.shape[2] // k.shape[2])
        seen = [
            s
            for s in range(k.shape[1])
            if (not mask.causal or s <= row)
            and (not mask.window or row - s < mask.window)
            and (mask.documents is None or mask.documents[b, s] == mask.documents[b, row])
        ]
        scores = k[b, seen, group] @ q[b, t, h] * scale
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        out[b, t, h] = scores.softmax(0) @ v[b, seen, group]
    return out


@pytest.mark.parametrize("kernel", CORES)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_output_and_gradients(kernel: AttentionKernel, mask: AttentionMask, kv_heads: int) -> None:
    inputs = qkv(kv_heads=kv_heads)
    out = attention_core(kernel)(*inputs, mask, scale=0.3)
    expected = plain(*inputs, mask, 0.3)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)
    weight = torch.randn_like(out)
    got = torch.autograd.grad((out * weight).sum(), inputs)
    wanted = torch.autograd.grad((expected * weight).sum(), inputs)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kernel", CORES)
def test_fewer_queries_than_keys_are_the_last_ones(kernel: AttentionKernel) -> None:
    for tokens, mask in itertools.product((1, 3), (AttentionMask(), AttentionMask(window=4), MASKS["documents"])):
        inputs = qkv(tokens=tokens)
        out = attention_core(kernel)(*inputs, mask, scale=0.3)
        torch.testing.assert_close(out, plain(*inputs, mask, 0.3), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kernel", CORES)
def test_softcap_and_wider_values(kernel: AttentionKernel) -> None:
    inputs = qkv(value_dim=12)
    for softcap in (0.0, 1.5):
        out = attention_core(kernel)(*inputs, AttentionMask(), scale=0.5, softcap=softcap)
        torch.testing.assert_close(out, plain(*inputs, AttentionMask(), 0.5, softcap), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kernel", CORES)
def test_dropout_keeps_the_mean(kernel: AttentionKernel) -> None:
    q, k, v = (x.detach() for x in qkv())
    torch.manual_seed(0)
    outs = [attention_core(kernel)(q, k, v, AttentionMask(), scale=0.3, dropout=0.5) for _ in range(400)]
    assert not torch.equal(outs[0], outs[1])
    expected = attention_core(kernel)(q, k, v, AttentionMask(), scale=0.3)
    torch.testing.assert_close(torch.stack(outs).mean(0), expected, atol=0.35, rtol=0)


@pytest.mark.parametrize("kernel", CORES)
def test_documents_do_not_see_each_other(kernel: AttentionKernel) -> None:
    """Changing A leaves B as it was, and B in the pack equals B alone."""
    core, mask = attention_core(kernel), AttentionMask(documents=torch.tensor([[3] * 6 + [9] * 10] * 2))
    q, k, v = (x.detach() for x in qkv())
    packed = core(q, k, v, mask, scale=0.3)[:, 6:]
    changed = [x.clone() for x in (q, k, v)]
    for x in changed:
        x[:, :6] += 7.0
    assert (core(*changed, mask, scale=0.3)[:, 6:] - packed).abs().max() < 1e-6
    alone = core(q[:, 6:], k[:, 6:], v[:, 6:], AttentionMask(), scale=0.3)
    assert (alone - packed).abs().max() < 1e-6


@pytest.mark.parametrize("window", [0, 3, 4, 9])
@pytest.mark.parametrize("causal", [True, False])
def test_block_mask_covers_exactly_what_is_allowed(window: int, causal: bool) -> None:
    """Blocks left out hold nothing allowed; blocks called whole hold nothing forbidden."""
    for documents in (None, DOCUMENTS):
        mask = AttentionMask(causal=causal, window=window if causal else 0, documents=documents)
        partial, full = block_mask(mask, 16, torch.device("cpu"), block=4)
        allowed = mask.allowed(16, 16, torch.device("cpu"))
        if allowed is None:
            allowed = torch.ones(1, 1, 16, 16, dtype=torch.bool)
        blocks = allowed[:, 0].unflatten(2, (4, 4)).unflatten(1, (4, 4)).transpose(2, 3).flatten(3)
        assert not (blocks.any(-1) & ~(partial | full)).any()
        assert not (full & ~blocks.all(-1)).any()
        assert not (partial & full).any()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_masks_and_softcap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward only, and not compiled: that is all a CPU can do."""
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(attention, "_compiled_flex", lambda: flex_attention)
    q, k, v = (x.detach() for x in qkv(tokens=256, keys=256))
    documents = (torch.arange(256) // 100).expand(2, -1)
    for mask, softcap in ((AttentionMask(documents=documents), 0.0), (AttentionMask(window=60), 2.0)):
        out = attention.flex_attention_core(q, k, v, mask, scale=0.3, softcap=softcap)
        expected = attention.reference_attention(q, k, v, mask, scale=0.3, softcap=softcap)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_block_lists_name_the_blocks() -> None:
    blocks = torch.tensor([[[True, False, False], [False, True, True], [True, False, True]]])
    counts, indices = attention._block_lists(blocks)
    assert counts.tolist() == [[[1, 2, 2]]]
    assert [row[:count] for row, count in zip(indices[0, 0].tolist(), counts[0, 0].tolist(), strict=True)] == [
        [0],
        [1, 2],
        [0, 2],
    ]


@pytest.mark.parametrize("major", [8, 9])
def test_choice_of_kernels_can_be_traced(monkeypatch: pytest.MonkeyPatch, major: int) -> None:
    """What the CUDA branch does around the call must not break a graph."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))

    def call(q: Tensor) -> Tensor:
        with sdpa_kernel(attention.sdpa_order(attention._major()), set_priority=True):
            return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    q = torch.randn(1, 2, 8, 8)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q), F.scaled_dot_product_attention(q, q, q, is_causal=True))


def test_reasons_against_flex() -> None:
    assert "this device" in why_not_flex(*qkv(), 0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["causal", "window", "documents"])
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("softcap", [0.0, 20.0])
def test_gpu_cores_equal_the_reference(mask: str, kv_heads: int, softcap: float) -> None:
    """bf16 against fp32: errors of a few 1e-3 for outputs of order 1."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(2, 512, heads, 64, device="cuda", generator=generator).requires_grad_()
        for heads in (8, kv_heads, kv_heads)
    )
    documents = torch.arange(512, device="cuda").expand(2, -1) // 150
    masks = {
        "causal": AttentionMask(),
        "window": AttentionMask(window=100),
        "documents": AttentionMask(documents=documents.to(torch.int32)),
    }
    expected = attention_core("reference")(q, k, v, masks[mask], scale=0.125, softcap=softcap)
    weight = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    for kernel in CORES[1:]:
        low = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
        out = attention_core(kernel)(*low, masks[mask], scale=0.125, softcap=softcap)
        torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
        for got, want in zip(torch.autograd.grad((out.float() * weight).sum(), low), wanted, strict=True):
            torch.testing.assert_close(got.float(), want, atol=6e-2, rtol=5e-2)


@pytest.mark.parametrize(("major", "first"), [(7, "FLASH"), (8, "FLASH"), (9, "CUDNN"), (10, "CUDNN"), (12, "CUDNN")])
def test_which_kernel_of_torch_comes_first(major: int, first: str) -> None:
    order = sdpa_order(major)
    assert order[0].name == f"{first}_ATTENTION" and order[-1].name == "MATH"
    assert len(set(order)) == len(order) == 4
