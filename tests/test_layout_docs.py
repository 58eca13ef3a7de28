"""The support table is what the check says, and the layouts that the guide shows are layouts that work."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest

from paceline.config.check import check, refuse_errors
from paceline.config.exclusions import EXCLUSIONS
from paceline.config.load import load_recipe

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    path = DOCS / "make_layout_reference.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_layout_reference_is_up_to_date(generator: ModuleType) -> None:
    written = (DOCS / "reference" / "layouts.md").read_text(encoding="utf-8")
    assert written == generator.text_of_page(), "run `scripts/docs reference`"


def test_each_option_of_the_table_works_alone(generator: ModuleType) -> None:
    for choice in generator.CHOICES:
        assert generator.refusal(choice) is None, choice.name


def test_every_exclusion_is_in_the_table(generator: ModuleType) -> None:
    page = generator.text_of_page()
    for row in EXCLUSIONS:
        assert row.because in page, f"no pair of docs/make_layout_reference.py meets {row.id}"


def test_refusals_are_of_options_not_of_sizes(generator: ModuleType) -> None:
    """The small recipe of the table has sizes that every degree divides."""
    page = generator.text_of_page()
    refused = re.findall(r"^\d+\. (.*)$", page, flags=re.MULTILINE)
    assert refused
    assert all(" with " in reason or reason.startswith("parallel.offload") for reason in refused)


def test_the_layouts_of_the_guide_work() -> None:
    page = (DOCS / "parallelism.md").read_text(encoding="utf-8").replace("\\\n", " ")
    commands = [shlex.split(line) for line in re.findall(r"^paceline train .*$", page, flags=re.MULTILINE)]
    assert len(commands) == 12
    for words in commands:
        overrides = [words[place + 1] for place, word in enumerate(words) if word == "--set"]
        recipe = load_recipe(ROOT / words[2], overrides)
        ranks = int(words[words.index("--nproc") + 1])
        found = check(recipe.config, recipe.registry, ranks)
        refuse_errors(found)
        assert [finding.subject for finding in found if finding.severity == "warning"] == [], words
