"""`paceline train --dry-run` of layouts: quick, torch-free, and the numbers add up."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from paceline.cli.layout_tables import show_ranks
from tests.cli.commands import paceline

RECIPES = Path(__file__).parent.parent.parent / "recipes"


def _shown(*arguments: str) -> str:
    done = paceline("train", *arguments, "--dry-run")
    assert done.returncode == 0, done.stderr
    return done.stdout


def _number(text: str) -> int:
    return int(text.replace(",", ""))


@pytest.mark.parametrize(
    ("recipe", "world_size", "model", "stages"),
    [("gpt3_175b", 1024, 174_604_259_328, 16), ("deepseek_v3", 2048, 682_636_472_320, 16)],
)
def test_large_layouts_are_shown_in_seconds_and_add_up(recipe: str, world_size: int, model: int, stages: int) -> None:
    start = time.monotonic()
    text = _shown(str(RECIPES / f"{recipe}.toml"))
    assert time.monotonic() - start < 5
    assert f"Mesh: {world_size:,} ranks" in text
    held, again, left = map(
        _number, re.findall(r"One copy of the model: ([\d,]+) .* - ([\d,]+) .* = ([\d,]+),", text)[0]
    )
    assert held - again == left == model
    assert len(re.findall(r"^\d+ +\d+ +\d+ +[\d-]+ .* %$", text, flags=re.MULTILINE)) == stages


def test_the_parameters_of_all_positions_add_up(tmp_path: Path) -> None:
    """Printed counts of a layout without tensor parallelism and with an untied head: their sum is the model's."""
    changes = ["model.preset=tiny_llama", "parallel.pp=4", "train.seq_len=128"]
    text = _shown(str(_empty(tmp_path)), "--nproc", "8", *(f"--set={change}" for change in changes))
    table = text.split("What each rank holds")[1]
    counts = re.findall(r"^\d +\d+, \d+ +([\d,]+) ", table, flags=re.MULTILINE)
    assert len(counts) == 4
    assert f"= {sum(map(_number, counts)):,}, the model's" in table


def test_the_mesh_tells_who_is_where(tmp_path: Path) -> None:
    changes = [
        *("model.preset=tiny_moe", "train.seq_len=128", "train.global_batch_size=16", "cluster.gpus_per_node=4"),
        *("parallel.tp=2", "parallel.pp=2", "parallel.ep=4", "parallel.etp=1"),
    ]
    text = _shown(str(_empty(tmp_path)), "--nproc", "16", *(f"--set={change}" for change in changes))
    rows = {line.split()[0]: line for line in text.split("Mesh:")[1].split("Pipeline stages")[0].splitlines() if line}
    assert re.match(r"pp +2 +8 +0, 8 +over 2 nodes", rows["pp"])
    assert re.match(r"dp_shard +4 +2 +0, 2 ... 6 +over 2 nodes", rows["dp_shard"])
    assert re.match(r"tp +2 +1 +0, 1 +inside a node", rows["tp"])
    assert re.match(r"ep +4 +1 +0-3 +inside a node", rows["ep"])
    assert re.match(r"edp +2 +4 +0, 4 +over 2 nodes", rows["edp"])


def test_layers_that_do_not_divide_get_a_layout(tmp_path: Path) -> None:
    """Case 78: 46 layers over 4 stages: the flag for the layout, and the memory of each stage."""
    changes = ["model.num_layers=46", "parallel.pp=4", "model.hidden_size=512", "model.num_heads=8"]
    text = _shown(str(_empty(tmp_path)), "--nproc", "4", *(f"--set={change}" for change in changes))
    layout = re.findall(r"parallel.pipeline_layout = \[(.*)\]", text)[0]
    assert sum(int(layers) for layers in layout.split(", ")) == 46
    again = _shown(
        str(_empty(tmp_path)),
        *("--nproc", "4", f"--set=parallel.pipeline_layout=[{layout}]"),
        *(f"--set={change}" for change in changes),
    )
    assert again.replace("as the recipe says", "cut by cost") == text


def test_the_machines_of_the_recipe_say_how_many_ranks(tmp_path: Path) -> None:
    changes = ["cluster.nodes=2", "cluster.gpus_per_node=4"]
    assert "Mesh: 8 ranks" in _shown(str(_empty(tmp_path)), *(f"--set={change}" for change in changes))


def _empty(folder: Path) -> Path:
    path = folder / "recipe.toml"
    path.write_text("")
    return path


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "3"),
        ([0, 1], "0, 1"),
        (range(8), "0-7"),
        (range(0, 64, 8), "0, 8 ... 56"),
        ([0, 64], "0, 64"),
        ([0, 1, 8, 9], "0, 1, 8 ... 9"),
    ],
)
def test_ranks_are_shown_briefly(ranks: list[int], text: str) -> None:
    assert show_ranks(list(ranks)) == text
