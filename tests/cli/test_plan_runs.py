"""`paceline plan validate` and `plan calibrate` over tables that hold what cannot be."""

from __future__ import annotations

from pathlib import Path

from tests.cli.test_plan import plan

COLUMNS = "id,layers,hidden,heads,ffn,seq,gpu,n_gpus,mbs,gbs,step_time_s,tflops_per_gpu,mem_GiB,tp,pp,recompute"
WRONG = {
    "negative": "32,4096,32,11008,4096,A100-80,8,1,128,-3,,60,2,1,none",
    "comma": '32,4096,32,11008,4096,A100-80,8,1,128,"10,5",,60,2,1,none',
    "heads": "32,4096,33,11008,4096,A100-80,8,1,128,10,,60,2,1,none",
    "recomputed": "32,4096,32,11008,4096,A100-80,8,1,128,10,,60,2,1,banana",
    "large": "32,4096,32,11008,4096,A100-80,8,1,128,10,,400,2,1,none",
    "fast": "32,4096,32,11008,4096,A100-80,8,1,128,,500,60,2,1,none",
}


def runs(folder: Path) -> Path:
    """Two of one id and a third that has no tensor parallelism, then those of `WRONG`."""
    good = "32,4096,32,11008,4096,A100-80,8,1,128,{},,60,{},1,none"
    rows = [f"good,{good.format(10.5, 2)}", f"good,{good.format(10.4, 2)}", f"quick,{good.format(9.8, 1)}"]
    rows += [f"{name},{row}" for name, row in WRONG.items()]
    file = folder / "runs.csv"
    file.write_text("\n".join((COLUMNS, *rows)) + "\n")
    return file


def test_rows_that_cannot_be_are_told_by_their_line(tmp_path: Path) -> None:
    file = runs(tmp_path)
    shown = plan("validate", str(file), "--framework", "megatron").stdout
    assert "Not scored: 6 rows" in shown
    for line, name in enumerate(WRONG, 5):
        assert f"{name} (runs.csv:{line})" in shown
    worst = shown.partition("The worst")[2]
    assert "good (runs.csv:3)" in worst and "step time" in worst and "memory" in worst


def test_a_cell_without_a_model_has_no_empty_name(tmp_path: Path) -> None:
    shown = plan("validate", str(runs(tmp_path)), "--framework", "megatron").stdout
    assert "(no name on 8)" in shown and "( on" not in shown


def test_a_calibration_that_explains_nothing_is_doubted(tmp_path: Path) -> None:
    target = tmp_path / "mine.toml"
    shown = plan("calibrate", str(runs(tmp_path)), "--framework", "megatron", "--out", str(target)).stdout
    assert "Learned from 3 rows, not from 6 rows" in shown
    assert all(f"{name} (runs.csv:" in shown for name in WRONG)
    assert "At the end of what is possible: gemm_efficiency" in shown
    assert "Still off: step time" in shown and "Still off: memory" in shown
    used = plan("llama3_1b", "--gpus", "1", "--gpu", "H100-80", "--top", "1", "--calibration", str(target)).stdout
    assert "changes nothing here: it has [megatron]" in used
    again = plan("validate", str(runs(tmp_path)), "--framework", "megatron", "--calibration", str(target)).stdout
    assert "mine.toml, of 3 runs: gemm_efficiency 1.1" in again
    flags = "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --micro-batch-size 4 --bf16"
    flags += " --max-position-embeddings 1024 --global-batch-size 64"
    told = plan("megatron", flags, "--gpus", "8", "--calibration", str(target)).stdout
    assert "mine.toml, of 3 runs: gemm_efficiency 1.1" in told
