"""Public problems of throughput and memory, as cases: what the predictor and the search say about each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.config.load import resolve
from paceline.config.model import ModelConfig
from paceline.costs.hardware import mfu, peak_tflops
from paceline.costs.layers import count_parameters, training_flops_per_token
from paceline.costs.profiles import LLM_FOUNDRY, MEGATRON, PACELINE, TORCHTITAN
from paceline.costs.step import predict
from paceline.costs.workload import Cluster, Workload
from paceline.planner.machines import find_gpu, make_cluster
from paceline.planner.rank import rank

GIB = 2**30


def model(preset: str, **fields: object) -> ModelConfig:
    return resolve({"model": {"preset": preset, **fields}}).config.model


def work(preset: str, **fields: object) -> Workload:
    given: dict[str, object] = {"seq_len": 4096, "micro_batch_size": 1, "global_batch_size": 64} | fields
    return Workload(model=model(preset), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("preset", "seq_len", "tokens_per_second", "tflops"),
    [
        ("llama2_7b", 4096, 16154, 744),
        ("llama2_13b", 4096, 8344, 727),
        ("llama2_70b", 4096, 1659, 737),
        ("llama3_8b", 8192, 11879, 688),
        ("llama3_70b", 8192, 1444, 695),
        ("llama3_70b", 2048, 1107.185, 479.61),
    ],
)
def test_flops_of_published_tables(preset: str, seq_len: int, tokens_per_second: float, tflops: float) -> None:
    """Case 1: the full-attention convention."""
    found = training_flops_per_token(model(preset), seq_len, "full") * tokens_per_second / 1e12
    assert found == pytest.approx(tflops, rel=0.005)


@pytest.mark.parametrize(("tokens_per_second", "tflops"), [(2104.9, 93.5), (4233.7, 188.0)])
def test_flops_of_one_model_over_pcie_and_over_nvlink(tokens_per_second: float, tflops: float) -> None:
    """Case 6: the same 7B on A100s that PCIe or NVLink joins, at 30 % and at 60 % MFU."""
    sizes = {"num_layers": 32, "hidden_size": 4096, "num_heads": 32, "ffn_size": 11008, "vocab_size": 103168}
    internlm = model("llama2_7b", **sizes)
    found = training_flops_per_token(internlm, 2048, "full") * tokens_per_second / 1e12
    assert found == pytest.approx(tflops, rel=0.01)
    share = mfu(found, peak_tflops("NVIDIA A100-SXM4-80GB"))
    assert share == pytest.approx(0.30 if tflops < 100 else 0.60, abs=0.01)


def test_the_peak_is_dense() -> None:
    """Case 2."""
    assert mfu(420, peak_tflops("NVIDIA H200")) == pytest.approx(0.425, abs=0.001)
    assert mfu(9600 * 0.05, peak_tflops("NVIDIA H100 80GB HBM3")) == pytest.approx(0.485, abs=0.001)


def test_sharded_parameters_over_ten_gigabit() -> None:
    """Case 9: 8B over two nodes with 1.25 GB/s a node: at least 25.7 s with two micro-steps."""
    cluster = Cluster(gpu=find_gpu("A800"), gpus=16, gpus_per_node=8, node_gb_per_s=1.25 / 8)
    layout = work("llama3_8b", seq_len=1024, global_batch_size=32, zero=3)
    sharded = predict(layout, cluster, PACELINE)
    assert sharded.seconds > 25.7
    assert sharded.exposed_communication > 0.7
    config = resolve({"model": {"preset": "llama3_8b"}, "train": {"seq_len": 1024, "global_batch_size": 32}}).config
    best = rank(config, cluster).fitting[0].config.parallel
    # no parameters are gathered between the nodes, once for each micro-batch
    assert best.zero < 3 or best.dp_replicate > 1 or best.pp > 1


def test_sharding_inside_the_node_is_offered_and_has_a_price() -> None:
    """Case 10: 72B in bf16 is 144 GB / 8 = 16.8 GiB a card inside a node; several micro-batches a step."""
    cluster = Cluster(gpu=find_gpu("A100-80"), gpus=64, gpus_per_node=8, node_gb_per_s=3.0)
    layout = work("qwen2.5_72b", zero=3, recompute="full", global_batch_size=256)
    everywhere = predict(layout, cluster, PACELINE)
    inside = predict(replace(layout, dp_replicate=8), cluster, PACELINE)
    assert inside.seconds < everywhere.seconds
    weights = [found.stages[0].states for found in (everywhere, inside)]
    copies = 16 * count_parameters(layout.model).total
    assert weights[1] - weights[0] == pytest.approx(copies / 8 - copies / 64, rel=0.1)
    assert 2 * count_parameters(layout.model).total / 8 / GIB == pytest.approx(16.9, abs=0.2)


@pytest.mark.parametrize(("gpus", "gpu", "layout", "fits"), [
    (2, "A100-80", {}, False),
    (4, "A100-80", {}, False),
    (8, "A100-80", {"recompute": "full"}, True),
    (2, "A100-40", {}, False),
    (24, "A100-40", {"pp": 6, "tp": 4, "global_batch_size": 24}, True),
])  # fmt: skip
def test_which_clusters_hold_a_20b(gpus: int, gpu: str, layout: dict[str, object], fits: bool) -> None:
    """Case 24: GPT-NeoX-20B with ZeRO-1 (with one copy, by tensor parallelism)."""
    fields = {"num_layers": 44, "hidden_size": 6144, "num_heads": 64, "vocab_size": 50432, "tie_embeddings": False}
    neox = model("gpt3_6.7b", ffn_size=24576, max_seq_len=2048, **fields)
    assert count_parameters(neox).total / 1e9 == pytest.approx(20.55, abs=0.1)
    given: dict[str, object] = {"tp": gpus} | layout if not layout or "tp" not in layout else layout
    found = Workload(model=neox, seq_len=2048, micro_batch_size=1, **{"global_batch_size": 8} | given)  # type: ignore[arg-type]
    assert predict(found, make_cluster(find_gpu(gpu), gpus, gpus_per_node=min(8, gpus))[0], MEGATRON).fits is fits


def test_data_parallelism_flips_the_verdict() -> None:
    """Case 25: Llama-2-7B, tp 2, micro-batch 4: not on two GPUs, tight on four."""
    layout = work("llama2_7b", tp=2, micro_batch_size=4, global_batch_size=16)
    two, four = (predict(layout, Cluster(gpu=find_gpu("A800"), gpus=gpus), MEGATRON) for gpus in (2, 4))
    assert not two.fits
    assert two.stages[0].states / 1e9 == pytest.approx(60.6, rel=0.03)
    assert four.stages[0].states / 1e9 == pytest.approx(40.4, rel=0.03)
    assert two.stages[0].activations == pytest.approx(four.stages[0].activations)


def test_llama3_8b_on_eight() -> None:
    """Case 27: 47.6 GiB in torchtitan's log."""
    layout = work("llama3_8b", seq_len=8192, zero=3, global_batch_size=8, recompute="selective")
    found = predict(layout, make_cluster(find_gpu("H100"), 8)[0], TORCHTITAN)
    assert found.stages[0].states / GIB == pytest.approx(15.0, rel=0.05)
    assert found.memory_gib == pytest.approx(47.6, rel=0.15)


