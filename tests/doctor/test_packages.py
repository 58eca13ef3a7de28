"""Optional packages that a recipe needs are named before it is started."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from typing import Any

import pytest

from paceline.cli.dry_run import dry_run
from paceline.config.load import load_recipe, resolve
from paceline.doctor.packages import judge_packages
from tests.cli.test_dry_run import RECIPES


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python without any of the optional packages."""
    real = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name in ("torchao", "wandb", "mlflow", "trackio") else real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)


@pytest.mark.parametrize(
    ("sections", "option", "extra"),
    [
        ({"lora": {"rank": 4, "base": "nf4"}}, "lora.base = 'nf4'", "-e '.[qlora]'"),
        ({"optim": {"name": "adamw8bit"}}, "optim.name = 'adamw8bit'", "-e '.[lowbit]'"),
        ({"observe": {"wandb_project": "p"}}, "observe.wandb_project = 'p'", "-e '.[wandb]'"),
        ({"observe": {"mlflow_experiment": "p"}}, "observe.mlflow_experiment = 'p'", "-e '.[mlflow]'"),
        ({"observe": {"trackio_project": "p"}}, "observe.trackio_project = 'p'", "-e '.[trackio]'"),
    ],
)
def test_a_package_that_is_not_here_is_named(bare: None, sections: dict[str, Any], option: str, extra: str) -> None:
    (found,) = judge_packages(resolve(sections).config)
    assert found.severity == "warning" and found.subject.startswith(f"{option} needs the package ")
    assert extra in found.next_step and "--set " in found.next_step


def test_what_the_recipe_does_not_use_is_not_asked_for(bare: None) -> None:
    assert not list(judge_packages(resolve({"lora": {"base": "nf4"}}).config))
    assert not list(judge_packages(resolve({"lora": {"rank": 4}}).config))


def test_what_is_here_is_not_told() -> None:
    pytest.importorskip("torchao")
    assert not list(judge_packages(resolve({"lora": {"rank": 4, "base": "nf4"}}).config))


def test_the_dry_run_tells_it(bare: None, capsys: pytest.CaptureFixture[str]) -> None:
    dry_run(load_recipe(RECIPES / "lora_llama3_8b.toml", ["lora.base=nf4", "parallel.compile=false"]), 1)
    assert "lora.base = 'nf4' needs the package torchao, which is not here" in capsys.readouterr().out
