"""Logs of others, line by line as they print them, and questions that people really asked with them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.explain.compare import compare_logs, compare_runs
from paceline.explain.explanation import Explanation
from paceline.explain.log_file import read_log
from paceline.explain.log_report import explain_log
from paceline.explain.loss_apart import loss_causes
from paceline.explain.sources import explain, kind_of
from tests.training import runs

MEGATRON = (
    " [2025-12-28 00:20:49] iteration        2/     100 | consumed samples:         2048 | elapsed time per iteration "
    "(ms): 24621.6 | throughput per GPU (TFLOP/s/GPU): 496.6 | learning rate: 9.800000E-05 | global batch size: "
    " 1024 | "
    "lm loss: 4.466884E+00 | loss scale: 1.0 | grad norm: 44.051 | number of skipped iterations:   0 | number of nan "
    "iterations:   0 |"
)
"""NVIDIA/Megatron-LM#2769."""


def log(folder: Path, *lines: str, name: str = "train.log") -> Path:
    path = folder / name
    path.write_text("\n".join(lines) + "\n")
    return path


def line(step: int, milliseconds: float, *, tflops: float | None = 500.0, loss: float | None = 2.0) -> str:
    speed = "" if tflops is None else f" throughput per GPU (TFLOP/s/GPU): {tflops:.1f} |"
    shown = "" if loss is None else f" lm loss: {loss:.6E} |"
    return (
        f" [2025-12-28 00:20:49] iteration {step:8d}/     100 | consumed samples: {step * 128:12d} | elapsed time per "
        f"iteration (ms): {milliseconds:.1f} |{speed} learning rate: 1.0E-04 | global batch size:   128 |{shown} loss "
        "scale: 1.0 | number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def arguments(**values: object) -> list[str]:
    """As Megatron-LM prints them at its start."""
    return [f"  {name} {'.' * max(3, 46 - len(name))} {value}" for name, value in values.items()]


def ids(found: Explanation) -> list[str]:
    return [finding.id for finding in found.findings]


def test_the_real_line_is_read(tmp_path: Path) -> None:
    found = read_log(log(tmp_path, MEGATRON))
    (step,) = found.steps
    assert (found.framework, step.step, found.total_steps) == ("Megatron-LM", 2, 100)
    assert step.seconds == pytest.approx(24.6216) and step.tflops == 496.6 and step.batch == 1024
    assert step.loss == pytest.approx(4.466884) and step.grad_norm == 44.051


def test_glued_lines_and_lines_without_a_loss_are_kept(tmp_path: Path) -> None:
    glued = f"[rank7]: warning{line(3, 1000)} something else{line(4, 1100, loss=None)}trailing"
    steps = read_log(log(tmp_path, glued)).steps
    assert [step.step for step in steps] == [3, 4] and math.isnan(steps[1].loss) and steps[1].seconds == 1.1


def test_tokens_per_second_follow_from_the_arguments(tmp_path: Path) -> None:
    path = log(
        tmp_path,
        "using world size: 8, data-parallel size: 4",
        *arguments(seq_length=4096, global_batch_size=128, micro_batch_size=1),
        *(line(step, 10_000) for step in range(1, 9)),
    )
    assert explain_log(path).data["tokens_per_second"] == pytest.approx(128 * 4096 / 10 / 8)


def test_mfu_is_of_the_dense_peak_of_a_named_card_or_not_at_all(tmp_path: Path) -> None:
    """NVIDIA/Megatron-LM#1565, karpathy/nanoGPT#464: halved by the sparse peak, above 1 by another card's."""
    path = log(tmp_path, *(line(step, 1000, tflops=420) for step in range(1, 9)))
    assert explain_log(path, gpu="NVIDIA H200").data["mfu"] == pytest.approx(0.425, abs=0.001)
    without = explain_log(path)
    assert "mfu" not in without.data and any("--gpu" in finding.evidence for finding in without.findings)
    with pytest.raises(ConfigError, match="MFU is not available"):
        explain_log(path, gpu="H9000")
    with pytest.raises(ConfigError, match="MFU would be"):
        explain_log(path, gpu="NVIDIA A100-SXM4-80GB")


def test_a_70b_at_296_tflops_lists_recomputation_then_the_bubble_then_asks(tmp_path: Path) -> None:
    """NVIDIA/Megatron-LM#1031: full recompute is the first suspect, the bubble needs the number of micro-batches."""
    path = log(
        tmp_path,
        "torchrun pretrain_gpt.py --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 5 "
        "--distribute-saved-activations --overlap-grad-reduce --overlap-param-gather",
        *(line(step, 20_000, tflops=296.5) for step in range(1, 9)),
    )
    found = explain_log(path, gpu="H100 SXM")
    assert found.data["mfu"] == pytest.approx(0.30, abs=0.001)
    assert ids(found)[0] == "explain.full-recompute" and "395 TFLOP/s" in found.findings[0].evidence
    bubble = next(finding for finding in found.findings if finding.id == "explain.pipeline-bubble")
    assert "number of micro-batches" in bubble.evidence and bubble.gain == "not determined"
    asked = next(finding for finding in found.findings if finding.id == "explain.megatron-unknown-flags")
    assert "--sequence-parallel" in asked.evidence and "--use-distributed-optimizer" in asked.evidence
    assert "--overlap-grad-reduce" not in asked.evidence


def test_a_mixtral_at_130_tflops_is_told_to_group_its_experts(tmp_path: Path) -> None:
    """NVIDIA/Megatron-LM#756: 130 to 230 after grouped GEMM, alltoall and EP8 TP2."""
    path = log(
        tmp_path,
        *arguments(num_experts=8, tensor_model_parallel_size=4, expert_model_parallel_size=1, moe_grouped_gemm=False),
        *(line(step, 20_000, tflops=130) for step in range(1, 9)),
    )
    first = explain_log(path).findings[0]
    assert first.id == "explain.megatron-experts"
    assert all(flag in first.next_step for flag in ("--moe-grouped-gemm", "alltoall", "--expert-model-parallel-size 8"))


def test_a_70b_at_20_tflops_on_eight_cards_names_offload_and_recomputation(tmp_path: Path) -> None:
    """NVIDIA/Megatron-LM#1000: memory is oversubscribed."""
    path = log(
        tmp_path,
        *arguments(optimizer_cpu_offload=True, recompute_granularity="full", tensor_model_parallel_size=8),
        *(line(step, 90_000, tflops=20) for step in range(1, 9)),
    )
    assert {"explain.offload", "explain.full-recompute"} <= set(ids(explain_log(path)))


def test_the_bubble_is_counted(tmp_path: Path) -> None:
    path = log(
        tmp_path,
        *arguments(
            world_size=64,
            tensor_model_parallel_size=1,
            pipeline_model_parallel_size=8,
            global_batch_size=128,
            micro_batch_size=1,
        ),
        *(line(step, 1000) for step in range(1, 9)),
    )
    bubble = next(finding for finding in explain_log(path).findings if finding.id == "explain.pipeline-bubble")
    assert bubble.subject.startswith("30%") and "m = 16" in bubble.evidence


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["NCCL INFO NET/IB : No device found.", "NCCL INFO NET/Socket : Using [0]eth0:<ip><0>"], "no InfiniBand"),
        (["NCCL INFO NCCL_IB_DISABLE set by environment to 1.", "NCCL INFO Using network Socket"], "NCCL_IB_DISABLE=1"),
        (["NCCL INFO Using network Socket"], "does not say why"),
    ],
)
def test_sockets_are_told_with_their_reason(lines: list[str], words: str, tmp_path: Path) -> None:
    """mosaicml/llm-foundry#336, modelscope/ms-swift#1825."""
    first = explain_log(log(tmp_path, *lines)).findings[0]
    assert first.id == "explain.sockets" and words in first.evidence and "no proof" in first.evidence


