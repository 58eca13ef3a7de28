"""AdamW in one pass against `torch.optim.AdamW`: the plain twin in float64 and fp32, the kernel in the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.kernels.adamw import StepScalars, adamw_update, adamw_update_reference
from tests.kernels.interpreter import interpreted_modules

BETAS, EPS, LR, DECAY, DIVISOR = (0.9, 0.95), 1e-8, 1e-2, 0.1, 2.5
SIZES = (1, 7, 64, 2048, 5000)
LEFT_OUT = 2
"""This step is not taken."""
STEPS = 5
Update = Callable[..., None]


def _gradient(size: int, step: int, dtype: torch.dtype, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + size)
    values = torch.randn(size, generator=generator) * 10.0 ** torch.randint(-6, 2, (size,), generator=generator)
    if step == LEFT_OUT:
        values[size // 2] = float("nan")
    return values.to(device, dtype)


def _run(
    update: Update,
    size: int,
    dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    device: str = "cpu",
    compute_dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Tensor]:
    weight = torch.linspace(-1, 1, size, dtype=dtype, device=device)
    state = {"weight": weight, "exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
    compute = weight.to(compute_dtype)
    count = torch.zeros((), device=device)
    for step in range(STEPS):
        found_inf = torch.tensor(float(step == LEFT_OUT), device=device)
        count += 1 - found_inf
        scalars = StepScalars.of(count, torch.tensor(DIVISOR, device=device), found_inf, BETAS)
        before = {name: value.clone() for name, value in state.items()} | {"compute": compute.clone()}
        update(
            weight,
            _gradient(size, step, gradient_dtype, device),
            state["exp_avg"],
            state["exp_avg_sq"],
            scalars,
            lr=LR,
            weight_decay=DECAY,
            betas=BETAS,
            eps=EPS,
            compute=compute,
        )
        same = all(torch.equal(before[name], value) for name, value in (state | {"compute": compute}).items())
        assert same == (step == LEFT_OUT), step
        assert torch.equal(compute, weight.to(compute_dtype))
    return state


def _of_torch(size: int, dtype: torch.dtype, gradient_dtype: torch.dtype) -> dict[str, Tensor]:
    weight = torch.nn.Parameter(torch.linspace(-1, 1, size, dtype=dtype))
    optimizer = torch.optim.AdamW([weight], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, foreach=False)
    for step in range(STEPS):
        if step != LEFT_OUT:
            weight.grad = _gradient(size, step, gradient_dtype, "cpu").to(dtype) / DIVISOR
            optimizer.step()
    state = optimizer.state[weight]
    return {"weight": weight.detach(), "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}


def _close(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float) -> None:
    for name, value in expected.items():
        # terms as large as the largest may cancel
        atol = 4 * torch.finfo(value.dtype).eps * float(value.abs().max())
        torch.testing.assert_close(found[name].cpu(), value, rtol=rtol, atol=atol, msg=lambda t, n=name: f"{n} {t}")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_the_twin_equals_torch(size: int, dtype: torch.dtype, rtol: float) -> None:
    for gradient_dtype in (dtype, torch.bfloat16):
        expected = _of_torch(size, dtype, gradient_dtype)
        _close(_run(adamw_update_reference, size, dtype, gradient_dtype), expected, rtol)
        _close(_run(adamw_update, size, dtype, gradient_dtype), expected, rtol)


@pytest.fixture
def interpreted() -> Iterator[ModuleType]:
    with interpreted_modules("adamw_triton") as (module,):
        yield module


@pytest.mark.parametrize("size", SIZES)
def test_the_kernel_equals_torch_in_the_interpreter(interpreted: ModuleType, size: int) -> None:
    def update(*args: Any, **options: Any) -> None:
        *tensors, scalars = args
        interpreted.adamw_update_triton(*tensors, scalars.rounded, **options)

    for gradient_dtype in (torch.float32, torch.bfloat16):
        expected = _of_torch(size, torch.float32, gradient_dtype)
        # the interpreter does not round to bf16 as hardware does (Triton 3.6)
        found = _run(update, size, torch.float32, gradient_dtype, compute_dtype=torch.float32)
        _close(found, expected, 2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [*SIZES, 1_000_003])
def test_the_kernel_equals_torch_on_a_gpu(size: int) -> None:
    for gradient_dtype in (torch.float32, torch.bfloat16):
        expected = _of_torch(size, torch.float32, gradient_dtype)
        _close(_run(adamw_update, size, torch.float32, gradient_dtype, "cuda"), expected, 1e-5)
