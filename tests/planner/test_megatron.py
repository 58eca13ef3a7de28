"""Ten published Megatron-LM command lines are read whole, and two mistakes put into each are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config.check import check
from paceline.config.plugins import Registry
from paceline.costs.layers import count_parameters, training_flops_per_token
from paceline.costs.profiles import MEGATRON
from paceline.costs.step import predict
from paceline.errors import ConfigError
from paceline.planner.machines import find_gpu, make_cluster
from paceline.planner.megatron import MegatronRun, read_megatron
from paceline.planner.megatron_advice import advice
from paceline.planner.megatron_better import best_layout, same_layout
from paceline.planner.megatron_conflicts import conflicts
from paceline.planner.megatron_flags import parse_flags

SCRIPTS = Path(__file__).parent / "megatron"

GPUS = {"gpt3_175b": 128, "llama2_70b": 8, "deepseek": 8, "codeparrot": 4}
"""Where the script itself does not say."""
GIVEN = {"deepseek": {"EP": "8"}}

READ = {
    # parameters in 1e9; GPUs; tp, pp, ep; micro-batches; what it is
    "gpt3_175b": (174.6, 128, (8, 16, 1), 1536, "fp16 none"),
    "gpt3_175b_slurm": (174.6, 1024, (8, 16, 1), 192, "fp16 full"),
    "gpt_345m": (0.355, 8, (2, 2, 1), 2, "fp16 full"),
    "llama3_8b_fp8": (8.03, 8, (1, 1, 1), 16, "fp8 none"),
    "mixtral_8x7b": (46.7, 32, (1, 4, 8), 32, "bf16 none"),
    "bloom_176b": (176.2, 384, (4, 12, 1), 128, "bf16 full"),
    "llama2_70b": (69.0, 8, (8, 1, 1), 4, "bf16 none"),
    "sc21_figure_13": (162.1, 64, (32, 2, 1), 32, "fp16 full"),
    "codeparrot": (2.25, 4, (2, 2, 1), 2, "fp16 selective"),
    "deepseek": (16.3, 8, (1, 1, 8), 16, "bf16 none"),
}


def read(name: str, old: str = "", new: str = "") -> MegatronRun:
    text = (SCRIPTS / f"{name}.sh").read_text()
    assert old in text
    return read_megatron(text.replace(old, new, 1) if old else text, gpus=GPUS.get(name), given=GIVEN.get(name))


def found(run: MegatronRun, gpu: str = "H100-80") -> set[str]:
    """Ids of everything that is found."""
    problems = conflicts(run)
    if not any(finding.severity == "error" for finding in problems):
        cluster, _ = make_cluster(find_gpu(gpu), run.gpus, gpus_per_node=run.gpus_per_node)
        problems = [*problems, *advice(run, cluster, MEGATRON)]
    return {finding.id.removeprefix("megatron.") for finding in problems}


@pytest.mark.parametrize("name", READ)
def test_published_command_lines_are_read_whole(name: str) -> None:
    run = read(name)
    parameters, gpus, degrees, micro_batches, kind = READ[name]
    assert run.flags.unknown == ()
    assert count_parameters(run.config.model).total / 1e9 == pytest.approx(parameters, rel=0.005)
    assert (run.gpus, (run.layout.tp, run.layout.pp, run.layout.ep)) == (gpus, degrees)
    assert run.micro_batches == micro_batches
    assert f"{run.layout.precision} {run.layout.recompute}" == kind
    assert [finding for finding in conflicts(run) if finding.severity == "error"] == []


MISTAKES = [
    ("gpt3_175b", "--fp16", "--fp16 --bf16", "contradiction"),
    ("gpt3_175b", "--num-layers 96", "--num-layers 90", "stages"),
    ("gpt3_175b_slurm", "--global-batch-size 1536", "--global-batch-size 1500", "batch"),
    ("gpt3_175b_slurm", "--seq-length 2048", "--seq-length 4096", "positions"),
    ("gpt_345m", "--num-attention-heads 16", "--num-attention-heads 15 --kv-channels 64", "heads"),
    (
        "gpt_345m",
        "--checkpoint-activations",
        "--recompute-granularity selective --recompute-method uniform",
        "contradiction",
    ),
    ("llama3_8b_fp8", "--group-query-attention ", "", "ignored"),
    ("llama3_8b_fp8", "--use-distributed-optimizer ", "", "contradiction"),
    ("mixtral_8x7b", "--expert-model-parallel-size 8", "--expert-model-parallel-size 6", "experts"),
    ("mixtral_8x7b", "--moe-aux-loss-coeff 1e-2", "", "balance"),
    ("bloom_176b", "TP=4", "TP=16", "tp-across-nodes"),
    ("bloom_176b", "WHOLE=2048", "WHOLE=2050", "batch"),
    ("llama2_70b", " --sequence-parallel", "", "sequence-parallel"),
    ("llama2_70b", "MICRO:-2", "MICRO:-3", "batch"),
    ("sc21_figure_13", "--fp16 \\", "\\", "precision"),
    ("sc21_figure_13", "--micro-batch-size 1", "--micro-batch-size 3", "batch"),
    ("codeparrot", "export CUDA_DEVICE_MAX_CONNECTIONS=1", "", "max-connections"),
    ("codeparrot", "--use-flash-attn", "--use-flash-attn --attention-backend unfused", "contradiction"),
    ("deepseek", "--max-position-embeddings ${LENGTH}", "--max-position-embeddings 2048", "positions"),
    ("deepseek", "--moe-grouped-gemm", "", "grouped-gemm"),
]


@pytest.mark.parametrize(("name", "old", "new", "expected"), MISTAKES)
def test_two_mistakes_in_each_are_found(name: str, old: str, new: str, expected: str) -> None:
    assert expected in found(read(name, old, new))


def test_there_are_ten_with_two_mistakes_each() -> None:
    assert len(READ) == 10
    assert sorted(READ) == sorted(path.stem for path in SCRIPTS.glob("*.sh"))
    assert all(sum(name == mistake[0] for mistake in MISTAKES) == 2 for name in READ)


def test_the_published_script_for_two_gpus_needs_four() -> None:
    run = read_megatron((SCRIPTS / "codeparrot.sh").read_text())
    (problem,) = (finding for finding in conflicts(run) if finding.severity == "error")
    assert "2 GPUs" in problem.subject
    assert "tp 2 x pp 2" in problem.subject
    assert "--gpus 4" in problem.next_step


LINE = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 "
    "--micro-batch-size 1 --global-batch-size 256 --bf16 "
)


def test_what_is_left_off_is_told_with_numbers() -> None:
    run = read_megatron(LINE + "--tensor-model-parallel-size 2 --transformer-impl local", gpus=16)
    cluster, _ = make_cluster(find_gpu("H100-80"), 16)
    told = {finding.id: finding for finding in advice(run, cluster, MEGATRON)}
    for name in ("distributed-optimizer", "overlap-grad-reduce", "sequence-parallel", "attention", "max-connections"):
        assert told[f"megatron.{name}"].severity == "warning"
    assert "18 bytes a parameter in place of 6 + 12 / 8" in told["megatron.distributed-optimizer"].evidence


def test_what_contradicts_itself_is_told_beside_a_model_that_cannot_be() -> None:
    """Two mistakes, and neither hides the other."""
    experts = "--num-experts 8 --moe-router-topk 9 --bf16 --fp16"
    with pytest.raises(ConfigError) as told:
        read_megatron(LINE + experts, gpus=8)
    assert "moe-router-topk 9" in told.value.subject and "--fp16 and --bf16 are both given" in told.value.evidence
    with pytest.raises(ConfigError) as told:
        read_megatron(LINE + "--num-experts 8 --moe-router-topk 9 --tensor-model-parallel-size 2", gpus=8)
    assert "--num-experts 8 with --tensor-model-parallel-size 2" in told.value.evidence


def test_degrees_that_are_named_suit_heads_and_groups() -> None:
    """Case 76: 28 heads and 4 groups: 7 and 14 divide the heads alone."""
    line = LINE.replace("--num-attention-heads 16", "").replace("--num-attention-heads 32", "")
    line += " --num-attention-heads 28 --kv-channels 64 --group-query-attention --num-query-groups 4 "
    run = read_megatron(line + "--tensor-model-parallel-size 8", gpus=8)
    heads = next(finding for finding in conflicts(run) if finding.id == "megatron.heads")
    assert "one of 1, 2, 4, 28;" in heads.next_step


def test_attention_is_fused_unless_the_script_says_otherwise() -> None:
    """Transformer Engine is today's default, and picks a fused kernel by itself."""
    assert read_megatron(LINE, gpus=16).work.fused_attention
    assert not read_megatron(LINE + "--transformer-impl local", gpus=16).work.fused_attention
    assert not read_megatron(LINE + "--attention-backend unfused", gpus=16).work.fused_attention


