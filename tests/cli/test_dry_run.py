"""`paceline train --dry-run` of layouts: quick, torch-free, and the numbers add up."""

from __future__ import annotations

import re
import tracemalloc
from pathlib import Path

import pytest

from paceline.cli.dry_run import dry_run
from paceline.cli.layout_tables import show_ranks
from paceline.config.load import load_recipe
from paceline.costs.hardware import find_hardware
from tests.cli.commands import paceline

RECIPES = Path(__file__).parent.parent.parent / "recipes"


PATIENCE = 30.0
"""Seconds, on a busy machine; an idle one needs one or two."""


def _shown(*arguments: str, seconds: float = 120.0) -> str:
    done = paceline("train", *arguments, "--dry-run", seconds=seconds)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _number(text: str) -> int:
    return int(text.replace(",", ""))


@pytest.mark.parametrize(
    ("recipe", "world_size", "model", "stages"),
    [("gpt3_175b", 1024, 174_604_259_328, 16), ("deepseek_v3", 2048, 682_636_472_320, 16)],
)
def test_large_layouts_are_shown_at_once_and_add_up(recipe: str, world_size: int, model: int, stages: int) -> None:
    text = _shown(str(RECIPES / f"{recipe}.toml"), seconds=PATIENCE)
    assert f"Mesh: {world_size:,} ranks" in text
    held, again, left = map(
        _number, re.findall(r"One copy of the model: ([\d,]+) .* - ([\d,]+) .*\n= ([\d,]+),", text)[0]
    )
    assert held - again == left == model
    assert len(re.findall(r"^\d+ +\d+ +\d+ +[\d-]+ .* %$", text, flags=re.MULTILINE)) == stages


def test_the_parameters_of_all_positions_add_up(tmp_path: Path) -> None:
    """Printed counts of a layout without tensor parallelism and with an untied head: their sum is the model's."""
    changes = ["model.preset=tiny_llama", "parallel.pp=4", "train.seq_len=128"]
    text = _shown(str(_empty(tmp_path)), "--nproc", "8", *(f"--set={change}" for change in changes))
    table = text.split("Parameters on each rank")[1]
    rows = re.findall(r"^(\d)(?:-(\d))? +\d+(?:, |-)\d+ +([\d,]+) ", table, flags=re.MULTILINE)
    held = [(int(last or first) - int(first) + 1, _number(count)) for first, last, count in rows]
    assert sum(positions for positions, _ in held) == 4
    assert f"= {sum(positions * count for positions, count in held):,}, the model's" in table


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


def test_a_million_ranks_are_shown_at_once_in_bounded_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ["train.global_batch_size=1000000"]
    text = _shown(str(_empty(tmp_path)), "--nproc", "1000000", f"--set={changes[0]}", seconds=PATIENCE)
    recipe = load_recipe(_empty(tmp_path), changes)
    tracemalloc.start()
    try:
        dry_run(recipe, 1_000_000)
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()
    assert capsys.readouterr().out == text
    assert "Mesh: 1,000,000 ranks" in text and "0-999999" in text and len(text.splitlines()) < 60
    refused = paceline("train", str(_empty(tmp_path)), "--dry-run", "--nproc", "1000000000")
    assert refused.returncode == 2 and "1,000,000,000 ranks are more than 1,048,576" in refused.stderr


@pytest.mark.parametrize("recipe", ["gpt3_175b", "deepseek_v3", "tiny_moe", "qwen3_moe_12l"])
def test_tables_can_be_read_on_110_columns(recipe: str) -> None:
    tables, _, _ = _shown(str(RECIPES / f"{recipe}.toml")).partition("\nnote: ")
    assert [line for line in tables.splitlines() if len(line) > 110] == []


def test_long_pipelines_lose_their_middle(tmp_path: Path) -> None:
    changes = ["model.num_layers=128", "parallel.pp=128", "train.global_batch_size=256"]
    text = _shown(str(_empty(tmp_path)), *(f"--set={change}" for change in changes))
    assert "... 96 more" in text and len(text.splitlines()) < 125
    assert re.search(r"^1-126 +1-126 ", text, flags=re.MULTILINE)  # positions that hold the same are one row


