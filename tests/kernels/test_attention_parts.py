"""Parts of attention, merged, are attention: output and gradients, for every kernel that runs here."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from paceline.kernels.attention import AttentionMask, reference_attention
from paceline.kernels.attention_parts import (
    FusedPart,
    PartKernel,
    PartMask,
    ReferencePart,
    Scores,
    merge_parts,
    part_kernel,
)

TOKENS = 24
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 13 + [2] * 6, [3] * 9 + [1] * 15], dtype=torch.int32)
MASKS = {
    "causal": AttentionMask(),
    "full": AttentionMask(causal=False),
    "window": AttentionMask(window=5),
    "documents": AttentionMask(documents=DOCUMENTS),
    "documents and window": AttentionMask(window=7, documents=DOCUMENTS),
}


def qkv(
    heads: int,
    kv_heads: int,
    value_dim: int,
    dtype: torch.dtype,
    device: str = "cpu",
    dim: int = 8,
    tokens: int = TOKENS,
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(heads + kv_heads)
    shapes = (2, tokens, heads, dim), (2, tokens, kv_heads, dim), (2, tokens, kv_heads, value_dim)
    return [torch.randn(shape, generator=generator, dtype=dtype).to(device).requires_grad_() for shape in shapes]


def by_parts(
    kernel: PartKernel | None,
    inputs: list[Tensor],
    grad: Tensor,
    mask: AttentionMask,
    scores: Scores,
    cut: int,
    seed: int = 0,
) -> list[Tensor]:
    """Output and gradients, put together from blocks of ``cut`` queries and ``cut`` keys."""
    q, k, v = (x.detach() for x in inputs)
    device = q.device
    o = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.promote_types(q.dtype, torch.float32), device=device)
    lse = o.new_full((q.shape[0], q.shape[2], q.shape[1]), float("-inf"))
    places = torch.arange(q.shape[1], device=device)
    blocks = []
    for number, (i, j) in enumerate(itertools.product(range(0, len(places), cut), repeat=2)):
        if mask.is_plain and mask.causal and j > i:
            continue  # masked whole
        rows, keys = slice(i, i + cut), slice(j, j + cut)
        documents = None if mask.documents is None else mask.documents.to(device)
        on_diagonal = "causal" if mask.causal and i == j else "full"
        kind = on_diagonal if mask.is_plain else "masked"
        part_mask = PartMask(
            kind=kind,
            q_positions=places[rows],
            k_positions=places[keys],
            causal=mask.causal,
            window=mask.window,
            q_documents=None if documents is None else documents[:, rows],
            k_documents=None if documents is None else documents[:, keys],
        )
        blocks.append((rows, keys, part_mask, number))

    def generator(number: int) -> torch.Generator:
        return torch.Generator(device).manual_seed(seed + number)

    for rows, keys, part_mask, number in blocks:
        part = q[:, rows], k[:, keys], v[:, keys]
        used = kernel or part_kernel(*part, part_mask, scores)
        out = used.forward(*part, part_mask, scores, generator(number))
        assert all(bool(x.isfinite().all()) for x in out[:1])
        merge_parts(o[:, rows], lse[:, :, rows], *out)
    grads = [torch.zeros_like(x, dtype=o.dtype) for x in (q, k, v)]
    out_dtype = o.to(q.dtype)
    for rows, keys, part_mask, number in blocks:
        part = q[:, rows], k[:, keys], v[:, keys]
        used = kernel or part_kernel(*part, part_mask, scores)
        found = used.backward(
            grad[:, rows], *part, out_dtype[:, rows], lse[:, :, rows], part_mask, scores, generator(number)
        )
        for total, where, x in zip(grads, (rows, keys, keys), found, strict=True):
            total[:, where] += x
    return [o, *grads]


def whole(inputs: list[Tensor], grad: Tensor, mask: AttentionMask, scores: Scores) -> list[Tensor]:
    out = reference_attention(*inputs, mask, scale=scores.scale, softcap=scores.softcap)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def error(a: Tensor, b: Tensor) -> float:
    a, b = a.double().cpu(), b.double().cpu()
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(("heads", "kv_heads", "value_dim"), [(4, 4, 8), (4, 2, 8), (6, 1, 4), (2, 2, 12)])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_reference_parts(mask: AttentionMask, heads: int, kv_heads: int, value_dim: int, softcap: float) -> None:
    inputs = qkv(heads, kv_heads, value_dim, torch.float64)
    grad = torch.randn(2, TOKENS, heads, value_dim, dtype=torch.float64)
    scores = Scores(scale=0.3, softcap=softcap)
    expected = whole(inputs, grad, mask, scores)
    for cut, kernel in (
        (8, ReferencePart()),
        (24, ReferencePart(max_scores=3 * 2 * heads * TOKENS)),
        (12, ReferencePart(1)),
    ):
        found = by_parts(kernel, inputs, grad, mask, scores, cut)
        assert max(map(error, found, expected)) <= 1e-12


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(("heads", "kv_heads", "value_dim"), [(4, 4, 8), (4, 2, 8), (6, 1, 4)])
def test_fused_parts_of_the_cpu(mask: AttentionMask, heads: int, kv_heads: int, value_dim: int) -> None:
    """The path of the CUDA kernels, bias and repeated heads included, with the CPU's flash kernel in their place."""
    inputs = qkv(heads, kv_heads, value_dim, torch.float32)
    grad = torch.randn(2, TOKENS, heads, value_dim)
    scores = Scores(scale=0.3)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    expected = whole(wide, grad.double(), mask, scores)
    for kernel in (FusedPart("cpu"), FusedPart("cpu", max_scores=2 * 5 * TOKENS), None):
        for cut in (6, 24):
            found = by_parts(kernel, inputs, grad, mask, scores, cut)
            assert max(map(error, found, expected)) <= 1e-6


