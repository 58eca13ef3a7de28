"""What do a Megatron-LM command line's flags leave off? Findings with numbers, in the order of what they are worth.

Gains are differences of predictions where the predictor knows the option, else bounds from bytes and links, and say
which. Where the answer depends on what was not given (the batch, the card), the finding says what to measure or give.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from paceline.costs.layers import count_parameters
from paceline.costs.profiles import Profile
from paceline.costs.step import StepEstimate, predict
from paceline.costs.workload import Cluster
from paceline.planner.megatron import MegatronRun
from paceline.planner.megatron_surroundings import remark, surroundings
from paceline.report import units
from paceline.report.finding import Finding


def advice(run: MegatronRun, cluster: Cluster, profile: Profile) -> list[Finding]:
    """Everything that the flags leave off; the layout is one that can run (`megatron_conflicts` found no error)."""
    found = [
        *_precision(run, cluster),
        *_recompute(run, cluster, profile),
        *_data_parallel(run, cluster),
        *_tensor(run, cluster),
        *_pipeline(run, cluster, profile),
        *_kernels(run),
        *_experts(run),
        *surroundings(run, cluster),
    ]
    order = {"error": 0, "warning": 1, "note": 2}
    return sorted(found, key=lambda finding: order[finding.severity])


def _faster(before: StepEstimate, after: StepEstimate) -> str:
    gain = before.seconds / after.seconds - 1
    return f"predicted step {units.duration(before.seconds)} -> {units.duration(after.seconds)} ({gain:+.1%} tokens/s)"


# ---- precision and recomputation


def _precision(run: MegatronRun, cluster: Cluster) -> Iterator[Finding]:
    precision, card = run.layout.precision, cluster.gpu
    if precision == "fp32":
        yield remark(
            "precision",
            "warning",
            "no precision is given, so everything is computed in fp32",
            f"Twice the memory; {card.name} has {card.bf16 or 0:.0f} TFLOP/s in bf16"
            + (f", {card.fp32:.0f} in fp32." if card.fp32 else "."),
            "Add --bf16.",
        )
    if precision == "fp16" and card.bf16:
        yield remark(
            "precision",
            "note",
            "--fp16 needs loss scaling",
            f"{card.name} is as fast in bf16, which needs none.",
            "Use --bf16.",
        )
    if precision in ("fp8", "mxfp8", "nvfp4") and not card.fp8:
        yield remark(
            "fp8",
            "warning",
            f"--fp8-format {run.flags.text('fp8-format')} on {card.name}, which has no fp8",
            "Hopper, Ada, Blackwell and MI300 have matrix products in fp8; before them Transformer Engine refuses.",
            "Drop --fp8-format.",
        )
    if precision == "fp8" and run.flags.text("fp8-recipe", "delayed") == "delayed" and card.fp8:
        yield remark(
            "fp8-recipe",
            "note",
            "--fp8-recipe is delayed, the oldest",
            "Scales come from earlier steps. Hopper has tensorwise and blockwise scaling, Blackwell mxfp8.",
            "Try --fp8-recipe tensorwise (Hopper) or mxfp8 (Blackwell).",
        )


def _recompute(run: MegatronRun, cluster: Cluster, profile: Profile) -> Iterator[Finding]:
    if run.layout.recompute != "full":
        return
    before = predict(run.work, cluster, profile)
    for mode in ("none", "selective"):
        other = replace(run.work, recompute=mode)
        after = predict(other, cluster, profile)
        if after.fits:
            flags = "--recompute-granularity selective" if mode == "selective" else "no recomputation"
            yield remark(
                "recompute",
                "warning",
                f"all layers are recomputed, and {flags.removeprefix('--')} fits",
                f"Full recomputation computes every forward pass twice (4/3 of the FLOPs). Predicted "
                f"{after.memory_gib:.1f} GiB of {cluster.gpu.memory_bytes / 2**30:.1f} GiB with {flags}.",
                f"Use {flags} in place of --recompute-granularity full.",
                _faster(before, after),
            )
            return
    yield remark(
        "recompute",
        "note",
        "all layers are recomputed, which this layout needs",
        "Full recomputation computes every forward pass twice (4/3 of the FLOPs); selective is predicted to need "
        f"{predict(replace(run.work, recompute='selective'), cluster, profile).memory_gib:.1f} GiB.",
        "A layout with more model parallelism or a smaller micro-batch may do without: see the layouts below.",
    )


# ---- data parallelism


def _data_parallel(run: MegatronRun, cluster: Cluster) -> Iterator[Finding]:
    flags, dp = run.flags, run.dp
    if run.layout.fsdp or flags.on("deepspeed"):
        return
    held = count_parameters(run.work.model).total / (run.layout.tp * run.layout.pp)
    if not flags.on("use-distributed-optimizer"):
        saved = 12 * held * (1 - 1 / dp)
        yield remark(
            "distributed-optimizer",
            "warning" if dp > 1 else "note",
            "--use-distributed-optimizer is off: every rank keeps the whole optimizer state",
            f"18 bytes a parameter in place of 6 + 12 / {dp}: about {units.size(saved)} a rank "
            f"({units.count(held)} parameters)."
            if dp > 1
            else "Data parallel is 1, so there is nobody to share it with yet: it saves nothing here.",
            "Add --use-distributed-optimizer; it costs no traffic.",
            f"{units.size(saved)} of memory a rank" if dp > 1 else None,
        )
    if dp == 1:
        return
    width = 2 if flags.on("grad-reduce-in-bf16") else 4
    link = _link(cluster, run.layout.tp * run.layout.cp * dp)
    if not flags.on("overlap-grad-reduce"):
        # without the distributed optimizer the sum goes back to every rank: twice the bytes
        passes = 1 if flags.on("use-distributed-optimizer") else 2
        seconds = passes * (dp - 1) / dp * width * held / link
        yield remark(
            "overlap-grad-reduce",
            "warning",
            "--overlap-grad-reduce is off: ranks wait for the gradients' sum after the last backward pass",
            f"{units.size(width * held)} a rank over {link / 1e9:.0f} GB/s is {units.duration(seconds)} a step or "
            "more, from bytes and link.",
            "Add --overlap-grad-reduce.",
            f"up to {units.duration(seconds)} a step",
        )
    if flags.on("use-distributed-optimizer") and not flags.on("overlap-param-gather"):
        seconds = (dp - 1) / dp * 2 * held / link
        yield remark(
            "overlap-param-gather",
            "warning",
            "--overlap-param-gather is off: ranks wait for the new weights before the first forward pass",
            f"{units.size(2 * held)} a rank over {link / 1e9:.0f} GB/s is {units.duration(seconds)} a step or more.",
            "Add --overlap-param-gather (it needs --overlap-grad-reduce).",
            f"up to {units.duration(seconds)} a step",
        )
    if width == 4 and run.layout.precision != "fp32":
        yield remark(
            "grad-reduce",
            "note",
            "gradients travel in fp32",
            f"In bf16 {units.size(2 * held)} less a rank and step; sums over micro-batches stay in fp32.",
            "Add --grad-reduce-in-bf16.",
        )


def _link(cluster: Cluster, ranks: int) -> float:
    """Bytes a second of a GPU's slowest link among so many neighbouring ranks."""
    if ranks <= cluster.domain:
        return 1e9 * (cluster.gpu.nvlink_gb_per_s or cluster.gpu.pcie_gb_per_s or cluster.node_gb_per_s)
    return 1e9 * cluster.node_gb_per_s