@pytest.mark.parametrize(
    ("changes", "row"),
    [
        ([], r"ranks +1 +nothing says otherwise: --nproc N"),
        (["parallel.tp=2", "parallel.pp=2"], r"ranks +4 +the fewest that the layout fits \(or --nproc N\)"),
        (["parallel.dp_shard=2", "parallel.cp=2"], r"ranks +4 +the fewest"),
        (["model.num_experts=4", "model.top_k=2", "parallel.ep=4", "parallel.pp=2"], r"ranks +8 +the fewest"),
        (
            ["cluster.nodes=1", "cluster.gpus_per_node=4"],
            r"ranks +4 +cluster.nodes 1 x cluster.gpus_per_node 4 \(or --nproc N\)",
        ),
    ],
)
def test_the_number_of_ranks_is_said_with_who_chose_it(tmp_path: Path, changes: list[str], row: str) -> None:
    assert re.search(row, _shown(str(_empty(tmp_path)), *(f"--set={change}" for change in changes)))


def test_cards_are_judged() -> None:
    llama = str(RECIPES / "llama3_8b.toml")
    text = _shown(llama, "--nproc", "8", "--set=cluster.gpu=H100 SXM", "--set=parallel.zero=1")
    total = float(re.findall(r"^total +([\d.]+) GiB", text, flags=re.MULTILINE)[0]) * 2**30
    lines = dict(
        line.split(": ", 1) for line in text.splitlines() if line.startswith(("fits", "tight", "does not fit"))
    )
    for verdict, low, high in (("fits", 0.0, 0.8), ("tight", 0.8, 1.0), ("does not fit", 1.0, 1e9)):
        for name in filter(None, lines.get(verdict, "").split(", ")):
            card = find_hardware(name)
            assert card is not None and low <= total / card.memory_bytes <= high
    own = find_hardware("H100 SXM")
    assert own is not None
    assert f"cluster.gpu: {total / own.memory_bytes:.0%} of the 78.80 GiB of H100 SXM" in text
    assert "warning: the estimate is" in text
    # only what would still help is proposed
    step = text.split("warning: the estimate is")[1]
    ways = re.findall(r"((?:--set \S+ )+)\(([\d.]+) GiB\)", step)
    assert len(ways) >= 3 and "micro_batch_size" not in step
    zero3 = next(sets for sets, _ in ways if "zero=3" in sets)
    assert "--set parallel.accumulate_dtype=fp32" in zero3  # or it would be refused
    for sets, told in ways[:2]:
        again = _shown(llama, "--nproc", "8", *sets.split())
        assert re.search(rf"^total +{told} GiB", again, flags=re.MULTILINE) and float(told) * 2**30 < total


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


def test_rows_are_counted_and_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text('{"instruction": "a", "output": "b"}\n' * 40)
    options = ["task.kind=sft", "data.tokenizer=byte", "data.template=zephyr", "model.vocab_size=257"]
    dry_run(load_recipe(RECIPES / "tiny.toml", [f"data.train={path}", *options]), 1)
    text = capsys.readouterr().out
    assert "40 examples in 20 sequences" in text
    assert "causal attention within documents, no recomputation" in text
    assert sorted(tmp_path.iterdir()) == [path]


def test_adapters_are_counted() -> None:
    """The model's own parameters and the adapters', and next to no masters."""
    shown = " ".join(_shown(str(RECIPES / "lora_llama3_8b.toml")).split())
    assert "that learn 41.9M 41,943,040, adapters of rank 16" in shown
    assert "= 8,072,204,288, the model's, 41,943,040 of them adapters'." in shown
    assert "masters 0.16 GiB" in shown and "model.init_from is empty" in shown


def test_where_no_single_change_fits_the_planners_layout_is_named(tmp_path: Path) -> None:
    recipe = _empty(tmp_path)
    changes = ["model.preset=llama2_7b", "train.seq_len=4096", "train.global_batch_size=128", "cluster.gpu=RTX 4090"]
    text = _shown(str(recipe), "--nproc", "8", *(f"--set={change}" for change in changes))
    told = text.partition("→ Try ")[2].partition("which `paceline plan` finds; or more ranks.")[0]
    more = re.findall(r"--set (\S+=\S+)", told)
    assert more, text
    again = _shown(str(recipe), "--nproc", "8", *(f"--set={change}" for change in [*changes, *more]))
    share = re.search(r"cluster.gpu: (\d+)% of the", again)
    assert share is not None and int(share[1]) <= 100
