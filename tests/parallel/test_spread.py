"""Gradients, their norm, weights and checkpoints are those of one process, however parameters are spread."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distributed import run
from paceline.checkpoint.ranks import Ranks
from paceline.checkpoint.state import TrainState
from paceline.checkpoint.store import CheckpointWriter, Contents, load_into, open_checkpoint
from paceline.config.optim import OptimConfig
from paceline.config.parallel import ParallelConfig
from paceline.optim.build import build_optimizer
from paceline.optim.clip import gradient_norm
from paceline.parallel.engine import Engine
from paceline.parallel.flat import FlatEngine
from paceline.parallel.fsdp import FsdpEngine
from paceline.parallel.mesh import ParallelMesh
from tests.optim.engines import ToyEngine
from tests.parallel.layouts import CPU, LAYOUTS, Toy, box, build, start
from tests.parallel.tiny import batches, init, loss_of, plain, shapes_of, tiny_config, tiny_model

RATE = 0.1


def _all_layouts(rank: int, world_size: int, zero: int, folder: str) -> None:
    before: Path | None = None
    weights: dict[str, Tensor] = {}
    for number, (name, layout) in enumerate(LAYOUTS.items()):
        try:
            toy = build(rank, world_size, layout, zero)
            if before is not None and layout.tied == LAYOUTS[before.name].tied:
                _loads(toy, before, weights)
            weights = _trains(toy, {key: start(key, shape) for key, shape in toy.engine.shapes.items()})
            before = Path(folder) / name
            _save(toy, before, number)
        except AssertionError as error:
            raise AssertionError(f"{name}, zero {zero}: {error}") from error


def _trains(toy: Toy, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Two steps of plain gradient descent; the second one sees the weights of the first."""
    _set(toy, weights)
    for number in (1, 2):
        toy.step(number)
        _check_gradients(toy)
        for parameter in toy.engine.main_parameters():
            assert parameter.param.grad is not None
            parameter.param.data.sub_(parameter.param.grad, alpha=RATE)
        toy.engine.publish_weights()
        weights = {name: value - RATE * toy.expected[name] for name, value in weights.items()}
        _check_weights(toy, weights)
    losses = toy.step(3)
    # the loss is the sum of pull * weight, so it tells whether the model computes with the new weights
    dist.all_reduce(losses)
    expected = sum(float((weights[name] * pull).sum()) for name, pull in toy.expected.items())
    assert abs(float(losses) - expected) < 1e-10
    return weights


def _set(toy: Toy, weights: dict[str, Tensor]) -> None:
    for name, value in toy.engine.weights().items():
        for piece in value.pieces:
            assert torch.equal(piece.tensor, weights[name][box(piece.offsets, piece.tensor.shape)]), name


def _check_gradients(toy: Toy) -> None:
    held: dict[tuple[Any, ...], Tensor] = {}
    for parameter in toy.engine.main_parameters():
        assert parameter.param.grad is not None
        assert parameter.global_shape == toy.engine.shapes[parameter.name]
        for piece in parameter.pieces(parameter.param.grad).pieces:
            expected = toy.expected[parameter.name][box(piece.offsets, piece.tensor.shape)]
            torch.testing.assert_close(piece.tensor, expected, rtol=0, atol=1e-12, msg=parameter.name)
            held[parameter.name, piece.offsets, tuple(piece.tensor.shape)] = piece.tensor.clone()
    # case 66: the same bits wherever the same part is held
    everyone: list[Any] = [None] * toy.mesh.world_size
    dist.all_gather_object(everyone, held)
    for others in everyone:
        for key in held.keys() & others.keys():
            assert torch.equal(held[key], others[key]), key
    # case 65: every element counted once
    total = math.sqrt(sum(float(value.square().sum()) for value in toy.expected.values()))
    norm = gradient_norm(toy.engine.main_parameters(), toy.engine, 0.5, CPU)
    assert float(norm.norm) == pytest.approx(total, rel=1e-6)
    counted = sum(
        (p.param.grad.square().sum() for p in toy.engine.main_parameters() if p.counted and p.param.grad is not None),
        torch.zeros((), dtype=torch.float64),
    )
    assert abs(float(toy.engine.sum_over_shards(counted).sqrt()) - total) < 1e-12 * total


def _check_weights(toy: Toy, weights: dict[str, Tensor]) -> None:
    toy.engine.wait_for_weights()
    values = toy.engine.weights()
    assert list(values) == list(toy.engine.shapes)
    for name, value in values.items():
        for piece in value.pieces:
            expected = weights[name][box(piece.offsets, piece.tensor.shape)]
            torch.testing.assert_close(piece.tensor, expected, rtol=0, atol=1e-12, msg=name)
    # saved pieces, equal ones once, are the whole
    mine = {
        (name, piece.offsets, tuple(piece.tensor.shape))
        for name, value in values.items()
        for piece in value.pieces
        if piece.saved
    }
    everyone: list[Any] = [None] * toy.mesh.world_size
    dist.all_gather_object(everyone, mine)
    covered = {name: torch.zeros(shape) for name, shape in toy.engine.shapes.items()}
    for name, offsets, sizes in set().union(*everyone):
        covered[name][box(offsets, sizes)] += 1
    for name, count in covered.items():
        assert bool((count == 1).all()), name


def _save(toy: Toy, folder: Path, number: int) -> None:
    writer = CheckpointWriter(Ranks.create())
    values = {f"model/{name}": value for name, value in toy.engine.weights().items()}
    writer.save(folder, Contents(values=values, state=TrainState(step=number)))
    writer.close()


