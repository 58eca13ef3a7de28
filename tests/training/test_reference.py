"""A run that compares with a reference model: where its weights come from, and that it makes no difference how its
log-probabilities are got: from a second model, the model without its adapters, or a file."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed import run as on_ranks
from paceline.checkpoint.ranks import Ranks
from paceline.config.load import resolve
from paceline.errors import CheckpointError
from paceline.models.init import WeightInit
from paceline.runtime.process import ProcessInfo
from paceline.training.reference import FrozenCopy
from paceline.training.reference_cache import _arithmetic
from paceline.training.setup import build_parts
from paceline.training.start_weights import load_reference
from tests.training import runs

WORDS = ("red", "green", "blue", "cat")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of pairs: an answer that repeats a word, and one that does not."""
    draw, path = random.Random(0), tmp_path_factory.mktemp("pairs") / "pairs.json"
    words = [draw.choice(WORDS) for _ in range(24)]
    path.write_text(json.dumps([{"prompt": f"{w}?", "chosen": f"{w} {w}", "rejected": f"no {w}"} for w in words]))
    return str(path)


def recipe(folder: Path, pairs: str, *more: str, steps: int = 4) -> list[str]:
    sizes = ("model.vocab_size=320", "model.max_seq_len=160", "train.seq_len=160", "train.global_batch_size=2")
    data = ("data.tokenizer=byte", "data.template=chatml", "data.split=80,20,0", "task.kind=dpo", "task.beta=0.5")
    return runs.tiny(folder, pairs, *sizes, *data, *more, steps=steps)


def test_the_first_loss_is_that_of_two_equal_models(pairs: str, tmp_path: Path) -> None:
    found = runs.losses(runs.alone(recipe(tmp_path, pairs)))
    assert found[1] == pytest.approx(math.log(2), abs=1e-6)
    assert found[4] is not None and found[4] < 0.9 * math.log(2)


