"""What kind of work is a GPU kernel, by its name?

The first pattern that fits counts. Computation, communication and memory are told apart as HolisticTraceAnalysis does:
what NCCL (or RCCL) runs is communication, copies and fills by the driver are memory, all else is computation.
"""

from __future__ import annotations

import re

KINDS: tuple[tuple[str, str], ...] = (
    ("communication", r"nccl|rccl|msccl|deep_?ep|nvshmem|all_?reduce.*(kernel|one_shot|two_shot)|multimem"),
    ("attention", r"flash|fmha|cudnn.*sdpa|sdpa|attention|cudnn_generated|attn"),
    ("matrix products", r"gemm|nvjet|cutlass|cublas|xmma|_mma|wgmma|Cijk_|matmul|dot_kernel|gemv|splitK"),
    ("optimizer", r"adam|multi_tensor_apply|lpnorm|foreach|lamb|fused_optim"),
    ("softmax", r"softmax"),
    ("norm", r"layer_?norm|rms_?norm|batch_norm"),
    ("sorting and routing", r"topk|radix|bitonic|sort|permute|scatter_|index_put|gather"),
    ("compiled (triton)", r"triton"),
    ("copies and casts", r"copy|cat_|CatArray|cast|fill|transpose"),
    ("element-wise and reductions", r""),
)
"""Name, and what the name of a kernel of this kind contains, whatever its case."""
MEMORY = "memory"
"""Copies and fills that the driver runs: cat ``gpu_memcpy`` and ``gpu_memset``."""
NAMES = (*(name for name, _ in KINDS), MEMORY)
COMMUNICATION, ATTENTION, PRODUCTS = (
    NAMES.index("communication"),
    NAMES.index("attention"),
    NAMES.index("matrix products"),
)
OPTIMIZER, SOFTMAX = NAMES.index("optimizer"), NAMES.index("softmax")
MEMORY_INDEX = NAMES.index(MEMORY)
_COMPILED = [re.compile(pattern, re.IGNORECASE) for _, pattern in KINDS]

COLLECTIVES: tuple[tuple[str, str], ...] = (
    ("all-reduce", r"all_?reduce"),
    ("reduce-scatter", r"reduce_?scatter"),
    ("all-gather", r"all_?gather"),
    ("all-to-all", r"all_?to_?all|alltoall"),
    ("broadcast", r"broadcast|bcast"),
    ("send and receive", r"send|recv"),
    ("collective", r""),
)


def kind_index(name: str, category: str = "kernel") -> int:
    """Index into `NAMES`.

    Args:
        category: of the trace event; copies and fills of the driver are memory whatever they are called.
    """
    if "memcpy" in category or "memset" in category or name.startswith(("Memcpy ", "Memset ")):
        return MEMORY_INDEX
    return next(index for index, pattern in enumerate(_COMPILED) if pattern.search(name))


def collective_of(name: str) -> str:
    """``ncclDevKernel_AllGather_RING_LL(...)`` is an all-gather."""
    return next(kind for kind, pattern in COLLECTIVES if re.search(pattern, name, re.IGNORECASE))


def is_fp32_product(name: str) -> bool:
    """Whether a matrix product works in fp32 outside of the tensor cores, by its name: ``sgemm``, ``ffma``,
    ``simt``."""
    return (
        bool(re.search(r"sgemm|_ffma|simt_sgemm|f32f32_f32f32_f32", name, re.IGNORECASE)) and "tf32" not in name.lower()
    )
