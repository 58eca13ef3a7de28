"""What the documentation shows is true: links, commands, recipe keys, the generated reference, the recipes."""

from __future__ import annotations

import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from paceline.cli.main import VERBS, _register, app
from paceline.config.check import check, refuse_errors
from paceline.config.load import field_names, load_recipe, parse_override
from paceline.config.run import RunConfig

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *DOCS.rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
    ]
)
RECIPES = sorted([*(ROOT / "recipes").glob("*.toml"), *(ROOT / "examples").rglob("*.toml")])
KEYS = frozenset(field_names(RunConfig))
SECTIONS = tuple(RunConfig.model_fields)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


# ---- reading markdown


@cache
def fences(page: Path) -> tuple[tuple[str, str], ...]:
    """(language, content) of the fenced blocks, indented ones too."""
    found = re.findall(r"^[ ]*```(\w*)\n(.*?)^[ ]*```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return tuple((language, content) for language, content in found)


@cache
def prose(page: Path) -> str:
    return re.sub(r"^[ ]*```.*?^[ ]*```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def inline_code(page: Path) -> list[str]:
    return [text.replace("\n", " ") for text in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose(page))]


def links(page: Path) -> list[str]:
    text = re.sub(r"`[^`]*`", "", prose(page))
    return re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"(?:src|srcset|href)=\"([^\"]+)\"", text)


@cache
def anchors(page: Path) -> frozenset[str]:
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name(page)}: {link}"
        assert target.is_relative_to(ROOT), f"{name(page)}: {link} leaves the repository"
        if anchor:
            assert anchor in anchors(target), f"{name(page)}: {link}: there is no such heading"


# ---- commands


@pytest.fixture(scope="module")
def command() -> Any:
    # other tests of this process may have registered some
    there = {each.name for each in (*app.registered_groups, *app.registered_commands)}
    _register(tuple(verb for verb in VERBS if verb not in there))
    return typer.main.get_command(app)


def commands(page: Path) -> Iterator[str]:
    """Command lines that start `paceline`, perhaps after a launcher."""
    for language, content in fences(page):
        if language in ("bash", "sh", "console", ""):
            for line in content.replace("\\\n", " ").splitlines():
                found = re.match(r"\s*(?:\$ )?(?:[A-Z_]+=\S+ )*(?:(?:srun|torchrun) .*?)?(?:-m )?(paceline .*)", line)
                if found:
                    yield found[1]
    for text in inline_code(page):
        if text.startswith("paceline ") and "..." not in text:
            yield text


def parse(command: Any, line: str) -> None:
    """Raises what the parser raises: unknown verbs and options, values that are missing, arguments too many."""
    words = shlex.split(line, comments=True)[1:]
    words = words[: words.index(">")] if ">" in words else words
    words = words[: words.index("|")] if "|" in words else words
    while hasattr(command, "commands"):
        options = [word for word in words if word.startswith("-")]
        if words and words[0] in command.commands:
            command, words = command.commands[words[0]], words[1:]
            continue
        if (default := getattr(command, "default_verb", "")) and words and words[0] not in ("-h", "--help"):
            command = command.commands[default]
            continue
        assert options or not words, f"{words[0]!r} is no verb of {sorted(command.commands)}"
        break
    _, left, _ = command.make_parser(command.context_class(command)).parse_args(list(words))
    assert not left, f"arguments that nothing takes: {left}"
    for place, word in enumerate(words):
        if word == "--set":
            assert_keys(parse_override(words[place + 1]))


def assert_keys(tables: dict[str, Any], prefix: str = "") -> None:
    for key, value in tables.items():
        dotted = f"{prefix}{key}"
        assert dotted in KEYS or dotted == "extends", f"{dotted} is no key of a recipe"
        if isinstance(value, dict):
            assert_keys(value, f"{dotted}.")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_exist(page: Path, command: Any) -> None:
    for line in commands(page):
        try:
            parse(command, line)
        except Exception as error:
            raise AssertionError(f"{name(page)}: {line}: {error}") from error