def test_selective_recomputation_of_attention_saves_little_with_flash() -> None:
    """Case 28: under a tenth of the total with fused attention; the scores without."""
    layout = work("llama2_7b", tp=8, micro_batch_size=2)
    cluster = make_cluster(find_gpu("H100"), 8)[0]
    core = {"recompute": "selective", "recompute_modules": ("core_attn",)}
    with_flash = [predict(replace(layout, **fields), cluster, MEGATRON).memory_bytes for fields in ({}, core)]  # type: ignore[arg-type]
    assert 0 <= 1 - with_flash[1] / with_flash[0] < 0.1
    plain = replace(layout, fused_attention=False)
    without = [predict(replace(plain, **fields), cluster, MEGATRON).stages[0].activations for fields in ({}, core)]  # type: ignore[arg-type]
    heads, hidden = layout.model.num_heads, layout.model.hidden_size
    ratio = 34 / (34 + 5 * heads * layout.seq_len / hidden)
    assert without[1] / without[0] == pytest.approx(ratio, rel=0.25)


def test_the_heaviest_stage_is_told() -> None:
    """Case 29, first half: layers cut 1, 2, 2, 3, with embedding and head."""
    layout = replace(work("llama3_8b", pp=4), model=model("llama3_8b", num_layers=8), pipeline_layout=(1, 2, 2, 3))
    found = predict(layout, make_cluster(find_gpu("H100"), 8)[0], MEGATRON)
    states = [stage.states for stage in found.stages]
    assert max(range(4), key=lambda index: states[index]) == 3
    assert found.memory_bytes == max(stage.total for stage in found.stages)
    assert states[3] > 1.3 * sum(states) / 4