def test_experts_are_as_fast_as_published_where_they_are_large() -> None:
    """Mixtral-8x7B on 64 H100, pp 4, ep 8: 468 TFLOP/s by NVIDIA (Megatron-Core, its README on experts); 64 small ones
    a rank are launched one by one: 136 TFLOP/s with even routing, Qwen3-30B-A3B's widths with ep 2 on two H200."""
    mixtral = (
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --swiglu "
        "--seq-length 4096 --group-query-attention --num-query-groups 8 --max-position-embeddings 32768 "
        "--position-embedding-type rope --normalization RMSNorm --disable-bias-linear --bf16 --vocab-size 32000 "
        "--untie-embeddings-and-output-weights "
        "--num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 8 --moe-grouped-gemm --moe-permute-fusion "
        "--moe-token-dispatcher-type alltoall --pipeline-model-parallel-size 4 --micro-batch-size 1 "
        "--num-layers-per-virtual-pipeline-stage 1 --global-batch-size 256 --use-distributed-optimizer "
        "--overlap-grad-reduce --overlap-param-gather"
    )
    run = read_megatron(mixtral, gpus=64)
    cluster, _ = make_cluster(find_gpu("H100-80"), 64)
    tokens = run.work.tokens / 64 / predict(run.work, cluster, MEGATRON).seconds
    tflops = tokens * training_flops_per_token(run.work.model, 4096, "causal") / 1e12
    assert 0.9 * 468 < tflops < 1.1 * 468


