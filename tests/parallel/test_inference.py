"""A model spread over two ranks writes what one process writes, token for token."""

from __future__ import annotations

import pytest
import torch

from paceline.checkpoint.weights import fill
from paceline.config.parallel import ParallelConfig
from paceline.generate.decode import DecodeParams, generate_ids
from paceline.generate.load import empty_model
from paceline.generate.sample import SamplingParams
from paceline.models.transformer import Transformer
from paceline.parallel.inference import spread_to_read
from paceline.parallel.mesh import ParallelMesh
from tests.distributed import run
from tests.generate.small_models import SHAPES, small_model

PROMPTS = [[5, 6, 7], [1], [9, 8, 7, 6, 5, 4, 3]]
CPU = torch.device("cpu")


class Weights:
    """Those of a model, as a source."""

    def __init__(self, model: Transformer) -> None:
        self.state = dict(model.state_dict())

    def shapes(self):
        return {name: value.shape for name, value in self.state.items()}

    def dtype(self, name):
        return self.state[name].dtype

    def read(self, name, box=None):
        value = self.state[name]
        for dim, (offset, length) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            value = value.narrow(dim, offset, length)
        return value


def written(model: Transformer) -> tuple[list[list[int | None]], list[list[int | None]]]:
    greedy = DecodeParams(max_tokens=9, sampling=SamplingParams(temperature=0))
    drawn = DecodeParams(max_tokens=9, seed=5, sampling=SamplingParams(temperature=0.7, top_p=0.9))
    return list(generate_ids(model, PROMPTS, greedy)), list(generate_ids(model, PROMPTS, drawn))


def spread_and_write(rank: int, world_size: int, shape: dict) -> tuple:
    plain = small_model(**shape)
    mesh = ParallelMesh(ParallelConfig(tp=world_size), world_size=world_size, rank=rank, device_type="cpu")
    model, into = empty_model(
        plain.config, device=CPU, dtype=torch.float32, spread=lambda whole: spread_to_read(whole, mesh["tp"])
    )
    fill(Weights(plain), into)
    model.eval()
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9]])
    with torch.no_grad():
        loss = float(model(tokens, tokens.roll(-1, 1)).loss_sum)
    held = sum(parameter.numel() for parameter in model.parameters())
    return written(model), loss, held


@pytest.mark.parametrize("name", SHAPES)
def test_two_ranks_write_what_one_writes(name: str) -> None:
    shape = SHAPES[name]
    plain = small_model(**shape)
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9]])
    with torch.no_grad():
        loss = float(plain(tokens, tokens.roll(-1, 1)).loss_sum)
    found = run(spread_and_write, 2, shape)
    whole = sum(parameter.numel() for parameter in plain.parameters())
    for texts, spread_loss, held in found:
        assert texts == written(plain)
        assert spread_loss == pytest.approx(loss, rel=1e-5)
        assert held < 0.75 * whole
    assert sum(held for _, _, held in found) >= whole
