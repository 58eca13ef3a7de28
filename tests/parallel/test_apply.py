"""The order in which a plain model is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distributed import run
from paceline.config.parallel import ParallelConfig
from paceline.parallel.apply import parallelize
from paceline.parallel.flat import FlatEngine
from paceline.parallel.fsdp import FsdpEngine
from paceline.parallel.mesh import ParallelMesh
from tests.parallel.tiny import init, plain, tiny_config, tiny_model, train

CPU = torch.device("cpu")


def _losses(rank: int, world_size: int, options: dict[str, Any]) -> tuple[str, list[float]]:
    config = ParallelConfig(**options)
    mesh = ParallelMesh(config, world_size=world_size, rank=rank, device_type="cpu")
    applied = parallelize(tiny_model(tiny_config()), config, mesh, "fp32", CPU)
    applied.engine.materialize(init(tiny_config()))
    assert list(applied.stages[0].state_dict()) == list(plain(tiny_config()).state_dict())
    return type(applied.engine).__name__, train(applied.engine, 3, dp_rank=0, dp_size=1).losses


def _all(rank: int, world_size: int) -> list[tuple[str, list[float]]]:
    compiled: list[Any] = []
    real = torch.compile

    def record(function: Any, **options: Any) -> Any:
        compiled.append(options["backend"])
        return real(function, **(options | {"backend": "eager"}))  # inductor needs half a minute; see the slow test

    found = [_losses(rank, world_size, options) for options in ({"zero": 1}, {"zero": 3})]
    torch.compile = record  # type: ignore[assignment]
    try:
        for zero, modes in ((1, "none"), (3, "full")):
            found.append(_losses(rank, world_size, {"zero": zero, "recompute": modes, "compile": True}))
    finally:
        torch.compile = real
    assert compiled == ["inductor"] * 6
    return found


def test_recompute_and_compile_under_both_engines() -> None:
    (found,) = run(_all, 1)
    assert [name for name, _ in found] == [FlatEngine.__name__, FsdpEngine.__name__] * 2
    for _, losses in found[1:]:
        assert losses == pytest.approx(found[0][1], abs=1e-5)


def _inductor(rank: int, world_size: int) -> list[tuple[str, list[float]]]:
    return [_losses(rank, world_size, {"zero": zero, "compile": compiled}) for zero in (1, 3) for compiled in (0, 1)]


@pytest.mark.slow
def test_inductor() -> None:
    (found,) = run(_inductor, 1, timeout_seconds=300)
    for _, losses in found[1:]:
        assert losses == pytest.approx(found[0][1], abs=1e-4)
