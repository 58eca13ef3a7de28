"""`paceline plan` as a user runs it: without torch, in seconds, with clear answers to wrong questions."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from paceline.cli.plan import app
from paceline.errors import PacelineError
from tests.cli.commands import paceline
from tests.report.pages import assert_readable

ROOT = Path(__file__).parent.parent.parent
RECIPES = ROOT / "recipes"
MEGATRON = ROOT / "tests" / "planner" / "megatron"

PATIENCE = 30.0
"""Seconds, on a busy machine; the target of 10 is that of an idle one."""

LLAMA = ("llama3_8b", "--gpus", "64", "--gpu", "H100-80")


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def plan(*arguments: str) -> Done:
    """`paceline plan` in this process, which saves a second; errors as `paceline.cli.main` would tell them."""
    found = CliRunner().invoke(app, arguments)
    problem = found.exception
    if isinstance(problem, PacelineError):
        return Done(problem.exit_code, found.stdout, str(problem))
    assert problem is None or isinstance(problem, SystemExit), repr(problem)
    return Done(found.exit_code, found.stdout, found.stderr)


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder in front of the path in which torch cannot be imported."""
    folder = tmp_path_factory.mktemp("no_torch")
    (folder / "torch.py").write_text("raise ImportError('there is no torch here')\n")
    return str(folder)


COMMANDS: dict[str, tuple[str, ...]] = {
    "layouts": LLAMA,
    "layouts of 1024 GPUs": ("qwen3_235b_a22b", "--gpus", "1024", "--gpu", "H100-80"),
    "memory": (str(RECIPES / "gpt3_175b.toml"), "--gpu", "A100-80", "--explain-memory"),
    "fit": ("fit", "--model", "llama3_70b", "--gpu", "H100-80", "--tokens", "1T", "--days", "30"),
    "megatron": ("megatron", str(MEGATRON / "gpt3_175b_slurm.sh"), "--gpu", "A100-80"),
    "validate": ("validate", "RUNS", "--framework", "paceline"),
    "simulate": ("simulate", str(RECIPES / "gpt3_175b.toml"), "--gpu", "A100-80", "--slow-rank", "70:1.2"),
}


def _runs(folder: Path) -> str:
    """A table of three runs, one of which cannot be scored."""
    columns = (
        "id,model,layers,hidden,heads,ffn,vocab,seq,gpu,n_gpus,precision,tp,pp,dp,zero,mbs,gbs,step_time_s,mem_GiB"
    )
    whole = "m,16,2048,16,8192,32000,2048,H100-80,8,bf16,1,1,8,1,1,8,0.1,30"
    file = folder / "runs.csv"
    file.write_text(
        "\n".join(
            (
                columns,
                f"a,{whole}",
                f"b,{whole.replace('0.1,30', '0.12,31')}",
                f"c,{whole.replace('2048,16', '2048,', 1)}",
            )
        )
    )
    return str(file)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_verb_answers_in_seconds_without_torch(name: str, without_torch: str, tmp_path: Path) -> None:
    arguments = [_runs(tmp_path) if argument == "RUNS" else argument for argument in COMMANDS[name]]
    done = paceline("plan", *arguments, seconds=PATIENCE, PYTHONPATH=f"{without_torch}:{ROOT / 'src'}")
    assert done.returncode == 0, done.stderr
    assert done.stdout


