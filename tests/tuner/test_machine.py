"""The machine is taken as the driver tells it; what is not in the table of hardware is tuned by ratios alone."""

from __future__ import annotations

import pytest

from paceline.config.load import resolve
from paceline.doctor.hardware.card import Card
from paceline.doctor.hardware.live import Live
from paceline.errors import LaunchError
from paceline.tuner.machine import find_machine

GIB = 2**30


def config(*overrides: str):  # type: ignore[no-untyped-def]
    return resolve({}, list(overrides)).config


def live(*names: str, memory: int = 140 * GIB) -> Live:
    return Live(cards=tuple(Card(index=i, name=name, memory_bytes=memory) for i, name in enumerate(names)))


def test_a_known_card() -> None:
    found = find_machine(config(), 2, look=lambda: live("NVIDIA H200", "NVIDIA H200"))
    assert found.on_gpu and found.hardware is not None and found.hardware.name == "H200 SXM"
    assert found.cluster.gpus == found.cluster.gpus_per_node == 2 and found.text == "2 x NVIDIA H200"
    assert 125 * GIB < found.room_bytes < 135 * GIB and found.process_bytes == 0


def test_less_memory_than_the_table_says_is_believed() -> None:
    whole = find_machine(config(), 1, look=lambda: live("NVIDIA H200"))
    part = find_machine(config(), 1, look=lambda: live("NVIDIA H200", memory=70 * GIB))
    assert part.memory_bytes == 70 * GIB < whole.memory_bytes


def test_an_unknown_card_and_one_that_the_recipe_names() -> None:
    found = find_machine(config(), 1, look=lambda: live("NVIDIA Unheard", memory=24 * GIB))
    assert found.on_gpu and found.hardware is None and found.memory_bytes == 24 * GIB
    assert 20 * GIB < found.room_bytes < 24 * GIB
    named = find_machine(config("cluster.gpu=RTX 4090"), 1, look=lambda: live("NVIDIA Unheard", memory=24 * GIB))
    assert named.hardware is not None and named.hardware.name == "RTX 4090"


def test_what_torch_sees_where_the_driver_tells_nothing() -> None:
    card = Card(index=0, name="AMD Instinct MI300X", memory_bytes=190 * GIB)
    found = find_machine(config(), 1, look=Live, ask_torch=lambda: (card,))
    assert found.on_gpu and found.hardware is not None and found.hardware.name == "MI300X"


def test_cpus() -> None:
    found = find_machine(config(), 2, look=Live, ask_torch=lambda: ())
    assert not found.on_gpu and found.hardware is None and 0 < found.room_bytes == found.memory_bytes
    asked = find_machine(config("cluster.device=cpu"), 1, look=lambda: live("NVIDIA H200"))
    assert not asked.on_gpu, "what the recipe asks for"
    assert found.memory_bytes < asked.memory_bytes, "ranks share the host's memory"


def test_too_few() -> None:
    with pytest.raises(LaunchError, match="--nproc 4 asks for more processes than the 2 GPUs"):
        find_machine(config(), 4, look=lambda: live("NVIDIA H200", "NVIDIA H200"))
    with pytest.raises(LaunchError, match="no GPU is found here"):
        find_machine(config("cluster.device=cuda"), 1, look=Live, ask_torch=lambda: ())
