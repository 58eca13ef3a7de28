"""What the recipe's checks and the planner know, as findings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.config.load import Recipe, load_recipe, resolve
from paceline.costs.profiles import PACELINE
from paceline.costs.workload import Cluster
from paceline.doctor.config import file_system, judge_count, judge_files, judge_recipe
from paceline.planner.machines import find_gpu, make_cluster
from paceline.report.finding import Finding


def recipe(preset: str = "llama3_8b", **sections: Any) -> Recipe:
    return resolve({"model": {"preset": preset}, "train": {"seq_len": 4096, "global_batch_size": 64}, **sections})


def cluster(gpus: int = 8, gpu: str = "H100-80") -> Cluster:
    return make_cluster(find_gpu(gpu), gpus)[0]


def found(given: Recipe, machines: Cluster | None, **more: Any) -> dict[str, Finding]:
    return {one.id: one for one in judge_recipe(given, machines, PACELINE, **more).findings}


def test_a_recipe_that_fits() -> None:
    findings = found(recipe(parallel={"zero": 3, "recompute": "selective", "compile": True}), cluster())
    assert findings["recipe.memory"].severity in ("note", "warning")
    assert {"recipe.better-layout", "recipe.layout"} & findings.keys()


def test_a_recipe_that_does_not_fit() -> None:
    findings = found(recipe(parallel={"zero": 1}), cluster(8, "RTX 4090"))
    assert findings["recipe.memory"].severity == "error" and "does not fit" in findings["recipe.memory"].subject
    assert {"recipe.better-layout", "recipe.nothing-fits"} & findings.keys()


def test_a_better_layout_is_named_with_its_settings() -> None:
    findings = found(recipe(parallel={"tp": 8, "recompute": "full"}), cluster())
    better = findings["recipe.better-layout"]
    assert better.severity == "warning" and better.gain is not None and "predicted" in better.gain
    assert "--set parallel." in better.next_step


def test_an_illegal_recipe_is_refused_by_its_rule() -> None:
    assert found(recipe(parallel={"tp": 3}), cluster(8))["recipe.refused"].severity == "error"
    heads = found(recipe(parallel={"tp": 6}), cluster(6))
    assert any(id.startswith("config.") and one.severity == "error" for id, one in heads.items())
    assert "recipe.memory" not in heads


def test_without_machines_only_the_recipe_is_judged() -> None:
    findings = found(recipe(), None)
    assert findings["recipe.no-cluster"].severity == "note" and "recipe.memory" not in findings
    assert any(one.severity == "error" for one in found(recipe(parallel={"tp": 6}), None).values())


def test_a_preset_has_no_layout_of_its_own() -> None:
    findings = found(recipe(), cluster(), is_preset=True)
    assert list(findings) == ["recipe.first-layout"]


# ---- files


def test_datasets_and_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = recipe(data={"train": "corpus"}).config
    assert {one.id for one in judge_files(config)} >= {"recipe.dataset"}
    for suffix in (".bin", ".idx"):
        (tmp_path / f"corpus{suffix}").touch()
    mounts = tmp_path / "mounts"
    mounts.write_text(f"disk / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\n")
    assert "recipe.data-path" in {one.id for one in judge_files(config, mounts=mounts)}
    mounts.write_text("disk / ext4 rw 0 0\n")
    assert {one.id for one in judge_files(config, mounts=mounts)} <= {"recipe.disk"}


def test_rows_are_looked_for_where_they_are_named(tmp_path: Path) -> None:
    rows = tmp_path / "chat.jsonl"
    config = recipe(task={"kind": "sft"}, data={"train": f"{rows}#name"}).config
    assert "recipe.dataset" in {one.id for one in judge_files(config)}
    rows.write_text("{}\n")
    assert "recipe.dataset" not in {one.id for one in judge_files(config)}


def test_room_for_checkpoints(tmp_path: Path) -> None:
    huge = resolve({"model": {"preset": "gpt3_175b"}, "run": {"dir": str(tmp_path / "run")},
                    "checkpoint": {"keep": 100_000}, "train": {"seq_len": 2048}}).config  # fmt: skip
    (finding,) = [one for one in judge_files(huge) if one.id == "recipe.disk"]
    assert "checkpoint.keep = 100000" in finding.evidence
    tiny = resolve({"model": {"num_layers": 1, "hidden_size": 64, "num_heads": 4, "ffn_size": 128, "vocab_size": 256},
                    "run": {"dir": str(tmp_path / "run")}}).config  # fmt: skip
    assert judge_files(tiny) == []


def test_checkpoints_of_adapters_hold_what_learns_alone(tmp_path: Path) -> None:
    recipe = {"model": {"preset": "gpt3_175b"}, "run": {"dir": str(tmp_path / "run")}, "lora": {"rank": 1},
              "checkpoint": {"keep": 10_000_000}, "train": {"seq_len": 2048}}  # fmt: skip
    (finding,) = [one for one in judge_files(resolve(recipe).config) if one.id == "recipe.disk"]
    # 96 layers of six linears, 12288 wide, 49152 in the MLP: 21.2M parameters of 12 bytes, not 175B
    assert "243.00 MiB each" in finding.evidence


def test_kind_of_file_system(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("a / overlay rw 0 0\nb /data\\040set xfs rw 0 0\nc /data nfs rw 0 0\nbroken\n")
    assert file_system(Path("/data set/x.bin"), mounts) == "xfs"
    assert file_system(Path("/data/x.bin"), mounts) == "nfs"
    assert file_system(Path("/database/x.bin"), mounts) == "overlay"
    assert file_system(Path("/x"), tmp_path / "none") == ""


def test_the_number_of_gpus_of_a_node() -> None:
    given = recipe(cluster={"nodes": 2, "gpus_per_node": 8}).config
    assert [one.id for one in judge_count(given, 4)] == ["recipe.gpus"]
    assert list(judge_count(given, 8)) == [] == list(judge_count(recipe().config, 4))


def test_no_advice_to_set_what_is_set_already() -> None:
    given = load_recipe(Path(__file__).parent.parent.parent / "recipes" / "llama3_8b.toml")
    tight = found(given, cluster())["recipe.memory"]
    assert tight.severity == "warning" and "expandable_segments:True" in tight.next_step
    assert "recompute=selective" not in tight.next_step and "--set parallel.recompute=full (" in tight.next_step
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        step = found(given, cluster(), environ={name: "expandable_segments:True"})["recipe.memory"].next_step
        assert "expandable_segments" not in step and "recompute=full" in step
    off = found(given, cluster(), environ={"PYTORCH_ALLOC_CONF": "expandable_segments:False"})["recipe.memory"]
    assert "expandable_segments:True" in off.next_step


def test_the_number_of_ranks_is_known_without_a_card() -> None:
    given = recipe(parallel={"zero": 1, "reduce_dtype": "bf16"})
    one = found(given, None, gpus=1)
    assert any("one rank" in finding.subject for finding in one.values())
    eight = found(given, None, gpus=8)
    assert not any("one rank" in finding.subject for finding in eight.values())
    assert "There are 8 GPUs" in eight["recipe.no-cluster"].evidence