def test_activations_of_experts_follow_what_a_token_uses() -> None:
    """Case 29, second half."""

    def activations(**fields: object) -> float:
        layout = replace(work("mixtral_8x7b", zero=3), model=model("mixtral_8x7b", **fields))
        return float(predict(layout, make_cluster(find_gpu("B300"), 64)[0], PACELINE).stages[0].activations)

    plain = activations()
    assert activations(top_k=4) > 1.5 * plain
    assert activations(ffn_size=2 * 14336) > 1.5 * plain
    assert activations(num_experts=16) == pytest.approx(plain, rel=0.01)


def test_logits_are_a_line_of_their_own() -> None:
    """Case 30: 11,600 tokens x 248,320 x 4 bytes = 10.7 GiB, and the chunked loss does without."""
    layout = replace(work("llama3_8b", seq_len=11600), model=model("llama3_8b", vocab_size=248320, max_seq_len=16384))
    cluster = make_cluster(find_gpu("H100"), 64)[0]
    plain = predict(layout, cluster, PACELINE).stages[-1].logits
    chunked = predict(replace(layout, chunked_loss=True), cluster, PACELINE).stages[-1].logits
    assert plain > 10.7 * GIB
    assert chunked < plain / 2


@pytest.mark.parametrize(("preset", "gpus", "gpu", "fits"), [
    ("llama2_7b", 1, "A100-80", False),
    ("llama2_7b", 2, "A100-80", True),
    ("llama2_7b", 4, "A100-80", True),
])  # fmt: skip
def test_can_i_train_x_on_y(preset: str, gpus: int, gpu: str, fits: bool) -> None:
    """Case 31."""
    config = resolve({"model": {"preset": preset}, "train": {"seq_len": 2048, "global_batch_size": 8}}).config
    cluster, _ = make_cluster(find_gpu(gpu), gpus)
    assert bool(rank(config, cluster, offload=False).fitting) is fits


def test_ninety_billion_on_eight() -> None:
    """Case 31: 16 bytes a parameter are 180 GB a card."""
    params = 90e9
    assert 16 * params / 8 / 1e9 == 180
    config = resolve({"model": {"preset": "qwen2.5_72b"}, "train": {"global_batch_size": 8, "seq_len": 2048}}).config
    cluster, _ = make_cluster(find_gpu("A100-80"), 8)
    assert rank(config, cluster, offload=False).fitting == ()


def test_hardware_of_llm_foundry_is_known_to_its_profile() -> None:
    found = predict(work("llama2_7b", zero=3, recompute="full"), make_cluster(find_gpu("A100-40"), 64)[0], LLM_FOUNDRY)
    assert 0.3 < (found.mfu or 0) < 0.7
