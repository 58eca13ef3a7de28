"""A run folder holds the tokenizer and the template that its data were read with, and gives both back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from paceline.checkpoint import weights
from paceline.data import kept_tokenizer as kept
from paceline.data.chat_template import load_template, template_source
from paceline.data.tokenizer import load_tokenizer
from paceline.errors import DataError

OWN = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
CALLS = "tools: " + OWN


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a tokenizer, two templates and a name for the end."""
    folder = tmp_path / "model"
    folder.mkdir()
    Tokenizer(models.WordLevel({"a": 0, "<stop>": 1, "</s>": 2}, unk_token="a")).save(str(folder / "tokenizer.json"))
    templates = [{"name": "default", "template": OWN}, {"name": "tool_use", "template": CALLS}]
    config = {"eos_token": {"content": "<stop>"}, "chat_template": templates}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "special_tokens_map.json").write_text("{}")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "recipe.toml").write_text("")
    return folder


def test_the_tokenizer_s_own_template_comes_back_whole(model: Path, run: Path) -> None:
    before = load_template("", load_tokenizer(model))
    kept.keep(run, str(model / "tokenizer.json"))
    for _ in range(2):  # also without what it was copied from
        tokenizer = load_tokenizer(run)
        assert Path(tokenizer.name) == run / "tokenizer" / "tokenizer.json"
        after = load_template(kept.template_of_run(run), tokenizer)
        assert after.fingerprint == before.fingerprint and after.with_tools == CALLS
        model.rename(model.with_name("gone")) if model.exists() else None


@pytest.mark.parametrize("from_checkpoint", [False, True])
def test_a_named_template_is_the_one_that_was_used(model: Path, run: Path, from_checkpoint: bool) -> None:
    (run / "recipe.toml").write_text('[data]\ntemplate = "chatml"\n')
    kept.keep(run, str(model / "tokenizer.json"), template_source("chatml"))
    place = run
    if from_checkpoint:
        place = run / "checkpoints" / "step_00000001"
        place.mkdir(parents=True)
        (place / "recipe.toml").write_text((run / "recipe.toml").read_text())
    tokenizer = load_tokenizer(place)
    expected = load_template("chatml", load_tokenizer(model)).fingerprint
    assert load_template(kept.template_of_run(place), tokenizer).fingerprint == expected
    assert load_template("", tokenizer).fingerprint == expected, "by the file alone too"


def test_bytes_have_no_file_but_are_kept(run: Path) -> None:
    kept.keep(run, "byte", template_source("zephyr"))
    assert load_tokenizer(run).name == "byte"
    assert load_template(kept.template_of_run(run), load_tokenizer(run)).source == template_source("zephyr")


def test_runs_that_kept_the_file_alone(model: Path, run: Path) -> None:
    """As earlier versions did: the template lies beside the same tokenizer in hub/, or is named by the recipe."""
    for name in ("tokenizer", "hub"):
        (run / name).mkdir()
        (run / name / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    (run / "hub" / "tokenizer_config.json").write_bytes((model / "tokenizer_config.json").read_bytes())
    assert load_template(kept.template_of_run(run), load_tokenizer(run)).source == OWN
    (run / "recipe.toml").write_text('[data]\ntemplate = "chatml"\n')
    assert load_template(kept.template_of_run(run), load_tokenizer(run)).source == template_source("chatml")


def test_what_is_there_stays(model: Path, run: Path) -> None:
    kept.keep(run, str(model / "tokenizer.json"))
    before = {path.name: path.read_bytes() for path in (run / "tokenizer").iterdir()}
    (model / "tokenizer.json").write_text("another")
    kept.keep(run, str(model / "tokenizer.json"))
    assert {path.name: path.read_bytes() for path in (run / "tokenizer").iterdir()} == before


@pytest.mark.parametrize(
    "recipe", ["", "not = [toml", '[data]\ntokenizer = "gone.json"\n', '[data]\ntokenizer = "{run}"\n']
)
def test_a_run_without_one_is_told_as_such(run: Path, recipe: str) -> None:
    (run / "recipe.toml").write_text(recipe.replace("{run}", str(run)))
    with pytest.raises(DataError, match="this run has no tokenizer"):
        load_tokenizer(run)


def test_both_rooms_mean_the_same_folder() -> None:
    assert kept.COMPANIONS == weights.COMPANIONS
