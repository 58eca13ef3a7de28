"""What does a layer compute and move? Seconds of its products at best, and elements that memory-bound operators pass.

Sources: matrix products `costs/roofline.py`; attention arXiv:2307.08691; memory-bound passes counted from the operators
below.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.config.model import AttentionSpec, BlockSpec, FeedForwardSpec, MoESpec
from paceline.costs.layers import score_flops
from paceline.costs.roofline import FIXED_INNER, HBM_SHARE, PERSISTENT_INNER, gemm_seconds, linear_seconds
from paceline.costs.workload import Cluster, Workload


@dataclass(kw_only=True)
class Layer:
    """Sums over the operators of one layer."""

    gemm_forward: float = 0.0
    gemm_backward: float = 0.0
    expert_gemm_forward: float = 0.0
    expert_gemm_backward: float = 0.0
    expert_weights_backward: float = 0.0
    """Of gradients of experts' weights by a kernel of their own, not in `expert_gemm_backward`."""
    expert_elements_forward: float = 0.0
    expert_elements_backward: float = 0.0
    adapters_forward: float = 0.0
    """Seconds of adapters' products."""
    adapters_backward: float = 0.0
    mlp_gemm_forward: float = 0.0
    """Of dense MLPs."""
    up_gemm_forward: float = 0.0
    """Of latent attention, from its latents to queries, keys and values."""
    attention_forward: float = 0.0
    elements_forward: float = 0.0
    """16-bit elements read and written by memory-bound operators."""
    elements_backward: float = 0.0
    activation_elements: float = 0.0
    """Of dense MLPs' activations, in `elements_forward`; ..."""
    expert_activation_elements: float = 0.0
    """... and of experts', in `expert_elements_forward`."""
    expert_bias_elements: float = 0.0
    """One pass over rows to which experts add biases."""
    expert_calls: float = 0.0
    """Forward products of single experts, where a grouped product is made of them."""
    score_elements: float = 0.0
    cast_elements: float = 0.0
    weight_elements: float = 0.0
    """Of all linears whose inputs are cast."""
    launches: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Rates:
    linear: float
    """TFLOP/s at best of linears in their precision."""
    bf16: float
    hbm: float
    multiprocessors: int
    fixed_inner: int = FIXED_INNER
    """What a tile takes beside its inner dimension (`costs/roofline.py`)."""


def rates_of(work: Workload, cluster: Cluster) -> Rates:
    gpu = cluster.gpu
    bf16 = (gpu.peak_tflops("bf16") or gpu.peak_tflops("fp16") or gpu.fp32 or 10.0) * gpu.matmul_share
    linear = bf16
    if work.precision in ("fp8", "mxfp8") and gpu.fp8:
        linear = gpu.fp8 * gpu.fp8_matmul_share
    elif work.precision == "nvfp4" and gpu.fp4:
        linear = 0.85 * gpu.fp4 * gpu.fp8_matmul_share
    elif work.precision == "fp32":
        linear = bf16 = (gpu.tf32 or gpu.fp32 or bf16 / 8) * gpu.matmul_share
    persistent = work.persistent_products and gpu.fp8 is not None
    return Rates(
        linear=linear,
        bf16=bf16,
        hbm=gpu.memory_tb_per_s,
        multiprocessors=gpu.multiprocessors,
        fixed_inner=PERSISTENT_INNER if persistent else FIXED_INNER,
    )


def layer_of(work: Workload, block: BlockSpec, tokens: float, rates: Rates) -> Layer:
    """``tokens`` of a micro-batch on this rank, whole over tp."""
    layer = Layer()
    spec, hidden, tp = block.attention, work.model.hidden_size, work.tp
    along = tp if work.sequence_parallel else 1
    _attention_linears(layer, spec, tokens, tp, rates)
    _scores(layer, work, spec, tokens, rates)
    # two norms read and write, two residual additions read two and write one
    norms = 4 if work.model.post_norm else 2
    residual = tokens * hidden * (2 * norms + 6) / along
    rotary = 2 * tokens * (spec.num_heads + spec.num_kv_heads) * spec.qk_head_dim / tp
    rotary *= 2 if spec.qk_norm else 1
    layer.elements_forward += residual + (rotary if work.model.position == "rope" else 0.0)
    layer.elements_backward += 1.6 * residual + (rotary if work.model.position == "rope" else 0.0)
    if work.adapters:
        # narrow products, as fast as what is wide of them can be read and written: of 4 C and 4 D forward C and 2 D
        whole = 2.0 * tokens * work.adapter_channels / tp / (HBM_SHARE * 1e12 * rates.hbm)
        layer.adapters_forward += 0.375 * whole
        layer.adapters_backward += 0.625 * whole
    if isinstance(block.feed_forward, MoESpec):
        _experts(layer, work, block.feed_forward, tokens, rates)
    else:
        _mlp(layer, block.feed_forward, tokens, tp, rates, dense=True)
    return layer