def watchdog(rank: int, sequence: int, operation: str = "ALLREDUCE", elements: int = 1025) -> list[str]:
    return [
        f"[rank{rank}]:[E ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum={sequence}, OpType={operation}, NumelIn={elements}, NumelOut={elements}, "
        "Timeout(ms)=600000) ran for 600004 milliseconds before timing out.",
        f"[Rank {rank}] Timeout at NCCL work: {sequence}, last enqueued NCCL work: {sequence + 2}, last completed NCCL "
        f"work: {sequence - 1}.",
    ]


def test_all_ranks_at_the_same_collective_is_a_transfer_that_failed(tmp_path: Path) -> None:
    """hiyouga/LlamaFactory#7396."""
    path = log(tmp_path, *(text for rank in range(4) for text in watchdog(rank, 1580)))
    first = explain_log(path).findings[0]
    assert first.id == "explain.collective-timeout" and first.severity == "error"
    assert "ALLREDUCE number 1580" in first.subject and "1579" in first.evidence and "not determined" in first.next_step


def test_a_rank_that_skipped_a_collective_is_the_culprit(tmp_path: Path) -> None:
    """pytorch/pytorch#140563: sizes [[1025]] against [[262144]] on some ranks."""
    text = [*watchdog(0, 1580), *watchdog(1, 1580), *watchdog(2, 1580, "ALLGATHER", 262144), *watchdog(3, 1580)]
    first = explain_log(log(tmp_path, *text)).findings[0]
    assert first.id == "explain.collective-mismatch" and "rank 2" in first.subject
    assert "262,144" in first.evidence and "3 ranks wait in ALLREDUCE number 1580 of 1,025" in first.evidence


