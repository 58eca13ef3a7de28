"""Whole runs with adapters: from a hub folder, to PEFT's folder and back, resumed under other layouts, merged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.checkpoint.locate import find_checkpoint
from paceline.checkpoint.weights import CheckpointSource
from paceline.config.lora import is_adapter
from paceline.errors import CheckpointError
from paceline.generate.load import load_model
from paceline.generate.load import recipe_of as recipe_of_checkpoint
from paceline.interop.compare import logits_of
from paceline.interop.convert import Options, convert
from paceline.interop.peft import merge, read_adapter
from paceline.interop.peft_read import adapter_source
from paceline.interop.peft_write import convert_adapter
from paceline.interop.sources import open_source
from tests.interop import hub_folders as hub
from tests.interop.test_training import recipe_of, run
from tests.training.runs import write_dataset

LORA = ["lora.rank=4", "lora.alpha=8", "checkpoint.export=peft", "optim.lr=0.02"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hub.save("llama_biases", tmp_path_factory.mktemp("lora") / "hf")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_dataset(tmp_path_factory.mktemp("lora") / "data")


def recipe(source: Path, folder: Path, data: str, *more: str, steps: int = 2) -> list[str]:
    return [*recipe_of(source, folder, data, *LORA), "checkpoint.interval=1", *more, f"train.steps={steps}"]


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_a_run_and_what_comes_of_it(dora: bool, source: Path, data: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    losses = run(1, recipe(source, folder, data, f"lora.dora={str(dora).lower()}", steps=3))
    assert losses[-1] < losses[0]
    checkpoint = find_checkpoint(folder)
    # what learns, and nothing of the base
    assert all(is_adapter(name) for name in CheckpointSource(checkpoint).shapes())
    assert checkpoint.state().extra["base"]["source"] == str(source)
    adapter = folder / "exports/step_00000003"
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(source)
    convert_adapter(folder, tmp_path / "by hand")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "by hand" / name).read_bytes() == (adapter / name).read_bytes()
    # PEFT's folder beside the base, and our checkpoint, are the same model, which is another one than the base
    by_checkpoint, by_adapter = open_source(folder), merge(open_source(source), read_adapter(adapter))
    for name in by_checkpoint.weights.shapes():
        torch.testing.assert_close(by_checkpoint.weights.read(name), by_adapter.weights.read(name), rtol=0, atol=1e-6)
    convert(by_checkpoint, tmp_path / "merged", Options(to="hf"))
    merged, ran_by = logits_of(open_source(tmp_path / "merged"), hub.tokens())
    base, _ = logits_of(open_source(source), hub.tokens())
    assert ran_by == "transformers" and float((merged - base).abs().max()) > 1e-2
    unmerged = unmerged_logits(folder)
    torch.testing.assert_close(unmerged, merged, rtol=1e-4, atol=1e-4)
    config = recipe_of_checkpoint(checkpoint)
    speaking = load_model(
        checkpoint,
        config,
        device=torch.device("cpu"),
        dtype=torch.float32,
        open_base=lambda source: open_source(Path(source)).weights,
    )
    with torch.no_grad():
        torch.testing.assert_close(speaking(hub.tokens()).logits, unmerged, rtol=1e-4, atol=1e-4)


def unmerged_logits(folder: Path) -> torch.Tensor:
    """Of the model with its adapters beside the weights, not in them."""
    from paceline.models.lora import attach_adapters
    from paceline.models.transformer import Transformer

    opened = open_source(folder)
    assert opened.recipe is not None
    model = Transformer(opened.model, device="cpu")
    attach_adapters(model, opened.recipe.lora)
    base, adapters = open_source(Path(opened.recipe.model.init_from)).weights, CheckpointSource(find_checkpoint(folder))
    for name, parameter in model.named_parameters():
        parameter.data.copy_((adapters if is_adapter(name) else base).read(name))
    model.reset_buffers()
    with torch.no_grad():
        logits = model.eval()(hub.tokens()).logits
    assert logits is not None
    return logits


def test_goes_on_under_another_layout(source: Path, data: str, tmp_path: Path) -> None:
    """Losses of one process that never stopped, to 2e-5: ranks sum in another order."""
    still = ["lora.dora=true", "optim.schedule=constant"]
    whole = run(1, recipe(source, tmp_path / "whole", data, *still, steps=4))
    parted = tmp_path / "parted"
    more = [*still, "checkpoint.allow_change=lr"]
    run(2, recipe(source, parted, data, *more, "parallel.tp=2", steps=2))
    found = run(2, recipe(source, parted, data, *more, "parallel.zero=3", steps=4))
    assert found == pytest.approx(whole, abs=2e-5) and len(found) == 4
    names = load_file(parted / "exports/step_00000004/adapter_model.safetensors").keys()
    assert names == load_file(tmp_path / "whole/exports/step_00000004/adapter_model.safetensors").keys()


def test_begins_with_an_adapter_of_peft(source: Path, data: str, tmp_path: Path) -> None:
    """The first loss of the second run is the one that the first run would have gone on with."""
    first = run(1, recipe(source, tmp_path / "first", data, "optim.schedule=constant", steps=3))
    still = ["optim.lr=1e-30", "optim.schedule=constant"]
    exported = tmp_path / "first/exports/step_00000003"
    for begins in (exported, tmp_path / "first"):
        again = run(1, recipe(source, tmp_path / f"from_{begins.name}", data, *still, f"lora.init_adapter={begins}"))
        fresh = run(1, recipe(source, tmp_path / f"fresh_{begins.name}", data, *still))
        assert again[0] < fresh[0] - 1e-3 and fresh[0] == pytest.approx(first[0], abs=1e-6)
        written = load_file(tmp_path / f"from_{begins.name}/exports/step_00000002/adapter_model.safetensors")
        expected = load_file(exported / "adapter_model.safetensors")
        assert all(torch.equal(written[name], expected[name]) for name in expected)


def test_another_base_is_refused(source: Path, data: str, tmp_path: Path) -> None:
    other = hub.save("llama_biases", tmp_path / "other")
    hub.change_tensors(other, **{"lm_head.weight": torch.randn_like(hub.tensors(other)["lm_head.weight"])})
    folder = tmp_path / "run"
    run(1, recipe(source, folder, data, steps=1))
    with pytest.raises(AssertionError, match="were trained beside other weights"):
        run(1, recipe(other, folder, data, "checkpoint.allow_change=lr", steps=2))


def test_a_run_whose_base_has_changed_cannot_be_merged(data: str, tmp_path: Path) -> None:
    source = hub.save("llama_biases", tmp_path / "hf")
    folder = tmp_path / "run"
    run(1, recipe(source, folder, data, steps=1))
    hub.change_tensors(source, **{"lm_head.weight": torch.randn_like(hub.tensors(source)["lm_head.weight"])})
    with pytest.raises(CheckpointError, match="were trained beside other weights"):
        open_source(folder)


def test_a_run_is_a_base_with_its_adapters_merged(source: Path, data: str, tmp_path: Path) -> None:
    """And nothing of the optimizer's is of what is frozen."""
    first = tmp_path / "first"
    run(1, recipe(source, first, data, steps=2))
    saved = find_checkpoint(first).metadata().state_dict_metadata
    assert len(saved) == 3 * 2 * 7 * 2 and all(".lora_" in name for name in saved)
    losses = run(1, recipe(first, tmp_path / "second", data, "optim.lr=1e-30", steps=1))
    base = run(1, recipe(source, tmp_path / "base", data, "optim.lr=1e-30", steps=1))
    assert losses[0] != base[0]