def _json(*arguments: str) -> Any:
    done = plan(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_json_is_an_array_of_layouts_best_first() -> None:
    found = _json(*LLAMA, "--top", "5")
    assert len(found) == 5
    speeds = [one["tokens_per_second_per_gpu"] for one in found[1:]]
    assert found[0]["tokens_per_second_per_gpu"] >= 0.99 * speeds[0]
    assert speeds == sorted(speeds, reverse=True)
    for one in found:
        assert {"step_seconds", "mfu", "memory_gib", "fits"} <= one.keys()
        assert one["parallel"]["tp"] >= 1
        assert one["train"]["global_batch_size"] == 128
        assert "causal" in one["mfu_convention"]
        tokens = one["train"]["global_batch_size"] * one["train"]["seq_len"]
        assert one["tokens_per_second_per_gpu"] * 64 * one["step_seconds"] == pytest.approx(tokens)


def test_the_choice_is_written_as_a_recipe_that_runs(tmp_path: Path) -> None:
    target = tmp_path / "best.toml"
    recipe = str(RECIPES / "llama3_8b.toml")
    changes = ("--set", "train.global_batch_size=128", "--set", "optim.lr=2e-4")
    done = plan(recipe, "--gpus", "16", "--gpu", "H100-80", *changes, "--write", str(target))
    assert done.returncode == 0, done.stderr
    tables = tomllib.loads(target.read_text())
    assert tables["optim"] == {"lr": 2e-4}
    assert tables["run"] == {"name": "best"}
    assert tables["train"]["global_batch_size"] == 128
    again = paceline("train", str(target), "--dry-run", "--nproc", "16")
    assert again.returncode == 0, again.stderr
    refused = plan(recipe, "--gpus", "16", "--gpu", "H100-80", "--write", str(target))
    assert refused.returncode == 2
    assert "exists" in refused.stderr


def test_four_cards_of_24_gb_are_answered_plainly_and_the_recipe_has_a_name(tmp_path: Path) -> None:
    target = tmp_path / "my_7b.toml"
    done = plan("llama2_7b", "--gpus", "4", "--gpu", "RTX 4090", "--write", str(target))
    assert done.returncode == 0, done.stderr
    answer = done.stdout.index("Nothing fits with AdamW's state on the cards: 6.74B parameters take 16 bytes each")
    assert done.stdout.index("Does it fit?") < answer < done.stdout.index("Layouts, predicted")
    written = tomllib.loads(target.read_text())
    assert written["run"] == {"name": "my_7b"}
    # it says for how many cards it is, so nobody asks again
    assert written["cluster"]["nodes"] == 1 and written["cluster"]["gpus_per_node"] == 4
    again = plan(str(target), "--explain-memory")
    assert again.returncode == 0, again.stderr
    assert "on 4 x RTX 4090" in again.stdout


def test_the_page_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "plan.html"
    done = plan("llama2_7b", "--gpus", "8", "--gpu", "A100-80", "--html", str(target))
    assert done.returncode == 0, done.stderr
    text = target.read_text()
    assert text.count("<svg") == 3
    assert_readable(text)
    assert f"written: {target}" in done.stdout
    bars = text.partition("Where a step goes")[2].partition("</svg>")[0]
    names = re.findall(r'text-anchor="end">([^<]*)<', bars)
    assert len(names) == len({name.partition(". ")[2] for name in names}) == 10 and "…" not in bars
    assert not re.search(r"e\+\d\d", bars) and re.search(r">\d+\.\d+ s<", bars)


def test_a_page_without_layouts_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "plan.html"
    done = plan("llama2_70b", "--gpus", "4", "--gpu", "RTX 4090", "--html", str(target))
    assert done.returncode == 2 and "without layouts" in done.stderr and not target.exists()
    assert "Nothing fits, not with the optimizer's state in host memory either" in done.stdout


def test_money_days_and_the_convention_are_shown() -> None:
    done = plan(*LLAMA, "--tokens", "1T", "--price", "2")
    assert "GPU-hours" in done.stdout
    assert "at $2 a GPU-hour" in done.stdout
    assert "causal attention" in done.stdout
    assert "In place of it" in done.stdout
    assert "Not in the table" in done.stdout


WRONG: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "model": (("lama3_8b", "--gpus", "8", "--gpu", "H100"), ("no recipe or preset", "llama3_8b", "[model]")),
    "gpu": (("llama3_8b", "--gpus", "8", "--gpu", "H1000"), ("H100 SXM", "memory_tb_per_s")),
    "no gpu": (("llama3_8b", "--gpus", "8"), ("which GPU", "my_gpu.toml")),
    "no gpus": (("llama3_8b", "--gpu", "H100"), ("how many GPUs",)),
    "interconnect": ((*LLAMA, "--interconnect", "ib4000"), ("ib400",)),
    "objective": ((*LLAMA, "--objective", "speed"), ("throughput, memory, cost",)),
    "key": ((*LLAMA, "--set", "parallel.tpp=2"), ("parallel.tp",)),
    "axis": ((*LLAMA, "--only", "dp=2"), ("Axes are tp",)),
    "impossible layout": ((*LLAMA, "--only", "tp=6"), ("does not make", "Nearest layouts")),
    "heads": (
        ("qwen2.5_7b", "--gpus", "8", "--gpu", "H100", "--only", "tp=8"),
        ("does not divide model.num_heads = 28", "Nearest layout"),
    ),
    "length": ((*LLAMA, "--set", "train.seq_len=100000"), ("longer than model.max_seq_len",)),
    "batch": (
        ("llama3_8b", "--gpus", "7", "--gpu", "H100", "--set", "train.global_batch_size=5", "--only", "tp=1,pp=1,cp=1"),
        ("7",),
    ),
    "tokens": ((*LLAMA, "--tokens", "many"), ("--tokens 1T",)),
    "verb": (("fitt", "--model", "llama3_8b"), ("neither a verb", "paceline plan fit?")),
    "megatron file": (("megatron", "no_such.sh"), ("no launch script",)),
    "megatron flags": (("megatron", "--micro-batch-size 1"), ("--num-layers is not given",)),
    "slow rank": (("simulate", *LLAMA, "--slow-rank", "64:2"), ("ranks 0 to 63",)),
    "days": (("fit", "--model", "llama3_8b", "--gpu", "H100", "--tokens", "x", "--days", "3"), ("--tokens 1T",)),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_questions_get_clear_answers(name: str) -> None:
    arguments, words = WRONG[name]
    done = plan(*arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert not done.stdout, "told before any work"
    for word in words:
        assert word in done.stderr, done.stderr


def test_an_own_gpu_is_taken_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('name = "Mine"\nbf16 = 200\nmemory_gb = 48\nmemory_tb_per_s = 1.2\npcie_gb_per_s = 31\n')
    done = plan("llama2_7b", "--gpus", "8", "--gpu", str(file))
    assert done.returncode == 0, done.stderr
    assert "8 x Mine" in done.stdout


def test_contradictions_are_all_told_and_refused() -> None:
    text = (MEGATRON / "gpt_345m.sh").read_text().replace("--fp16", "--fp16 --bf16")
    text = text.replace("--global-batch-size 16", "--global-batch-size 17")
    done = plan("megatron", text)
    assert done.returncode == 2
    told = done.stdout + done.stderr
    assert told.count("--fp16 and --bf16") == 1
    assert told.count("17 is no multiple") == 1
    assert "Also:" in done.stderr


def test_flags_need_no_quotes() -> None:
    line = "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --micro-batch-size 4 --bf16"
    line += " --max-position-embeddings 1024 --global-batch-size 64 --made-up-flag 3"
    quoted = plan("megatron", line, "--gpus", "8")
    plain = plan("megatron", *line.split(), "--gpus", "8")
    assert quoted.returncode == plain.returncode == 0, quoted.stderr + plain.stderr
    assert quoted.stdout == plain.stdout
    assert "1 unknown: --made-up-flag" in plain.stdout
    assert "--made-up-flag 3 is not a flag that is known here" in plain.stdout


def test_runs_are_predicted_and_learned_from(tmp_path: Path) -> None:
    runs, learned = _runs(tmp_path), tmp_path / "mine.toml"
    plain = _json("validate", runs, "--framework", "paceline")
    assert [one["id"] for one in plain] == ["a", "b"]
    keys = {"predicted_step_seconds", "measured_step_seconds", "predicted_memory_gib", "measured_memory_gib"}
    assert keys <= plain[0].keys()
    done = plan("calibrate", runs, "--out", str(learned))
    assert done.returncode == 0, done.stderr
    after = _json("validate", runs, "--framework", "paceline", "--calibration", str(learned))

    def off(found: list[dict[str, float]]) -> float:
        return sum(abs(one["predicted_step_seconds"] / one["measured_step_seconds"] - 1) for one in found)

    assert off(after) < off(plain)
    small = ("llama3_1b", "--gpus", "8", "--gpu", "H100-80", "--top", "1")
    before, then = _json(*small)[0], _json(*small, "--calibration", str(learned))[0]
    assert before["step_seconds"] != then["step_seconds"]
    missing = plan("validate", runs)
    assert missing.returncode == 2
    assert "--framework" in missing.stderr


def test_a_trace_is_written(tmp_path: Path) -> None:
    target = tmp_path / "trace.json"
    done = plan("simulate", *LLAMA, "--trace", str(target), "--mtbf", "12")
    assert done.returncode == 0, done.stderr
    assert "goodput" in done.stdout
    assert json.loads(target.read_text())["traceEvents"]


def test_what_is_tight_for_the_dry_run_is_tight_here() -> None:
    recipe = (str(RECIPES / "llama3_8b.toml"), "--gpus", "64", "--gpu", "H100-80")
    batch = ("--set", "train.global_batch_size=512", "--only", "zero=1,recompute=none,pipeline_schedule=1f1b")
    for one in _json(*recipe, *batch, "--top", "5"):
        assert one["fits"] and one["tight"] == (one["memory_gib"] > 0.8 * 0.985 * 80)
    shown = plan(*recipe, *batch).stdout
    assert " !  " in shown and "! tight: above 80%" in shown and "Not in it: CUDA's context" in shown
    # a schedule's x2 and the copies of a sharded state are told apart, and only where there are any
    assert "x2" not in shown.partition("Layouts")[2].partition("the run")[0]


def test_lines_about_the_machines_fit_a_terminal() -> None:
    top = plan(*LLAMA).stdout.partition("Layouts, predicted")[0]
    assert max(len(line) for line in top.splitlines() if "--set" not in line) <= 120


def test_memory_is_explained_of_which_layout_and_nothing_is_written(tmp_path: Path) -> None:
    # with an fp32 copy of gradients, which the recipe does without
    recipe = (str(RECIPES / "llama3_8b.toml"), "--gpus", "8", "--gpu", "H100-80", "--explain-memory")
    recipe += ("--set", "optim.fused_update=false")
    shown = plan(*recipe).stdout
    assert "the recipe's own layout" in shown and "--write best.toml" in shown
    pasted = next(line.split()[2:] for line in shown.splitlines() if "--write best.toml" in line)
    assert {"--gpu", "H100-80", "--set", "optim.fused_update=false"} <= set(pasted)
    written = str(tmp_path / "pasted.toml")
    assert plan(*[written if word == "best.toml" else word for word in pasted], "--top", "1").returncode == 0
    again = next(line.split()[3:] for line in shown.splitlines() if "plan best.toml" in line)
    assert plan(written, *again).returncode == 0
    assert "framework" not in shown and "tight (9" in shown
    refused = plan(*recipe, "--write", str(tmp_path / "best.toml"))
    assert refused.returncode == 2 and "--explain-memory writes nothing" in refused.stderr
    assert not (tmp_path / "best.toml").exists()


def test_rows_of_a_sizing_say_their_batch_and_whether_they_are_enough() -> None:
    shown = plan("fit", "--model", "llama3_8b", "--gpu", "H100-80", "--tokens", "10B", "--days", "1").stdout
    assert "batch 1024 x 4096" in shown  # 4M tokens are 977 sequences, which nothing divides
    rows = [
        line.split() for line in shown.partition("Numbers of GPUs that were tried")[2].splitlines()[1:] if line.strip()
    ]
    rows = [row for row in rows if row[0].isdigit()]
    assert len(rows) >= 2
    for row in rows:
        assert row[2] == ("yes" if float(row[1]) <= 1 else "no")


@pytest.mark.parametrize(
    "arguments",
    [
        (*LLAMA, "--write"),
        (*LLAMA, "--html"),
        ("megatron", "--num-layers 2", "--write"),
        ("simulate", str(RECIPES / "llama3_8b.toml"), "--gpus", "8", "--gpu", "H100-80", "--trace"),
        ("calibrate", str(RECIPES), "--out"),
    ],
    ids=lambda given: given[0] + given[-1],
)
def test_where_nothing_can_be_written_is_said_before_any_work(arguments: tuple[str, ...], tmp_path: Path) -> None:
    missing = plan(*arguments, str(tmp_path / "none" / "x"))
    assert missing.returncode == 2 and "there is no folder" in missing.stderr
    folder = plan(*arguments, str(tmp_path))
    assert folder.returncode == 2 and "is a folder" in folder.stderr


def test_fp8_is_refused_for_cards_without_it() -> None:
    found = plan("llama2_7b", "--gpus", "8", "--gpu", "A100-80", "--set", "train.precision=fp8")
    assert found.returncode == 2 and "cannot run on a A100 SXM 80" in found.stderr


@pytest.mark.parametrize("verb", ["megatron", "simulate"])
def test_help_names_sections_of_a_recipe(verb: str) -> None:
    assert "[cluster]" in CliRunner().invoke(app, [verb, "--help"]).stdout


def test_a_model_in_a_file_gets_the_batch_of_a_preset(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    sizes = "[model]\nnum_layers = 8\nhidden_size = 1024\nnum_heads = 8\nffn_size = 4096\nvocab_size = 32000\n"
    file.write_text(sizes + "max_seq_len = 2048\n")
    shown = plan(str(file), "--gpus", "1", "--gpu", "l4", "--top", "1").stdout
    assert "128 sequences of 2048" in shown and "it says the model only" in shown
    assert "tokens/s on 1 GPU\n" in shown and "one GPU" in shown
    assert (
        "64 sequences of 2048"
        in plan(str(file), "--gpus", "1", "--gpu", "l4", "--top", "1", "--set", "train.global_batch_size=64").stdout
    )
    file.write_text(sizes + "max_seq_len = 2048\n[train]\nseq_len = 512\n")  # a recipe: as it would be trained
    assert "8 sequences of 512" in plan(str(file), "--gpus", "1", "--gpu", "l4", "--top", "1").stdout


def test_a_card_without_bf16_is_said() -> None:
    assert "T4 has no bf16" in plan("llama3_1b", "--gpus", "4", "--gpu", "T4", "--top", "1").stdout


def test_outputs_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "plan.html"
    target.write_text("before")

    def full(self: Path, text: str, encoding: str) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        done = plan("llama3_1b", "--gpus", "8", "--gpu", "H100-80", "--html", str(target))
    assert done.returncode == 1 and "No space left" in done.stderr and "written:" not in done.stdout
    assert target.read_text() == "before" and list(tmp_path.iterdir()) == [target]


def test_a_recipe_from_megatron_is_planned_again_as_it_is(tmp_path: Path) -> None:
    """Case of two scripts: names of their own, and the machines they were read for."""
    line = (
        "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 "
    )
    line += "--vocab-size 32000 --micro-batch-size 1 --global-batch-size 32 --train-iters 100 --loss-scale 128"
    out = tmp_path / "mine.toml"
    made = plan("megatron", line, "--gpus", "16", "--gpu", "A100-80", "--write", str(out))
    assert made.returncode == 0 and "--loss-scale 128" in made.stdout.split("Not in it")[1]
    tables = tomllib.loads(out.read_text())
    assert (tables["run"]["name"], tables["cluster"]["nodes"]) == ("mine", 2)
    assert "16 x A100" in plan(str(out)).stdout