def test_a_rank_that_says_nothing_is_looked_at_first(tmp_path: Path) -> None:
    text = ["using world size: 4", *watchdog(0, 7), *watchdog(1, 7), *watchdog(3, 7)]
    assert "rank 2 first" in explain_log(log(tmp_path, *text)).findings[0].next_step


def test_torchtitan_is_read(tmp_path: Path) -> None:
    text = [
        f"[rank0]:[titan] 2025-11-30 10:00:0{step} - root - INFO - \x1b[31mstep: {step:2}  \x1b[32mloss: "
        f"{8 - step:.4f}  "
        f"grad_norm: 1.5  memory: 47.60GiB(60.20%)  tps: 7,{step}00  tflops: 4{step}1.20  mfu: 4{step}.66%\x1b[39m"
        for step in range(1, 9)
    ]
    found = explain_log(log(tmp_path, *text))
    assert found.data["framework"] == "torchtitan" and found.data["memory_gib"] == 47.6
    assert found.data["tokens_per_second"] == pytest.approx(7550) and found.data["mfu"] == pytest.approx(
        0.4616, abs=0.005
    )
    assert "trace" in next(f.evidence for f in found.findings if f.id == "explain.not-in-the-log")


def test_the_hugging_face_trainer_is_read(tmp_path: Path) -> None:
    text = [
        "{'loss': 1.9, 'grad_norm': 2.1, 'learning_rate': 1e-05, 'epoch': 0.01}",
        " 10%|█         | 20/200 [00:30<04:30,  1.50s/it]{'loss': 1.7, 'grad_norm': nan, 'learning_rate': 9e-06}",
        " 20%|██        | 40/200 [01:00<04:00,  1.50s/it]\r 21%|██        | 42/200 [01:03<03:57,  1.50s/it]",
        "{'train_runtime': 300.0, 'train_samples_per_second': 10.7, 'train_steps_per_second': 0.667}",
    ]
    found = explain_log(log(tmp_path, *text))
    assert found.data["framework"] == "Hugging Face Trainer" and found.data["seconds"] == pytest.approx(1.5)
    assert found.data["train_samples_per_second"] == 10.7
    rows = {row[0]: row[1:] for row in found.tables[0].rows}
    assert rows["training took"] == ("5 min 00 s", "in all") and rows["step"] == ("1.50 s", "median")
    state = tmp_path / "trainer_state.json"
    state.write_text(
        json.dumps({"max_steps": 20, "log_history": [{"loss": 1.5, "step": 10}, {"loss": 1.2, "step": 20}]})
    )
    assert kind_of(state) == "log" and [step.step for step in read_log(state).steps] == [10, 20]