def _loads(toy: Toy, folder: Path, weights: dict[str, Tensor]) -> None:
    """What another layout wrote (case 54)."""
    values = toy.engine.weights()
    load_into(open_checkpoint(folder), {f"model/{name}": value for name, value in values.items()}, ranks=Ranks.create())
    for name, value in values.items():
        for piece in value.pieces:
            expected = weights[name][box(piece.offsets, piece.tensor.shape)]
            torch.testing.assert_close(piece.tensor, expected, rtol=0, atol=1e-12, msg=name)
    for name, value in values.items():
        for piece in value.pieces:
            whole = start(name, toy.engine.shapes[name])
            piece.tensor.copy_(whole[box(piece.offsets, piece.tensor.shape)])
    toy.engine.publish_weights()


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_layout(zero: int, tmp_path: Path) -> None:
    run(_all_layouts, 4, zero, str(tmp_path))


def _muon(rank: int, world_size: int, zero: int) -> None:
    config = OptimConfig(name="muon", lr=1e-2, muon_lr=0.05, grad_clip=1.0)
    for name in ("cp", "experts and replicas", "ends, sharded", "one rank, two stages", "v"):
        toy = build(rank, world_size, LAYOUTS[name], zero)
        plain = ToyEngine({key: start(key, shape) for key, shape in toy.engine.shapes.items()})
        optimizer, alone = build_optimizer(config, toy.engine, toy.mesh), build_optimizer(config, plain.as_engine())
        for number in (1, 2):
            toy.step(number)
            plain.set_gradients(toy.expected)
            for one in (optimizer, alone):
                one.step(1.0, one.gradient_norm())
            toy.engine.publish_weights()
        expected = {parameter.name: parameter.param.detach() for parameter in plain.main_parameters()}
        for key, value in toy.engine.weights().items():
            for piece in value.pieces:
                own = expected[key][box(piece.offsets, piece.tensor.shape)]
                torch.testing.assert_close(piece.tensor, own, rtol=0, atol=1e-5, msg=f"{name}, zero {zero}: {key}")
        assert optimizer.describe() == alone.describe()


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_muon_puts_whole_matrices_together(zero: int) -> None:
    """Also where a rank has only some of the experts, or some of the layers."""
    run(_muon, 4, zero)


MODEL = tiny_config(tied=True, moe=True, mtp_layers=1)


def _two_stages(rank: int, world_size: int, zero: int, precision: Any, dtype: torch.dtype) -> list[float]:
    config = ParallelConfig(zero=zero)
    mesh = ParallelMesh(config, world_size=world_size, rank=rank, device_type="cpu")
    model = tiny_model(MODEL, dtype=dtype)
    stages = [model.part(range(1), first=True, last=False), model.part(range(1, 3), first=False, last=True)]
    engine = (FlatEngine if zero <= 1 else FsdpEngine)(stages, config, mesh, precision, CPU, {}, shapes_of(model))
    engine.materialize(init(MODEL))
    optimizer = build_optimizer(OptimConfig(lr=1e-2, grad_clip=0.5), engine, mesh)
    reference = plain(MODEL, dtype=dtype)
    losses = []
    for step in range(3):
        losses.append(_step_of_two_stages(engine, step, rank, world_size))
        if step == 0 and precision == "fp32":
            tokens, labels = batches(step)
            loss_of(reference(tokens, labels), (labels != -100).sum(), len(tokens)).backward()
            gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
            for main in engine.main_parameters():
                assert main.param.grad is not None
                for piece in main.pieces(main.param.grad).pieces:
                    expected = gradients[main.name]
                    assert expected is not None
                    own = expected[box(piece.offsets, piece.tensor.shape)]
                    # routers compute in fp32 in every model
                    torch.testing.assert_close(piece.tensor, own, rtol=0, atol=1e-7, msg=main.name)
        optimizer.step(1.0, optimizer.gradient_norm())
        engine.publish_weights()
    return losses


def _step_of_two_stages(engine: Engine, step: int, rank: int, world_size: int) -> float:
    tokens, labels = batches(step)
    total = (labels != -100).sum()
    own = [chunk.chunk(world_size)[rank].chunk(2) for chunk in (tokens, labels)]
    first, second = engine.stages
    engine.zero_gradients()
    value = torch.zeros(())
    # both forwards before both backwards, as in a pipeline
    under_way = []
    for micro_tokens, micro_labels in zip(*own, strict=True):
        out = first(micro_tokens)
        assert out.hidden is not None
        hidden = out.hidden.detach().requires_grad_()
        under_way.append((out, hidden, loss_of(second(micro_tokens, micro_labels, hidden=hidden), total, len(tokens))))
    for index, (out, hidden, loss) in enumerate(under_way):
        with engine.accumulate(index == 1, 1):
            loss.backward()
        with engine.accumulate(index == 1, 0):
            out.hidden.backward(hidden.grad)
        value += loss.detach().float()
    engine.reduce_gradients()
    dist.all_reduce(value)
    return value.item()


def _stages_of_every_engine(rank: int, world_size: int) -> dict[tuple[int, str], list[float]]:
    found = {}
    for zero in (0, 1, 2, 3):
        found[zero, "fp32"] = _two_stages(rank, world_size, zero, "fp32", torch.float64)
        found[zero, "bf16"] = _two_stages(rank, world_size, zero, "bf16", torch.float32)
    return found


def test_two_stages_of_a_rank_share_an_embedding() -> None:
    found = run(_stages_of_every_engine, 2)[0]
    for (_, precision), losses in found.items():
        # bf16: as in test_flat.py
        assert losses == pytest.approx(found[1, "fp32"], abs=1e-6 if precision == "fp32" else 0.06)
