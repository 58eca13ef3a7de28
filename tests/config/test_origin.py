"""The shape of a model that starts from weights, while they are there and when they are gone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from paceline.config.load import dump_recipe, resolve
from paceline.errors import ConfigError
from tests.config.test_hub import LLAMA_3_1

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}


@pytest.fixture
def begun(tmp_path: Path) -> list[str]:
    """The overrides of a run that began from a hub folder, has a checkpoint, and whose first weights are gone."""
    hub, run = tmp_path / "hub", tmp_path / "run"
    hub.mkdir()
    (hub / "config.json").write_text(json.dumps(LLAMA_3_1 | SIZES | {"num_key_value_heads": 2, "vocab_size": 101}))
    overrides = [f"run.dir={run}", f"model.init_from={hub}", "model.dropout=0.1"]
    recipe = dump_recipe(resolve({}, overrides).config)
    (run / "checkpoints/step_00000003").mkdir(parents=True)
    (run / "checkpoints/step_00000003/manifest.json").write_text("{}")
    (run / "recipe.toml").write_text(recipe)
    shutil.rmtree(hub)
    return overrides


def test_a_run_goes_on_when_the_weights_it_began_with_are_gone(begun: list[str], tmp_path: Path) -> None:
    config = resolve({}, begun).config
    assert dump_recipe(config) == (tmp_path / "run/recipe.toml").read_text()
    # what the recipe gives still wins, so that a change is seen and refused as any other
    assert resolve({}, [*begun, "model.num_layers=3"]).config.model.num_layers == 3


@pytest.mark.parametrize("change", ["no checkpoint", "never", "other weights", "other run", "no recipe"])
def test_nothing_is_taken_from_a_run_that_is_not_gone_on_with(begun: list[str], change: str, tmp_path: Path) -> None:
    if change == "no checkpoint":
        shutil.rmtree(tmp_path / "run/checkpoints")
    if change == "no recipe":
        (tmp_path / "run/recipe.toml").unlink()
    more = {
        "never": ["checkpoint.resume=never"],
        "other weights": ["model.init_from=mistyped"],
        "other run": [f"run.dir={tmp_path / 'new'}"],
    }
    with pytest.raises(ConfigError, match="holds no model that can be read"):
        resolve({}, [*begun, *more.get(change, [])])
