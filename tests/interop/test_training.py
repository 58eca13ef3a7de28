"""A run begins from a hub folder and exports to one, whatever its layout."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paceline.checkpoint.weights import ExportJob, ForeignWeights
from paceline.config.load import load_recipe, resolve
from paceline.errors import CheckpointError, ConfigError, TrainingError
from paceline.interop import formats
from paceline.interop.compare import logits_of
from paceline.interop.convert import Options, convert
from paceline.interop.hf_export import export_hub
from paceline.interop.sources import open_source
from paceline.observe.events import read_metrics
from paceline.runtime.process import ProcessInfo
from paceline.runtime.signals import StopRequest
from paceline.training.resume import refuse_start
from paceline.training.run import run_in_group
from tests import distributed
from tests.interop import hub_folders as hub
from tests.training.runs import write_dataset

LAYOUTS = [
    ("llama_biases", "flat", 2, []),
    ("llama_biases", "fsdp", 2, ["parallel.zero=3"]),
    ("gpt2", "tp and pp", 4, ["parallel.tp=2", "parallel.pp=2", "model.dropout=0.0", "model.attention_dropout=0.0"]),
    ("deepseek_v3", "tp and ep", 4, ["parallel.tp=2", "parallel.ep=2"]),
]


def recipe_of(source: Path, run_dir: Path, data: str, *more: str) -> list[str]:
    return [
        f"run.dir={run_dir}",
        f"model.init_from={source}",
        f"data.train={data}",
        "data.num_workers=1",
        "train.steps=2",
        "train.seq_len=16",
        "train.micro_batch_size=1",
        "train.global_batch_size=4",
        "train.precision=fp32",
        "train.gc_interval=0",
        "optim.lr=0.001",
        "optim.warmup_steps=0",
        "observe.log_interval=1",
        "observe.tensorboard=false",
        "observe.progress=none",
        "cluster.device=cpu",
        "checkpoint.export=hf",
        *more,
    ]


def train(rank: int, world_size: int, overrides: Sequence[str]) -> list[float]:
    recipe = resolve({}, list(overrides))
    formats.register(recipe.registry)
    info = ProcessInfo(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size)
    run_in_group(recipe, info, torch.device("cpu"), StopRequest())
    return [record.loss for record in read_metrics(Path(recipe.config.run.folder))]


def run(world_size: int, overrides: list[str]) -> list[float]:
    return distributed.run(train, world_size, overrides)[0]


@pytest.mark.parametrize(("name", "layout", "world_size", "more"), LAYOUTS, ids=lambda value: str(value)[:12])
def test_any_layout_reads_and_writes_the_same(
    name: str, layout: str, world_size: int, more: list[str], tmp_path: Path
) -> None:
    """Losses as Transformers' weights give them in one process; where nothing is learned, the bits that were read.

    2e-5 for losses of about 5: ranks sum in another order.
    """
    source, data = hub.save(name, tmp_path / "hf"), write_dataset(tmp_path / "data")
    still = ["optim.lr=1e-30", "optim.schedule=constant", "optim.min_lr=0", "model.moe.bias_update_rate=0"]
    both = [*still, *(option for option in more if option.startswith("model."))]
    alone = run(1, recipe_of(source, tmp_path / "alone", data, *both))
    found = run(world_size, recipe_of(source, tmp_path / "many", data, *still, *more))
    assert found == pytest.approx(alone, abs=2e-5)
    for folder in ("alone", "many"):
        assert hub.same(hub.tensors(source), hub.tensors(tmp_path / folder / "exports/step_00000002")), folder


def test_the_first_loss_is_transformers_own(tmp_path: Path) -> None:
    """The export loads in Transformers; its config, tokenizer and generation settings are those it came with."""
    source, data = hub.save("qwen3", tmp_path / "hf"), write_dataset(tmp_path / "data")
    (source / "tokenizer.json").write_text('{"a": 1}')
    run(1, recipe_of(source, tmp_path / "run", data, "checkpoint.export_interval=1", "train.precision=bf16"))
    exports = tmp_path / "run/exports"
    assert sorted(path.name for path in exports.iterdir()) == ["step_00000001", "step_00000002"]
    last = exports / "step_00000002"
    assert (last / "tokenizer.json").read_text() == '{"a": 1}' and (last / "generation_config.json").is_file()
    config = json.loads((last / "config.json").read_text())
    assert config.pop("dtype") == "bfloat16"
    assert config == {k: v for k, v in json.loads((source / "config.json").read_text()).items() if k != "dtype"}
    logits, ran_by = logits_of(open_source(last), hub.tokens())
    assert ran_by == "transformers" and logits.isfinite().all()
    convert(open_source(tmp_path / "run"), tmp_path / "converted", Options(to="hf", dtype="bf16"))
    assert hub.same(hub.tensors(tmp_path / "converted"), hub.tensors(last))
    assert {p.name for p in (tmp_path / "converted").iterdir()} == {p.name for p in last.iterdir()}


def test_a_head_that_is_not_the_tied_one_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = hub.save("llama_tied", tmp_path / "hf")
    hub.change_tensors(source, **{"lm_head.weight": torch.randn(101, 64)})
    recipe = resolve({}, [f"model.init_from={source}"])
    formats.register(recipe.registry)
    assert recipe.registry.weight_sources[0](source, recipe.config.model) is not None
    assert "lm_head.weight is stored with other values than embed.weight" in caplog.text


def test_a_converted_checkpoint_begins_the_same_run(tmp_path: Path) -> None:
    source, data = hub.save("llama", tmp_path / "hf"), write_dataset(tmp_path / "data")
    convert(open_source(source), tmp_path / "ours", Options(to="paceline"))
    from_hub = run(1, recipe_of(source, tmp_path / "a", data))
    from_ours = run(1, recipe_of(tmp_path / "ours", tmp_path / "b", data))
    assert from_hub == from_ours
    # the resolved recipe has the whole shape: it goes on where the first weights are gone
    recipe = load_recipe(tmp_path / "a/recipe.toml", ["model.init_from=nowhere"])
    assert recipe.config.model.num_layers == 2 and recipe.config.model.vocab_size == 101


def test_what_cannot_begin_or_be_exported_is_refused_before(tmp_path: Path) -> None:
    from paceline.config.check import check, refuse_errors

    with pytest.raises(ConfigError, match=r"model.init_from = 'nowhere' holds no model"):
        resolve({}, ["model.init_from=nowhere"])
    source = hub.save("llama", tmp_path / "hf")
    hub.change_config(source, hidden_act="relu")
    with pytest.raises(ConfigError, match="hidden_act"):
        resolve({}, [f"model.init_from={source}"])
    for overrides, message in (
        (["checkpoint.export=gguf"], "checkpoint.export = 'gguf' is not a format"),
        (["checkpoint.export=hf", "model.preset=gemma2_2b"], "no config of any known family"),
    ):
        recipe = resolve({}, overrides)
        with pytest.raises(ConfigError, match=message):
            refuse_errors(check(recipe.config, recipe.registry, 1))


def test_weights_of_another_shape_are_refused_by_name(tmp_path: Path) -> None:
    source, data = hub.save("llama", tmp_path / "hf"), write_dataset(tmp_path / "data")
    with pytest.raises(Exception, match=r"model.embed_tokens.weight is \[101, 64\] there") as caught:
        run(1, recipe_of(source, tmp_path / "run", data, "model.vocab_size=128"))
    assert "CheckpointError" in str(caught.value) or isinstance(caught.value, CheckpointError)


def test_a_plugin_brings_its_own_weights(tmp_path: Path) -> None:
    """The seam that hub folders use is open to others."""

    class Ones:
        def shapes(self):
            return self.all

        def dtype(self, name):
            return torch.float32

        def read(self, name, box=None):
            return torch.full(box.sizes, 0.5)

    recipe = resolve({}, ["model.num_layers=1", "model.hidden_size=64"])
    recipe.registry.weight_source(lambda path, model: ForeignWeights(weights=Ones()))
    (factory,) = recipe.registry.weight_sources
    assert isinstance(factory(tmp_path, recipe.config.model).weights, Ones)
    with pytest.raises(ConfigError, match="two plugins register the export 'x'"):
        recipe.registry.export("x", print)
        recipe.registry.export("x", print)


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def alone(overrides: Sequence[str], write: Callable[[ExportJob], None] = export_hub) -> None:
    """A run in this process, with ``write`` as its export."""
    recipe = resolve({}, list(overrides))
    formats.register(recipe.registry)
    recipe.registry.exports["hf"] = write
    run_in_group(recipe, ProcessInfo(), torch.device("cpu"), StopRequest())


def no_space(job: ExportJob) -> None:
    half = job.folder.with_name(f"{job.folder.name}.tmp-1234abcd")
    half.mkdir(parents=True)
    job.ranks.from_first(f"writing {job.folder}", lambda: full_disk())


def full_disk() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def interrupted(job: ExportJob) -> None:
    job.folder.with_name(f"{job.folder.name}.tmp-1234abcd").mkdir(parents=True)
    raise KeyboardInterrupt


@pytest.mark.parametrize("write", [no_space, interrupted])
def test_a_last_export_that_failed_is_finished_by_the_same_command(
    write: Callable[[ExportJob], None], tmp_path: Path, one_process: None
) -> None:
    source, data = hub.save("llama", tmp_path / "hf"), write_dataset(tmp_path / "data")
    recipe, folder = recipe_of(source, tmp_path / "run", data), tmp_path / "run"
    with pytest.raises((CheckpointError, KeyboardInterrupt)) as caught:
        alone(recipe, write)
    if write is no_space:
        assert "step_00000002 could not be written" in str(caught.value) and "Free space" in str(caught.value)
        assert f"paceline convert {folder}" in str(caught.value)
    assert not list((folder / "exports").iterdir()) and not (folder / "summary.json").exists()
    metrics = (folder / "metrics.jsonl").read_text()
    refuse_start(resolve({}, recipe).config)
    alone(recipe)
    assert [path.name for path in (folder / "exports").iterdir()] == ["step_00000002"]
    assert (folder / "metrics.jsonl").read_text() == metrics
    assert json.loads((folder / "summary.json").read_text())["steps"] == 2
    convert(open_source(folder), tmp_path / "converted", Options(to="hf"))
    assert hub.same(hub.tensors(tmp_path / "converted"), hub.tensors(folder / "exports/step_00000002"))
    with pytest.raises(TrainingError, match="nothing left to train") as nothing:
        alone(recipe)
    assert "paceline convert" in nothing.value.next_step


def test_an_export_from_before_the_run_went_back_is_written_anew(tmp_path: Path, one_process: None) -> None:
    source, data = hub.save("llama", tmp_path / "hf"), write_dataset(tmp_path / "data")
    exports = tmp_path / "run/exports"
    recipe = recipe_of(source, tmp_path / "run", data, "checkpoint.export_interval=1", "checkpoint.interval=1")
    alone(recipe)
    before = {step: hub.tensors(exports / f"step_0000000{step}") for step in (1, 2)}
    shutil.rmtree(tmp_path / "run/checkpoints/step_00000002")
    alone([*recipe, "optim.lr=0.1", "optim.schedule=constant", 'checkpoint.allow_change=["lr"]'])
    told = "".join(path.read_text() for path in (tmp_path / "run/logs").iterdir())
    assert "step_00000002 is from before" in told and "step_00000001 is from before" not in told
    assert hub.same(before[1], hub.tensors(exports / "step_00000001"))
    assert not hub.same(before[2], hub.tensors(exports / "step_00000002"))
    assert sorted(path.name for path in exports.iterdir()) == ["step_00000001", "step_00000002"]


def test_a_run_goes_on_when_its_first_weights_have_moved(tmp_path: Path, one_process: None) -> None:
    source, data = hub.save("llama", tmp_path / "hf"), write_dataset(tmp_path / "data")
    recipe = recipe_of(source, tmp_path / "run", data, "optim.schedule=constant")
    alone(recipe)
    source.rename(tmp_path / "moved")
    alone([*recipe, "train.steps=3"])
    assert [record.step for record in read_metrics(tmp_path / "run")] == [1, 2, 3]


def test_an_export_on_the_way_that_failed_is_written_first(tmp_path: Path, one_process: None) -> None:
    source, data = hub.save("llama", tmp_path / "hf"), write_dataset(tmp_path / "data")
    more = ["checkpoint.export_interval=1", "checkpoint.interval=1", "checkpoint.async_save=false"]
    recipe = recipe_of(source, tmp_path / "run", data, *more)
    with pytest.raises(CheckpointError, match="step_00000001 could not be written"):
        alone(recipe, no_space)
    assert (tmp_path / "run/checkpoints/step_00000001").is_dir()
    alone(recipe)
    exports = tmp_path / "run/exports"
    assert sorted(path.name for path in exports.iterdir()) == ["step_00000001", "step_00000002"]