def _linear(
    layer: Layer,
    tokens: float,
    inputs: float,
    outputs: float,
    rates: Rates,
    *,
    mlp: bool = False,
    up: bool = False,
    groups: int = 1,
) -> None:
    """Of ``groups`` alike, together: grouped products, which are not cuBLAS's."""
    inner = rates.fixed_inner if groups == 1 else FIXED_INNER
    device = (rates.linear, rates.hbm, rates.multiprocessors, groups, inner)
    forward, backward = linear_seconds(tokens, inputs, outputs, *device)
    layer.gemm_forward += forward
    layer.gemm_backward += backward
    layer.mlp_gemm_forward += forward if mlp else 0.0
    layer.up_gemm_forward += forward if up else 0.0
    layer.cast_elements += groups * tokens * (inputs + outputs)
    layer.weight_elements += groups * inputs * outputs


def _attention_linears(layer: Layer, spec: AttentionSpec, tokens: float, tp: int, rates: Rates) -> None:
    hidden, heads = spec.hidden_size, spec.num_heads / tp
    if spec.kind == "mla":
        if spec.q_lora_rank:
            _linear(layer, tokens, hidden, spec.q_lora_rank, rates)
        _linear(layer, tokens, spec.q_lora_rank or hidden, heads * spec.qk_head_dim, rates, up=spec.q_lora_rank > 0)
        _linear(layer, tokens, hidden, spec.kv_lora_rank + spec.qk_rope_head_dim, rates)
        _linear(layer, tokens, spec.kv_lora_rank, heads * (spec.qk_nope_head_dim + spec.v_head_dim), rates, up=True)
    else:
        kv_heads = max(1.0, spec.num_kv_heads / tp)
        _linear(layer, tokens, hidden, (heads + 2 * kv_heads) * spec.qk_head_dim, rates)
    _linear(layer, tokens, heads * spec.v_head_dim, hidden, rates)


FLASH4 = 0.89
"""Of cuDNN's time at heads of 128 (docs/measured/fused_one_gpu.jsonl: 27 ms less of 1361; at heads of 64 it does not
lose what cuDNN does)."""


FP8_ATTENTION = 0.7
"""Of the time in 16 bits: its products take half, its exponentials as long (FlashAttention-3, arXiv:2407.08608: 1.2 in
place of 0.74 PFLOP/s forward); assumed for the backward pass."""


def _scores(layer: Layer, work: Workload, spec: AttentionSpec, tokens: float, rates: Rates) -> None:
    whole = not work.fused_attention
    # scores that are materialised are those of whole rows
    seen = work.seq_len if whole else work.seen_tokens
    flops = score_flops(spec, seen, "full" if whole else "causal") * tokens / work.tp
    # short sequences and narrow heads fill a fused kernel badly: 374, 460, 522 and 547 TFLOP/s at 2k, 4k, 8k and 32k
    length = 1.0 if whole else 1.0 + 900.0 / seen
    width = 1.0 if whole or spec.v_head_dim >= 96 else 1.15
    if work.flash4:
        width = FLASH4 if spec.v_head_dim >= 96 else FLASH4 * 1.05
    if work.fp8_attention:
        width *= FP8_ATTENTION
    layer.attention_forward += flops * length * width / (rates.bf16 * 1e12)
    if whole:
        layer.score_elements += tokens * work.seq_len * spec.num_heads / work.tp


def _mlp(
    layer: Layer,
    spec: FeedForwardSpec,
    tokens: float,
    tp: float,
    rates: Rates,
    *,
    dense: bool = False,
    groups: int = 1,
) -> None:
    """``tokens`` of each of ``groups``; ``dense``: in place of experts."""
    inputs, width = (2 if spec.gated else 1), spec.ffn_size / tp
    _linear(layer, tokens, spec.hidden_size, inputs * width, rates, mlp=dense, groups=groups)
    _linear(layer, tokens, width, spec.hidden_size, rates, mlp=dense, groups=groups)
    elements = groups * tokens * width * (inputs + 1)
    layer.elements_forward += elements
    layer.activation_elements += elements
    layer.elements_backward += groups * tokens * width * (2 * inputs + 1)