@pytest.mark.parametrize(
    ("more", "environment", "warns"),
    [
        ("--tensor-model-parallel-size 2 --sequence-parallel", "", True),
        ("--tensor-model-parallel-size 2 --sequence-parallel", "export CUDA_DEVICE_MAX_CONNECTIONS=1\n", False),
        ("--use-torch-fsdp2", "export CUDA_DEVICE_MAX_CONNECTIONS=1\n", True),
        ("--use-torch-fsdp2", "", False),
    ],
)
def test_max_connections_depends_on_the_back_end(more: str, environment: str, warns: bool) -> None:
    """Case 18."""
    run = read_megatron(f"{environment}torchrun --nproc_per_node 8 pretrain_gpt.py {LINE} {more}")
    assert ("max-connections" in found(run)) == warns


def test_full_recomputation_is_the_first_suspect() -> None:
    """Case 5: 70B on 128 H100, tp 8, pp 8, everything recomputed."""
    model = "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --swiglu "
    model += "--group-query-attention --num-query-groups 8 --disable-bias-linear --untie-embeddings-and-output-weights "
    layout = "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 --recompute-granularity full "
    layout += "--recompute-method uniform --recompute-num-layers 5 --distribute-saved-activations "
    rest = "--seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --bf16 --use-flash-attn "
    rest += "--use-mcore-models --overlap-grad-reduce"
    run = read_megatron(model + layout + rest, gpus=128)
    cluster, _ = make_cluster(find_gpu("H100-80"), 128)
    told = advice(run, cluster, MEGATRON)
    assert told[0].id == "megatron.recompute"
    assert "4/3 of the FLOPs" in told[0].evidence
    ids = {finding.id: finding for finding in told}
    # the bubble needs the batch, which was not given: not determined
    assert "not determined" in ids["megatron.micro-batches"].subject
    assert {"megatron.sequence-parallel", "megatron.distributed-optimizer"} <= ids.keys()


def test_layers_that_do_not_divide_get_a_layout() -> None:
    """Case 78: 46 layers over 4."""
    line = LINE.replace("--num-layers 32", "--num-layers 46") + "--pipeline-model-parallel-size 4"
    (problem,) = (finding for finding in conflicts(read_megatron(line, gpus=8)) if finding.severity == "error")
    assert "[11, 12, 12, 11]" in problem.next_step
    assert "ttttttttttt|tttttttttttt|" in problem.next_step


def test_the_batch_names_its_neighbours() -> None:
    """Case 79: 256 over 7 GPUs, micro-batch 2."""
    line = LINE.replace("--micro-batch-size 1", "--micro-batch-size 2")
    (problem,) = (finding for finding in conflicts(read_megatron(line, gpus=7)) if finding.severity == "error")
    assert "252 and 266" in problem.next_step


def test_unknown_flags_are_listed_never_dropped() -> None:
    run = read_megatron(LINE + "--use-flash-atn --my-own-flag 3 4", gpus=8)
    assert [str(unknown) for unknown in run.flags.unknown] == ["--use-flash-atn", "--my-own-flag 3 4"]
    assert run.flags.unknown[0].near == "use-flash-attn"
    assert "unknown-flag" in found(run)
    cluster, _ = make_cluster(find_gpu("H100-80"), 8)
    assert "--my-own-flag" in same_layout(run, cluster).command()


@pytest.mark.parametrize("name", ["gpt3_175b_slurm", "mixtral_8x7b", "llama2_70b", "gpt_345m"])
def test_better_flags_are_free_of_contradictions(name: str) -> None:
    """What is printed reads back to what was predicted, and Paceline would run it too."""
    run = read(name)
    cluster, _ = make_cluster(find_gpu("H100-80"), run.gpus, gpus_per_node=run.gpus_per_node)
    better = best_layout(run, cluster)
    if better is None:
        pytest.skip("nothing fits")
    again = read_megatron(better.command().replace("\\\n", " "), gpus=run.gpus)
    assert [finding for finding in conflicts(again) if finding.severity == "error"] == []
    assert again.work == better.work
    problems = check(again.config, Registry(), run.gpus)
    assert [finding.subject for finding in problems if finding.severity == "error"] == []