def test_slow_steps_at_a_fixed_distance_are_told(tmp_path: Path) -> None:
    text = [line(step, 4000 if step % 10 == 0 else 1000) for step in range(1, 61)]
    found = next(f for f in explain_log(log(tmp_path, *text)).findings if f.id == "explain.pauses")
    assert "every 10 steps" in found.evidence and "checkpoints" in found.next_step


def test_a_run_that_became_slower_says_when(tmp_path: Path) -> None:
    text = [line(step, 1000 if step < 40 else 1500) for step in range(1, 81)]
    found = next(f for f in explain_log(log(tmp_path, *text)).findings if f.id == "explain.slower-since")
    assert "since 40" in found.subject and "Not determined" in found.next_step


def test_timers_by_rank_are_shown(tmp_path: Path) -> None:
    text = [
        line(1, 1000),
        "    (min, max) time across ranks (ms):",
        f"    forward-backward {'.' * 31}: (800.1, 1100.9)",
    ]
    assert read_log(log(tmp_path, *text)).timers == {"forward-backward": (800.1, 1100.9)}


@pytest.mark.parametrize("text", ["", "hello\nworld", "\x00\x01\xff", "iteration without numbers |"])
def test_what_is_no_log_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no log that is known"):
        explain_log(log(tmp_path, text))


# ---- two at once


def test_not_the_same_work_is_said_before_anything_else(tmp_path: Path) -> None:
    """Lightning-AI/litgpt#124: 1705 against 388 tokens/s, at sequences of 256 and of 1037."""
    paths = [
        log(
            tmp_path,
            *arguments(seq_length=length, world_size=8),
            *(line(s, ms) for s in range(1, 9)),
            name=f"{length}.log",
        )
        for length, ms in ((256, 150.0), (1037, 2670.0))
    ]
    found = compare_logs(*paths)
    assert ids(found)[0] == "explain.not-the-same-work" and "seq_length = 256 and 1037" in found.findings[0].evidence
    assert found.tables[0].title == "Settings that differ"


def test_two_runs_are_compared_settings_first(tmp_path: Path) -> None:
    data = runs.write_dataset(tmp_path / "data")
    runs.alone(runs.tiny(tmp_path / "a", data, steps=12))
    runs.alone(runs.tiny(tmp_path / "b", data, "train.seq_len=32", steps=12))
    found = compare_runs(tmp_path / "a", tmp_path / "b")
    assert ids(found)[0] == "explain.not-the-same-work" and "train.seq_len = 16 and 32" in found.findings[0].evidence
    assert found.data["settings"][0]["key"] == "train.seq_len"
    with pytest.raises(ConfigError, match="different kinds"):
        explain([tmp_path / "a", log(tmp_path, MEGATRON)])


def test_what_losses_prove_and_what_not() -> None:
    """NVIDIA/Megatron-LM#1754 (lr 0.3, a late gap of 47) and #1152 (fp8: 0.094 apart at step 1000)."""
    equal = {1: 10.9, 2: 10.7, 3: 10.5}
    (wild,) = loss_causes({**equal, 2000: 3.0}, {**equal, 2000: 50.0}, lr=0.3)
    assert "proves nothing" in wild.subject and wild.finding().severity == "note"
    (watch,) = loss_causes({**equal, 1000: 3.054}, {**equal, 1000: 3.148}, lr=1e-4)
    assert watch.subject.startswith("watch") and "no proven fault" in watch.evidence
    (other,) = loss_causes({1: 10.9, 1000: 3.0}, {1: 11.2, 1000: 3.0}, lr=1e-4)
    assert other.id == "explain.loss-apart-from-the-start"
    assert loss_causes({**equal, 9: 3.0}, {**equal, 9: 3.001}, lr=1e-4) == [] and loss_causes({}, {1: 2.0}) == []