def _experts(layer: Layer, work: Workload, spec: MoESpec, tokens: float, rates: Rates) -> None:
    """Rows of this rank, evenly over its experts; permutations there and back."""
    here = max(1, round(spec.num_experts / work.ep))
    own = tokens / work.tp * work.etp
    rows = own * spec.top_k
    expert = spec.expert
    one = Layer()
    narrow = replace(rates, linear=rates.bf16) if work.experts_in_bf16 else rates
    _mlp(one, expert, rows / here, work.etp, narrow, groups=here)
    layer.expert_gemm_forward += one.gemm_forward
    layer.expert_calls += 2 * here
    if work.fused_experts:
        layer.expert_gemm_backward += _rows_backward(expert, rows / here, work.etp, narrow, here)
        # as many operations as forward, at the device's best
        layer.expert_weights_backward += 2 * rows * _expert_weights(expert) / work.etp / (narrow.linear * 1e12)
        # tokens are read and rows written, and rows read and tokens written; what is received is put in order, and back
        moved = (2 * (rows + own) + 4 * rows * (work.ep > 1)) * spec.hidden_size
        one.elements_backward += rows * expert.ffn_size / work.etp  # its output again, for the last matrix's gradient
    else:
        layer.expert_gemm_backward += one.gemm_backward
        # permute, send, receive, and back with the weighted sum
        moved = (4 if work.dispatcher_permutes else 8) * rows * spec.hidden_size
    layer.expert_elements_forward += moved
    layer.expert_elements_backward += moved
    if not work.expert_epilogues:
        if work.clamped_experts:
            _clamp(one, rows * expert.ffn_size / work.etp)
        layer.cast_elements += 0.0 if work.experts_in_bf16 else one.cast_elements
        layer.weight_elements += 0.0 if work.experts_in_bf16 else one.weight_elements
        layer.expert_activation_elements += one.activation_elements
        layer.expert_elements_forward += one.elements_forward
        layer.expert_elements_backward += one.elements_backward
    layer.expert_bias_elements += rows * spec.hidden_size * expert.bias * (0.3 if work.expert_epilogues else 1)
    # kernels of a layer: 140 with experts' own, 108 of a dense one (profiles in docs/measured)
    layer.launches += 0.5 if work.fused_experts else 1.5
    _linear(layer, tokens / work.tp, spec.hidden_size, spec.num_experts, rates)
    if spec.shared is not None:
        _mlp(layer, spec.shared, tokens, work.tp, rates)


def _clamp(layer: Layer, elements: float) -> None:
    """Of gate and up, ``elements`` each, before the fused activation, as Megatron-Core's
    `weighted_bias_quick_geglu_impl` writes it.

    Forward each half is read and written, then both by the concatenation: 8 passes. Backward each half reads gradient
    and input and writes (6), and their gradients are put side by side again (4).
    """
    layer.elements_forward += 8 * elements
    layer.activation_elements += 8 * elements
    layer.elements_backward += 10 * elements


def _rows_backward(spec: FeedForwardSpec, rows: float, tp: float, rates: Rates, groups: int) -> float:
    """Seconds of the two products that give the gradients of inputs, for ``rows`` of each of ``groups``."""
    device = (rates.linear, rates.hbm, rates.multiprocessors, groups)
    inputs, width = (2 if spec.gated else 1), spec.ffn_size / tp
    down = gemm_seconds(rows, width, spec.hidden_size, *device)
    return down + gemm_seconds(rows, spec.hidden_size, inputs * width, *device)


def _expert_weights(spec: FeedForwardSpec) -> float:
    return (3 if spec.gated else 2) * float(spec.hidden_size * spec.ffn_size)


def recomputed(work: Workload, layer: Layer) -> tuple[float, float, float, float]:
    """Seconds of products and of attention, elements, and share of the forward's communication."""
    if work.recompute == "full":
        elements = layer.elements_forward + layer.expert_elements_forward + 6.5 * layer.score_elements
        gemm = layer.gemm_forward + layer.expert_gemm_forward + layer.adapters_forward
        return gemm, layer.attention_forward, elements, 1.0
    if work.recompute == "none":
        return 0.0, 0.0, 0.0, 0.0
    modules = set(work.recompute_modules)
    if not modules:
        if not work.fused_attention:  # Megatron's selective: attention's core
            return 0.0, layer.attention_forward, 6.5 * layer.score_elements, 0.0
        return 0.0, 0.0, layer.elements_forward, 0.0
    if "second_linear" in modules:  # torchtitan: every second product, and all that is cheap
        return 0.5 * layer.gemm_forward, 0.0, layer.elements_forward, 0.5
    return _recomputed_modules(modules, layer)


def _recomputed_modules(modules: set[str], layer: Layer) -> tuple[float, float, float, float]:
    """As `recomputed`, of what Megatron's `--recompute-modules` names; `mlp` are dense MLPs, `moe` whole experts."""
    gemm = elements = again = 0.0
    if "mlp" in modules:
        gemm, elements = layer.mlp_gemm_forward, layer.activation_elements
        again = 0.0 if layer.expert_gemm_forward else 0.5  # beside experts only few layers are dense
    if "moe" in modules:
        gemm, elements, again = gemm + layer.expert_gemm_forward, elements + layer.expert_elements_forward, 1.0
    elif "moe_act" in modules:
        elements += layer.expert_activation_elements
    if "mla_up_proj" in modules:
        gemm += layer.up_gemm_forward
    if "layernorm" in modules:
        elements += layer.elements_forward - layer.activation_elements
    return gemm, layer.attention_forward if "core_attn" in modules else 0.0, elements, again