# ---- tensor and pipeline parallelism


def _tensor(run: MegatronRun, cluster: Cluster) -> Iterator[Finding]:
    tp, flags = run.layout.tp, run.flags
    if tp == 1:
        return
    if not flags.on("sequence-parallel"):
        bytes_ = 10 * run.layout.seq_len // run.layout.cp * run.layout.micro_batch_size * run.work.model.hidden_size
        saved = bytes_ * (1 - 1 / tp) * run.work.model.num_layers
        yield remark(
            "sequence-parallel",
            "warning",
            f"--sequence-parallel is off with tensor parallel {tp}",
            "Norms and residuals are kept whole on every rank: 10 s b h (1 - 1/t) bytes a layer "
            f"(arXiv:2205.05198), {units.size(saved)} over all layers of a pipeline.",
            "Add --sequence-parallel; the traffic is the same.",
            f"{units.size(saved)} of activations",
        )
    if tp > cluster.domain:
        yield remark(
            "tp-across-nodes",
            "warning",
            f"tensor parallel {tp} is wider than a node of {cluster.domain} GPUs",
            "Every layer waits four times for a sum over its ranks, between nodes at "
            f"{cluster.node_gb_per_s:.0f} GB/s a GPU in place of {cluster.gpu.nvlink_gb_per_s or 0:.0f}.",
            f"Set --tensor-model-parallel-size {cluster.domain} or less and let --pipeline-model-parallel-size cross "
            "nodes.",
        )
    elif cluster.gpu.nvlink_gb_per_s is None:
        yield remark(
            "tp-without-nvlink",
            "warning",
            f"tensor parallel {tp} on {cluster.gpu.name}, which has no NVLink",
            f"Its ranks talk over PCIe at {cluster.gpu.pcie_gb_per_s or 0:.0f} GB/s or less.",
            "Prefer --pipeline-model-parallel-size or sharded data parallelism there.",
        )
    if not flags.on("tp-comm-overlap"):
        yield remark(
            "tp-overlap",
            "note",
            "--tp-comm-overlap is off: sums of tensor parallelism are exposed",
            "It needs Transformer Engine's userbuffers, whose start-up has failed for some (NVIDIA/Megatron-LM#608, "
            "#1274).",
            "Try --tp-comm-overlap with --sequence-parallel on one node first.",
        )