def test_what_runs_where() -> None:
    places = torch.arange(TOKENS)
    mask = PartMask(kind="full", q_positions=places, k_positions=places)
    narrow, wide = qkv(4, 2, 8, torch.float32), qkv(4, 2, 8, torch.float64)
    assert part_kernel(*narrow, mask, Scores(scale=1.0)) == FusedPart("cpu")
    assert isinstance(part_kernel(*narrow, mask, Scores(scale=1.0), reference=True), ReferencePart)
    assert isinstance(part_kernel(*narrow, mask, Scores(scale=1.0, softcap=3.0)), ReferencePart)
    assert isinstance(part_kernel(*narrow, mask, Scores(scale=1.0, dropout=0.1)), ReferencePart)
    assert isinstance(part_kernel(*wide, mask, Scores(scale=1.0)), ReferencePart)


def test_a_row_that_sees_nothing_adds_nothing() -> None:
    """Also where it is the first part that is merged, or all there is."""
    q, k, v = (x.detach() for x in qkv(2, 2, 8, torch.float32))
    places = torch.arange(TOKENS)
    mask = PartMask(kind="masked", q_positions=places, k_positions=places + 10)
    for kernel in (ReferencePart(), FusedPart("cpu")):
        o, lse = torch.zeros_like(q), torch.full((2, 2, TOKENS), float("-inf"))
        part = kernel.forward(q, k, v, mask, Scores(scale=0.3))
        merge_parts(o, lse, *part)
        full = kernel.forward(q, k, v, PartMask(kind="full", q_positions=places, k_positions=places), Scores(scale=0.3))
        assert bool(o.isfinite().all())
        merge_parts(o, lse, *full)
        torch.testing.assert_close(o[:, :10], full[0][:, :10])
        torch.testing.assert_close(lse[:, :, :10], full[1][:, :, :10])


