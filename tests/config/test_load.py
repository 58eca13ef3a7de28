"""From files and overrides to a configuration: what is accepted, what is refused, and how it is said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from paceline.config.load import (
    ELSEWHERE,
    differences,
    dump_recipe,
    field_names,
    json_schema,
    load_recipe,
    parse_override,
    resolve,
)
from paceline.config.run import RunConfig
from paceline.errors import ConfigError


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_recipe_extends_another_and_is_overridden(tmp_path: Path) -> None:
    write(tmp_path, "base.toml", "[train]\nsteps = 5\nseq_len = 64\n[optim]\nlr = 0.001\n")
    recipe = write(tmp_path, "mine.toml", 'extends = "base.toml"\n[train]\nsteps = 7\n')
    config = load_recipe(recipe, ["optim.lr=0.002", "run.name=mine", 'data.train=[{path="a", weight=2}]']).config
    assert (config.train.steps, config.train.seq_len, config.optim.lr) == (7, 64, 0.002)
    assert config.run.name == "mine"
    assert not isinstance(config.data.train, str) and config.data.train[0].weight == 2


def test_the_resolved_recipe_runs_again_as_it_is(tmp_path: Path) -> None:
    first = resolve({"model": {"preset": "llama3_8b", "num_layers": 2}, "data": {"train": [{"path": "x"}]}}).config
    again = load_recipe(write(tmp_path, "recipe.toml", dump_recipe(first))).config
    assert again == first
    assert again.model.num_layers == 2 and again.model.hidden_size == 4096


@pytest.mark.parametrize(
    ("override", "guess"),
    [
        ("train.step=3", "train.steps"),
        ("trian.steps=3", "train"),
        ("train.learning_rate=3", ""),
        ("train.lr=0.1", "optim.lr"),
        ("parallel.tensor.x=1", ""),
        ("model.moe.aux_coef=1", "model.moe.aux_loss_coef"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(override: str, guess: str) -> None:
    with pytest.raises(ConfigError, match="unknown key") as error:
        resolve({}, [override])
    assert override.partition("=")[0].split(".")[0] in error.value.subject
    assert guess in error.value.next_step


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.steps=many", "train.steps = 'many'"),
        ("train.steps=0", "train.steps = 0"),
        ("train.precision=fp16", "train.precision = 'fp16'"),
        ("parallel.zero=4", "parallel.zero = 4"),
        ("optim.betas=[0.9, 1.5]", "optim.betas"),
        ("optim.min_lr=1.0", "optim.min_lr = 1.0 is above optim.lr"),
        ("train.micro_batch_size=3", "train.global_batch_size = 8 is not a multiple"),
        ("model.num_heads=3", "model.num_heads = 3 does not divide model.hidden_size = 256"),
        ("model.num_kv_heads=3", "model.num_kv_heads = 3 does not divide model.num_heads = 4"),
        ("model.top_k=2", "model.top_k = 2 without experts"),
        ("parallel.offload=parameters", "parallel.offload = 'parameters' needs parallel.zero = 3"),
        ("model.preset=lama3_8b", "llama3_8b"),
        ("data=corpus", "data = 'corpus' is not a section"),
        ("parallel.tp=true", "parallel.tp = true: true and false are no values of this field"),
        ("parallel.zero=false", "parallel.zero = false"),
        ("optim.lr=true", "optim.lr = true"),
        ("optim.betas=[true, 0.9]", "optim.betas = [true, 0.9]"),
        ("model.moe.num_groups=true", "model.moe.num_groups = true"),
        ("parallel.pipeline_layout=[true, 3]", "parallel.pipeline_layout = [true, 3]"),
        ("parallel.tp=1.5", "parallel.tp = 1.5"),
        ("parallel.recompute=ful", "Did you mean 'full'?"),
        ("parallel.recompute=3", "parallel.recompute = 3 is no mode"),
        ("parallel.recompute=[]", "names no mode"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_name(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve({} if "." in override else {"data": "corpus"}, [override] if "." in override else [])
    assert words in str(error.value)
    assert error.value.next_step


def test_a_refused_value_is_told_what_its_field_means() -> None:
    for override, needed, meaning in (
        ("parallel.order=tp", "a list is needed", "parallel.order: Axes from outermost to innermost"),
        ("model.moe=3", "a table of fields is needed", "model.moe: Everything else about experts."),
        ("parallel.zero=4", "0, 1, 2 or 3", "parallel.zero: What is sharded over `dp_shard`"),
        ("model.moe.score=x", "'softmax' or 'sigmoid'", "model.moe.score: How router logits become scores."),
    ):
        with pytest.raises(ConfigError) as error:
            resolve({}, [override])
        assert needed in error.value.subject and meaning in error.value.next_step


def test_names_of_other_systems_are_understood() -> None:
    known = set(field_names(RunConfig))
    for name, ours in ELSEWHERE.items():
        assert ours in known
        with pytest.raises(ConfigError) as error:
            resolve({}, [f"parallel.{name}=2"])
        assert f"Did you mean {ours}?" in error.value.next_step


def test_an_unknown_way_to_recompute_is_told_the_modes_and_the_list_form() -> None:
    for override in ("parallel.recompute=foo", 'parallel.recompute=["none", "foo"]'):
        with pytest.raises(ConfigError, match="foo") as error:
            resolve({}, [override])
        assert "'none', 'selective', 'full'" in error.value.evidence
        assert """--set 'parallel.recompute=["full", "none"]'""" in error.value.next_step


def test_numbers_may_be_written_in_another_way_but_not_as_truth() -> None:
    assert resolve({}, ["parallel.tp=2.0"]).config.parallel.tp == 2
    assert resolve({}, ["parallel.compile=true"]).config.parallel.compile
    for name, default in _numbers(RunConfig()):
        with pytest.raises(ConfigError, match="true and false"):
            resolve({}, [f"{name}={str(bool(default)).lower()}"])


def _numbers(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, float]]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", value


@pytest.mark.parametrize("text", ["steps=3", "train.steps", "=3", "train.=3"])
def test_an_override_has_one_form(text: str) -> None:
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        parse_override(text)


@pytest.mark.parametrize("name", ["inf", "nan", "2026", "1e3", "true", "2026-01-02"])
def test_a_name_that_looks_like_a_number_is_text(name: str) -> None:
    assert parse_override(f"run.name={name}") == parse_override(f'run.name="{name}"') == {"run": {"name": name}}
    assert resolve({}, [f"run.name={name}"]).config.run.name == name


def test_the_guess_is_never_the_section_itself() -> None:
    with pytest.raises(ConfigError) as error:
        resolve({}, ["train.x=1"])
    assert "Did you mean train?" not in error.value.next_step


def test_a_missing_recipe_names_those_that_are_there(tmp_path: Path) -> None:
    write(tmp_path, "demo.toml", "")
    with pytest.raises(ConfigError, match="there is no recipe") as error:
        load_recipe(tmp_path / "dem.toml")
    assert "demo.toml" in error.value.next_step


def test_broken_toml_and_circles_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_recipe(write(tmp_path, "broken.toml", "[train\n"))
    write(tmp_path, "a.toml", 'extends = "b.toml"\n')
    with pytest.raises(ConfigError, match="circle"):
        load_recipe(write(tmp_path, "b.toml", 'extends = "a.toml"\n'))


def test_the_schema_describes_every_field() -> None:
    schema = json.loads(json_schema())
    assert set(schema["properties"]) == set(RunConfig.model_fields)
    for definition in schema["$defs"].values():
        assert definition.get("description"), definition["title"]
    assert "train.micro_batch_size" in set(field_names(RunConfig))


def test_differences_name_keys_and_values() -> None:
    old, new = resolve({}).config, resolve({}, ["optim.lr=0.5", "train.steps=9"]).config
    assert differences(old, new) == {"optim.lr": (old.optim.lr, 0.5), "train.steps": (100, 9)}


def test_a_plugin_registers_a_preset(tmp_path: Path) -> None:
    plugin = write(
        tmp_path,
        "my_plugin.py",
        "def register(registry):\n"
        "    registry.preset('mine', {'num_layers': 3, 'hidden_size': 32, 'num_heads': 2, 'vocab_size': 99})\n",
    )
    recipe = resolve({"run": {"plugins": [str(plugin)]}, "model": {"preset": "mine", "vocab_size": 100}})
    assert (recipe.config.model.num_layers, recipe.config.model.vocab_size) == (3, 100)


@pytest.mark.parametrize("name", ["no_such_module_at_all", "no_such_file.py"])
def test_a_plugin_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="it cannot be imported"):
        resolve({"run": {"plugins": [name]}})


def test_a_plugin_without_register_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="register"):
        resolve({"run": {"plugins": [str(write(tmp_path, "empty_plugin.py", ""))]}})


def test_one_text_is_a_list_of_one(tmp_path: Path) -> None:
    plugin = write(tmp_path, "one.py", "def register(registry):\n    pass\n")
    config = resolve({}, [f"run.plugins={plugin}", "checkpoint.allow_change=lr"]).config
    assert config.run.plugins == (str(plugin),) and config.checkpoint.allow_change == ("lr",)


def test_a_run_folder_in_place_of_a_recipe_is_told_apart(tmp_path: Path) -> None:
    write(tmp_path, "recipe.toml", "")
    with pytest.raises(ConfigError) as error:
        load_recipe(tmp_path)
    assert str(tmp_path / "recipe.toml") in error.value.next_step
    with pytest.raises(ConfigError) as error:
        parse_override("steps=5")
    assert "train.steps=5" in error.value.next_step


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run.plugins=5", "run.plugins"),
        ("run.plugins=[1]", "run.plugins"),
        ("model.preset=5", "model.preset = '5' is not a known preset"),
        ('model.preset=["a"]', "model.preset"),
        ('parallel.order=["tp"]', "parallel.order = ['tp']"),
        ('model.rope_scaling={kind="yarn",factor=2,beta_fast=0}', "beta_fast = 0"),
        ('model.rope_scaling={kind="llama3",low_freq_factor=4}', "low_freq_factor = 4.0 is not below"),
        ("model.num_layers=1000000000000", "model.num_layers"),
        ("train.steps=3\nbogus=7", "train.steps"),
    ],
)
def test_what_is_read_before_validation_is_refused_by_name_too(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve({}, [override])
    assert words in str(error.value)


@pytest.mark.parametrize(
    "text", ["raise_it_now", "def register(registry):\n    return 1 / 0\n", "def register(registry):\n    None.x\n"]
)
def test_a_plugin_that_raises_is_told_with_its_line(text: str, tmp_path: Path) -> None:
    plugin = write(tmp_path, f"raises_{len(text)}.py", text)
    with pytest.raises(ConfigError, match="is not usable") as error:
        resolve({"run": {"plugins": [str(plugin)]}})
    assert "Error" in error.value.evidence and "line" in error.value.evidence