def _pipeline(run: MegatronRun, cluster: Cluster, profile: Profile) -> Iterator[Finding]:
    layout, count = run.layout, run.micro_batches
    pp = layout.pp
    if pp == 1:
        return
    if not layout.global_batch_size:
        yield remark(
            "micro-batches",
            "note",
            "--global-batch-size is not given, so the pipeline's idle time is not determined",
            f"With m micro-batches it is (p - 1) / (m + p - 1), p = {pp}; Megatron then takes one micro-batch a step.",
            "Give --global-batch-size.",
        )
        return
    idle = (pp - 1) / (layout.stages_per_rank * count + pp - 1)
    if count < pp:
        portion = layout.micro_batch_size * run.dp * pp
        yield remark(
            "micro-batches",
            "warning",
            f"{count} micro-batches a step do not fill a pipeline of {pp}",
            f"Ranks are idle (p - 1) / (v m + p - 1) = {idle:.0%} of the time at best.",
            f"Raise --global-batch-size to {portion} or more"
            + (", lower --micro-batch-size" if layout.micro_batch_size > 1 else "")
            + " or lower --pipeline-model-parallel-size.",
        )
    layers = run.config.model.num_layers // pp
    if layout.stages_per_rank == 1 and layers > 1 and count % pp == 0 and not layout.pipeline_layout:
        before = predict(run.work, cluster, profile)
        options = []
        for stages in (stages for stages in range(2, layers + 1) if layers % stages == 0):
            after = predict(replace(run.work, stages_per_rank=stages), cluster, profile)
            options.append((after.seconds, stages, after))
        seconds, stages, after = min(options)
        if seconds < before.seconds:
            yield remark(
                "interleaving",
                "warning" if seconds < 0.98 * before.seconds else "note",
                f"the pipeline is not interleaved; idle (p - 1) / (m + p - 1) = {idle:.1%}",
                f"{stages} virtual stages a rank divide the idle time by as much, at more traffic and activations.",
                f"Add --num-layers-per-virtual-pipeline-stage {layers // stages}.",
                _faster(before, after) + ("" if after.fits else "; predicted not to fit"),
            )