def test_dropout() -> None:
    """Gradients are those of the dropped output (by finite differences); on average it is the plain output."""
    inputs = qkv(2, 1, 8, torch.float64)
    grad = torch.randn(2, TOKENS, 2, 8, dtype=torch.float64)
    scores, mask = Scores(scale=0.3, dropout=0.3), AttentionMask()
    _, *grads = by_parts(ReferencePart(), inputs, grad, mask, scores, 12, seed=5)
    for index, found in enumerate(grads):
        direction = torch.randn_like(inputs[index])
        moved = []
        for sign in (1, -1):
            shifted = [x.detach() + (sign * 1e-5 * direction if i == index else 0) for i, x in enumerate(inputs)]
            moved.append((by_parts(ReferencePart(), shifted, grad, mask, scores, 12, seed=5)[0] * grad).sum())
        assert ((moved[0] - moved[1]) / 2e-5).item() == pytest.approx((found * direction).sum().item(), rel=1e-6)
    mean = torch.stack(
        [by_parts(ReferencePart(), inputs, grad, mask, scores, 12, seed=1000 * n)[0] for n in range(200)]
    ).mean(0)
    assert error(mean, whole(inputs, grad, mask, Scores(scale=0.3))[0]) < 0.1


@pytest.mark.parametrize("name", ["cudnn", "flash", "efficient"])
@pytest.mark.parametrize("kind", ["full", "causal", "masked"])
def test_operators_take_what_we_give_them(name: str, kind: str) -> None:
    """On the meta device, which checks signatures and shapes without a GPU."""
    if kind == "masked" and name != "efficient":
        return
    q, k, v = (torch.empty(2, 40, heads, 64, dtype=torch.bfloat16, device="meta") for heads in (4, 2, 2))
    places = torch.arange(40, device="meta")
    mask = PartMask(kind=kind, q_positions=places, k_positions=places)  # type: ignore[arg-type]
    kernel = FusedPart(name)  # type: ignore[arg-type]
    o, lse = kernel.forward(q, k, v, mask, Scores(scale=0.1))
    assert o.shape == q.shape and lse.shape == (2, 4, 40) and lse.dtype == torch.float32
    grads = kernel.backward(torch.empty_like(o), q, k, v, o, lse, mask, Scores(scale=0.1))
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["cudnn", "flash", "efficient", "chosen"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "value_dim"), [(4, 4, 64, 64), (8, 2, 128, 128), (4, 4, 192, 128)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fused_parts_of_cuda(
    name: str, mask: AttentionMask, heads: int, kv_heads: int, dim: int, value_dim: int, dtype: torch.dtype
) -> None:
    """Rounding of bf16: inputs and outputs have 8 bits, so errors of a few 2^-9 (measured against float64)."""
    if name in ("cudnn", "flash") and (not mask.is_plain or dtype == torch.float32):
        pytest.skip("takes no mask, and bf16 only")
    if name == "cudnn" and dim > 128:
        pytest.skip("left to the choice of kernel, which asks cuDNN")
    inputs = qkv(heads, kv_heads, value_dim, dtype, "cuda", dim=dim, tokens=8 * TOKENS)
    grad = torch.randn(2, 8 * TOKENS, heads, value_dim, device="cuda", dtype=dtype)
    scores = Scores(scale=dim**-0.5)
    longer = AttentionMask(
        causal=mask.causal,
        window=8 * mask.window,
        documents=None if mask.documents is None else mask.documents.repeat_interleave(8, dim=1).cuda(),
    )
    wide = [x.detach().double().requires_grad_() for x in inputs]
    expected = whole(wide, grad.double(), longer, scores)
    kernels = {"cudnn": FusedPart("cudnn"), "flash": FusedPart("flash"), "efficient": FusedPart("efficient")}
    for cut in (24, 96, 192):
        found = by_parts(kernels.get(name), inputs, grad, longer, scores, cut)
        errors = list(map(error, found, expected))
        assert max(errors) <= (1e-2 if dtype == torch.bfloat16 else 1e-5), (cut, errors)