def test_a_damaged_checkpoint_is_passed_over_aloud(
    source: Path, data: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    run(1, recipe(source, folder, data, steps=2))
    assert convert_adapter(folder, tmp_path / "whole").notes == ()
    damaged = folder / "checkpoints/step_00000002"
    file = max((path for path in damaged.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-20])
    written = convert_adapter(folder, tmp_path / "older")
    assert written.checkpoint.name == "step_00000001"
    for notes in (written.notes, open_source(folder).notes):
        assert str(damaged) in notes[0] and file.name in notes[0], notes
        assert "step_00000001" in notes[1]
    config = recipe_of_checkpoint(find_checkpoint(folder))
    assert adapter_source(folder, config.model, config.lora) is not None
    assert str(damaged) in caplog.text and "step_00000001, step 1" in caplog.text


def test_a_damaged_checkpoint_of_the_first_weights_is_passed_over_aloud(
    source: Path, data: str, tmp_path: Path
) -> None:
    """Of a run with adapters, which is merged, and of one without."""
    for name, more in (("adapters", LORA), ("whole", ["checkpoint.export="])):
        first, second = tmp_path / name / "first", tmp_path / name / "second"
        run(1, [*recipe_of(source, first, data, *more), "checkpoint.interval=1", "train.steps=2"])
        damaged = first / "checkpoints/step_00000002"
        file = max((path for path in damaged.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
        file.write_bytes(file.read_bytes()[:-20])
        run(1, [*recipe_of(first, second, data), "checkpoint.export=", "task.kind=pretrain", "train.steps=1"])
        log = next((second / "logs").iterdir()).read_text()
        assert f"The checkpoint {damaged} is damaged" in log and log.count("is damaged") == 1, log
        assert f"Taken in its place: {first / 'checkpoints/step_00000001'}, step 1." in log


def test_a_base_that_peft_cannot_open_is_left_out_and_told(source: Path, data: str, tmp_path: Path) -> None:
    """A run that began with another run: that one's weights are in no folder of the hub."""
    first, second = tmp_path / "first", tmp_path / "second"
    run(1, recipe(source, first, data, steps=1))
    run(1, recipe(first, second, data, steps=1))
    written = convert_adapter(second, tmp_path / "by hand")
    assert str(first) in written.notes[0] and "--to hf" in written.notes[0]
    for folder in (tmp_path / "by hand", second / "exports/step_00000001"):
        assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] is None


def test_a_base_in_fewer_bits(source: Path, data: str, tmp_path: Path) -> None:
    """NF4 rounds by about a tenth, fp8 by a hundredth; ranks of tp quantise their own parts. All go on after a stop."""
    exact = run(1, recipe(source, tmp_path / "exact", data))
    for name, ranks, more in (
        ("nf4", 1, ["lora.base=nf4"]),
        ("nf4_tp", 2, ["lora.base=nf4", "parallel.tp=2"]),
        ("fp8", 1, ["lora.base=fp8", "train.precision=fp8"]),
    ):
        found = run(ranks, recipe(source, tmp_path / name, data, *more))
        assert found == pytest.approx(exact, abs=0.05), name
        assert found != exact, name
        more = [*more, "checkpoint.allow_change=lr"]
        assert len(run(ranks, recipe(source, tmp_path / name, data, *more, steps=3))) == 3