# ---- kernels, experts


def _kernels(run: MegatronRun) -> Iterator[Finding]:
    flags, work = run.flags, run.work
    if not work.fused_attention:
        scores = 5 * work.model.num_heads * work.seq_len**2 * work.micro_batch_size / work.tp / work.cp
        yield remark(
            "attention",
            "warning",
            "attention is not fused: scores are written out"
            + ("" if flags.on("attention-backend") else " (neither --use-flash-attn nor --attention-backend)"),
            f"5 a s^2 b / t bytes a layer (arXiv:2205.05198): {units.size(scores)} a layer and micro-batch, and as "
            "much traffic.",
            "Add --attention-backend flash (or --use-flash-attn before 2025), with --transformer-impl "
            "transformer_engine.",
        )
    logits = 4 * work.micro_batch_size * work.seq_len / work.cp * work.model.vocab_size / work.tp
    if not flags.on("cross-entropy-loss-fusion") and logits > 2**28:
        yield remark(
            "loss-fusion",
            "note",
            "--cross-entropy-loss-fusion is off",
            f"Logits of a micro-batch are {units.size(logits)} in fp32 on each rank of the last stage, and its loss "
            "makes copies.",
            "Add --cross-entropy-loss-fusion.",
        )
    if flags.on("no-gradient-accumulation-fusion"):
        yield remark(
            "wgrad-fusion",
            "note",
            "--no-gradient-accumulation-fusion: weight gradients are written, read and added",
            "The fused product adds to the buffer itself (it needs Apex's extension).",
            "Drop it where the extension is installed.",
        )


def _experts(run: MegatronRun) -> Iterator[Finding]:
    flags, layout = run.flags, run.layout
    if not run.config.model.is_moe:
        return
    if not flags.on("moe-grouped-gemm"):
        yield remark(
            "grouped-gemm",
            "warning",
            f"--moe-grouped-gemm is off: {run.config.model.num_experts // layout.ep} experts of a rank run one by one",
            "Each is a small product with its own launches.",
            "Add --moe-grouped-gemm.",
        )
    if flags.text("moe-token-dispatcher-type", "allgather") == "allgather" and layout.ep > 1:
        yield remark(
            "dispatcher",
            "warning",
            "--moe-token-dispatcher-type is allgather (the default): every rank receives every token",
            f"All-to-all sends each token to its top {run.config.model.top_k} of {run.config.model.num_experts} "
            "experts only.",
            "Add --moe-token-dispatcher-type alltoall.",
        )
    balanced = flags.on("moe-router-enable-expert-bias", "moe-router-force-load-balancing")
    if flags.number("moe-aux-loss-coeff", 0.0) == 0 and not balanced:
        yield remark(
            "balance",
            "warning",
            "--moe-aux-loss-coeff is 0 (the default): nothing balances the experts",
            "Uneven experts make their ranks the slowest and the fullest.",
            "Add --moe-aux-loss-coeff 1e-2, or --moe-router-enable-expert-bias.",
        )
    if layout.etp > 1 and not flags.on("expert-tensor-parallel-size"):
        yield remark(
            "expert-tensor",
            "warning",
            f"experts are cut over tensor parallel {layout.etp} too (the default)",
            "Narrow products and a sum in every expert; more expert parallelism uses the same ranks better.",
            "Add --expert-tensor-parallel-size 1.",
        )
    if not flags.on("moe-permute-fusion"):
        yield remark(
            "permute-fusion",
            "note",
            "--moe-permute-fusion is off",
            "Sorting tokens by expert is several passes over them.",
            "Add --moe-permute-fusion.",
        )