def test_a_file_gives_the_same_run_in_any_layout_and_is_used_again(pairs: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    kept = ("task.precompute_reference=true", f"data.cache_dir={cache}")
    expected = runs.losses(runs.alone(recipe(tmp_path / "copy", pairs)))
    assert runs.losses(runs.alone(recipe(tmp_path / "kept", pairs, *kept))) == pytest.approx(expected, abs=1e-5)
    files = {path: path.stat().st_mtime_ns for path in cache.glob("*-reference.npy")}
    assert len(files) == 2, "training and held-out samples"
    two = recipe(tmp_path / "two", pairs, *kept, "parallel.pp=2")
    assert runs.losses(on_ranks(runs.run, 2, two)[0]) == pytest.approx(expected, abs=1e-5)
    assert {path: path.stat().st_mtime_ns for path in files} == files, "computed again"
    # other samples, or other weights, are other numbers
    runs.alone(recipe(tmp_path / "other", pairs, *kept, "run.seed=7"))
    assert len(list(cache.glob("*-reference.npy"))) == 4


def test_a_run_that_goes_on_finds_its_reference_again(pairs: str, tmp_path: Path) -> None:
    """Also where the file is gone: it is made from the weights that the run began with, not from those of now."""
    whole = runs.losses(runs.alone(recipe(tmp_path / "whole", pairs, steps=6)))
    for number, more in enumerate(((), ("task.precompute_reference=true",))):
        folder = tmp_path / f"cut{number}"
        cut = recipe(folder, pairs, *more, steps=6)
        runs.alone(cut, stop_after=3)
        shutil.rmtree(folder / "reference", ignore_errors=True)
        assert runs.losses(runs.alone(cut)) == pytest.approx(whole, abs=1e-5)


def test_adapters_are_switched_off_for_the_reference(pairs: str, tmp_path: Path) -> None:
    """The base is the reference: the loss starts at log 2 and falls, and a file of it says the same."""
    lora = ("lora.rank=4", "optim.lr=0.01", "optim.warmup_steps=0")
    beside = runs.losses(runs.alone(recipe(tmp_path / "beside", pairs, *lora)))
    assert beside[1] == pytest.approx(math.log(2), abs=1e-6)
    assert beside[4] is not None and beside[4] < 0.9 * math.log(2)
    kept = runs.losses(runs.alone(recipe(tmp_path / "kept", pairs, *lora, "task.precompute_reference=true")))
    assert kept == pytest.approx(beside, abs=1e-5)


def test_a_base_in_fewer_bits_has_a_file_of_its_own(pairs: str, tmp_path: Path) -> None:
    """The file of the base in bf16 is not what the model in NF4 says: the first loss is of two equal models.

    Up to rounding: an answer's log-probabilities sum to about 120 here, which fp32 knows to about 2e-5, and beta / 2 of
    that is 1e-6 for each of two answers. The file of the other base is off by 0.015 in such a sum, 7e-4 in the loss.
    """
    wide = ("model.hidden_size=64", "model.ffn_size=64", "lora.rank=4", "task.precompute_reference=true")
    for number, base in enumerate(("bf16", "nf4", "bf16")):
        folder = tmp_path / f"run{number}"
        run = recipe(folder, pairs, *wide, f"data.cache_dir={tmp_path}", f"lora.base={base}", steps=1)
        found = runs.losses(runs.alone(run))
        assert found[1] == pytest.approx(math.log(2), abs=3e-6), base
    assert len(list(tmp_path.glob("*-reference.npy"))) == 4, "training and held-out samples, of two models"


FP8 = ("train.precision=fp8",)
LORA = ("lora.rank=4",)


@pytest.mark.parametrize(
    ("sets", "more", "is_same"),
    [
        ((), LORA, True),
        ((), ("parallel.tp=2",), True),
        ((), ("train.micro_batch_size=2",), True),
        ((), ("train.fp8_scaling=rowwise",), True),
        ((), ("train.precision=bf16",), False),
        ((), FP8, False),
        (LORA, ("lora.base=nf4",), False),
        ((*LORA, "lora.base=nf4"), ("parallel.tp=2",), False),
        ((*LORA, "lora.base=nf4"), ("train.micro_batch_size=2",), True),
        ((*LORA, *FP8), ("lora.base=fp8",), False),
        (FP8, ("train.fp8_scaling=rowwise",), False),
        (FP8, ("train.fp8_skip_layers=[0]",), False),
        (FP8, ("train.fp8_skip_linears=down_proj",), False),
        (FP8, ("train.fp8_head=true",), False),
        (FP8, ("parallel.tp=2",), False),
        (FP8, ("train.micro_batch_size=2",), False),
        ((*FP8, "train.fp8_scaling=rowwise"), ("train.micro_batch_size=2",), True),
        (FP8, ("train.fp8_weight_cache=false",), True),
    ],
)
def test_a_file_is_named_after_how_numbers_are_rounded(
    sets: tuple[str, ...], more: tuple[str, ...], is_same: bool, pairs: str
) -> None:
    one, other = (resolve({}, recipe(Path("unused"), pairs, *sets, *end)).config for end in ((), more))
    assert (_arithmetic(one) == _arithmetic(other)) is is_same


def test_another_run_can_be_the_reference(pairs: str, tmp_path: Path) -> None:
    trained = tmp_path / "trained"
    runs.alone(recipe(trained, pairs))
    found = runs.losses(runs.alone(recipe(tmp_path / "run", pairs, f"task.reference={trained}")))
    assert found[1] is not None and abs(found[1] - math.log(2)) > 0.01
    again = recipe(tmp_path / "again", pairs, f"model.init_from={trained}", f"task.reference={trained}")
    assert runs.losses(runs.alone(again))[1] == pytest.approx(math.log(2), abs=1e-6)
    with pytest.raises(CheckpointError, match="nowhere"):
        runs.alone(recipe(tmp_path / "bad", pairs, f"task.reference={tmp_path / 'nowhere'}"))


def _reference_bytes(rank: int, world_size: int, layouts: Sequence[str], pairs: str) -> list[dict[str, Any]]:
    found = []
    for layout in layouts:
        resolved = resolve({}, recipe(Path("unused"), pairs, "train.precision=bf16", *layout.split()))
        info = ProcessInfo(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size)
        parts = build_parts(resolved.config, resolved.registry, info, torch.device("cpu"))
        load_reference(parts.reference, resolved.config, resolved.registry, Ranks.create())
        assert isinstance(parts.reference, FrozenCopy)
        held = parts.reference.engine.bytes_by_kind()
        wrong = 0.0
        for name, value in parts.reference.engine.weights().items():
            for piece in value.pieces:
                expected = torch.empty(piece.tensor.shape)
                WeightInit(resolved.config.model, resolved.config.run.seed)(
                    name, expected, value.global_shape, piece.offsets
                )
                wrong = max(wrong, float((piece.tensor.float() - expected.to(piece.tensor.dtype).float()).abs().max()))
        found.append({"held": held, "wrong": wrong, "main": len(parts.reference.engine.main_parameters())})
    return found


def test_the_copy_has_weights_alone_and_no_state(pairs: str) -> None:
    layouts = ("parallel.zero=1", "parallel.tp=2 parallel.zero=1", "parallel.zero=3")
    for rank in on_ranks(_reference_bytes, 2, layouts, pairs):
        for each in rank:
            assert each["wrong"] == 0 and each["main"] == 0
            assert each["held"]["gradients"] == each["held"]["masters"] == each["held"]["host"] == 0
        whole, cut, sharded = (each["held"]["parameters"] for each in rank)
        assert cut < 0.6 * whole and sharded <= whole