def test_the_commands_of_the_readme_are_found() -> None:
    lines = list(commands(ROOT / "README.md"))
    for verb in VERBS:
        assert any(line.startswith(f"paceline {verb}") for line in lines), f"the README does not show `paceline {verb}`"


def test_a_wrong_command_would_be_noticed(command: Any) -> None:
    for line in ("paceline trane x.toml", "paceline train x.toml --steps 3", "paceline train x --set train.stops=3"):
        with pytest.raises(Exception, match=r"trane|--steps|train\.stops"):
            parse(command, line)


# ---- recipe keys


# ids of findings begin as keys do
@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "findings"], ids=name)
def test_recipe_keys_exist(page: Path) -> None:
    pattern = re.compile(rf"(?<![\w./-])((?:{'|'.join(SECTIONS)})(?:\.[a-z_][a-z0-9_]*)+)")
    files = (".md", ".py", ".toml", ".json", ".jsonl")
    texts = inline_code(page) + [content for language, content in fences(page) if language in ("bash", "")]
    for text in texts:
        for key in pattern.findall(text):
            assert key in KEYS or key.endswith(files), f"{name(page)}: {key} is no key of a recipe"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_toml_examples_are_recipes(page: Path) -> None:
    for language, content in fences(page):
        if language == "toml":
            assert_keys(tomllib.loads(content))


# ---- generated and listed


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_recipe_reference_is_up_to_date() -> None:
    written = (DOCS / "reference" / "recipe.md").read_text(encoding="utf-8")
    assert written == _module(DOCS / "make_recipe_reference.py").text_of_page(), "run `scripts/docs reference`"


def test_every_id_of_a_recipes_checks_is_listed() -> None:
    """Of `doctor`, `explain` and `tune`: tests of their rooms."""
    written = (DOCS / "reference" / "findings.md").read_text(encoding="utf-8")
    ids = {found for found, _, _ in _module(DOCS / "make_finding_reference.py").found()}
    assert len(ids) > 60 and set(re.findall(r"^\| `([^`]+)`", written, re.MULTILINE)) == ids, "run `scripts/docs`"


@pytest.mark.parametrize("path", RECIPES, ids=name)
def test_recipes_load_and_pass_the_check(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # where run.plugins of the example is found
    recipe = load_recipe(path)
    cluster = recipe.config.cluster
    refuse_errors(check(recipe.config, recipe.registry, cluster.nodes * cluster.gpus_per_node or 1))


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [
        *project["dependencies"],
        *(item for extra in project["optional-dependencies"].values() for item in extra),
    ]
    page = (DOCS / "dependencies.md").read_text()
    for requirement in listed:
        package = re.match(r"[\w-]+", requirement)
        assert package is not None
        assert re.search(rf"\| {package[0]}\b", page), f"docs/dependencies.md does not say why {package[0]} is needed"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [page for page in DOCS.rglob("*.md") if page.parent.name != "measured" or page.name == "README.md"]
    for page in pages:
        assert str(page.relative_to(DOCS)) in navigation, f"{name(page)} is not in mkdocs.yml"


def test_every_recipe_is_described() -> None:
    described = (DOCS / "recipes.md").read_text()
    for path in (ROOT / "recipes").glob("*.toml"):
        assert f"`{name(path)}`" in described, f"docs/recipes.md does not describe {name(path)}"


def test_troubleshooting_quotes_real_messages() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "src").rglob("*.py")))
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # a message is often written over several lines
    rows = re.findall(r"^\| (.*?) \| .* \|$", (DOCS / "troubleshooting.md").read_text(), flags=re.MULTILINE)
    quoted = [row for row in rows if not row.startswith(("message", "---", "another complaint"))]
    assert len(quoted) > 20
    for row in quoted:
        for fragment in (part.strip(" ,:") for part in row.split("...")):
            assert len(fragment) < 4 or fragment in source, f"no message says {fragment!r} ({row})"
