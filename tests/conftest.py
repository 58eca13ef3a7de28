"""What every test shares: GPU tests skip themselves without a device, threads are kept to one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import tqdm

# tests say `from distributed import run`; worker processes import the test modules as `tests.<room>.<file>`
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("paceline", "recipes drawn at random (tests/parity/test_recipes.py)")
    group.addoption("--recipes", type=int, default=60, help="how many must run (default 60; refused ones come on top)")
    group.addoption("--recipes-seed", type=int, default=None, help="draw other ones")
    group.addoption("--recipes-first", type=int, default=0, help="number of the first one drawn")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    # a bar of Transformers would leave a thread behind; workers of `paceline data` fork only where there is none
    tqdm.tqdm.monitor_interval = 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