def test_flags_of_every_form() -> None:
    flags = parse_flags(["--fp8-format=hybrid", "--num_layers", "3", "--eval-iters", "-1", "--bf16", "--lr", "${X}"])
    assert flags.given["fp8-format"] == ("hybrid",)
    assert flags.integer("num-layers", 0) == 3
    assert flags.given["eval-iters"] == ("-1",)
    with pytest.raises(ConfigError, match="nothing in the script sets") as caught:
        flags.number("lr", 1.0)
    assert "--env X=VALUE" in caught.value.next_step


def test_uneven_pipelines_are_understood() -> None:
    line = LINE + "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout 'Et*7|(t*8|)*2,t*9L'"
    assert read_megatron(line, gpus=8).config.parallel.pipeline_layout == (7, 8, 8, 9)
    line = LINE + "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 6 "
    line += "--decoder-last-pipeline-num-layers 6"
    assert read_megatron(line, gpus=8).config.parallel.pipeline_layout == (6, 10, 10, 6)


def test_fsdp_is_kept_or_replaced_whole() -> None:
    """Its flags and the distributed optimizer's never meet, and the environment follows."""
    model = LINE.replace("--seq-length 4096", "--seq-length 2048")
    for more in ("--use-torch-fsdp2", "--use-torch-fsdp2 --tensor-model-parallel-size 4 --sequence-parallel"):
        run = read_megatron(model + more, gpus=16)
        cluster, _ = make_cluster(find_gpu("H100-80"), 16)
        better = best_layout(run, cluster)
        assert better is not None
        again = read_megatron(better.command().replace("\\\n", " "), gpus=16)
        assert [finding for finding in conflicts(again) if finding.severity == "error"] == []
        fsdp = again.layout.fsdp
        assert fsdp != again.flags.on("use-distributed-optimizer")
        assert ("CUDA_DEVICE_MAX_CONNECTIONS" in better.environment) == (not fsdp and again.layout.tp > 1)
        assert better.estimate.seconds <= same_layout(run, cluster).estimate.seconds


def test_flags_without_their_values_and_degrees_of_nothing_are_told() -> None:
    run = read_megatron(LINE + "--clip-grad --tensor-model-parallel-size", gpus=8)
    told = [finding.subject for finding in conflicts(run) if finding.severity == "error"]
    assert told == ["--clip-grad stands without a value", "--tensor-model-parallel-size stands without a value"]
    with pytest.raises(ConfigError, match="--pipeline-model-parallel-size 0 is less than 1"):
        read_megatron(LINE + "--pipeline-model-parallel-size 0", gpus=8)


@pytest.mark.parametrize("name", READ)
def test_scripts_with_lines_missing_never_crash(name: str) -> None:
    lines = (SCRIPTS / f"{name}.sh").read_text().split("\n")
    for left_out in range(0, len(lines), 3):
        text = "\n".join(lines[:left_out] + lines[left_out + 1 :])
        try:
            run = read_megatron(text, gpus=GPUS.get(name), given=GIVEN.get(name))
        except ConfigError:
            continue
        conflicts(run)


def test_how_rows_of_experts_are_sent_is_read() -> None:
    experts = LINE + "--num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 8 --disable-bias-linear "
    plain = read_megatron(experts, gpus=16).work
    told = read_megatron(experts + "--moe-token-dispatcher-type flex --overlap-moe-expert-parallel-comm", gpus=16).work
    assert not (plain.dispatcher_permutes or plain.overlaps_experts)
    assert told.dispatcher_permutes and told.overlaps_experts


def test_better_flags_can_be_pasted_and_do_what_the_findings_say() -> None:
    line = LINE + "--tensor-model-parallel-size 2 --recompute-granularity full --recompute-method uniform "
    line += "--recompute-num-layers 1 --save ${OUT}/run --tokenizer-model 'a b' --use-distributed-optimizer"
    run = read_megatron(line, gpus=16)
    cluster, _ = make_cluster(find_gpu("H100-80"), 16)
    better = same_layout(run, cluster)
    assert better.work.recompute == "none" and "--recompute-granularity" not in better.flags
    assert better.estimate.seconds < 0.9 * predict(run.work, cluster, MEGATRON).seconds
    # a shell fills in what the script left open, and nothing else is split
    assert '--save "${OUT}/run"' in better.command() and "--tokenizer-model 'a b'" in better.command()
