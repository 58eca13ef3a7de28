"""What could a step reach at most? Attention by kernel and the products of a model, alone, at the model's own shapes.

    python bench/dense_ceilings.py --out ceilings.json       # one GPU, about half a minute

For each model: causal attention forward and with its backward, by each kernel that torch has for it; every linear
forward and backward (three products); and from both the time of a micro-batch that did nothing else, as model TFLOP/s.
Elementwise work, the optimizer, communication and idle time can only lower it. Short bursts: under the power limit of a
long run products are a few percent slower.

Attention is counted twice: `model` is three times the forward, `kernel` 3.5 times, with the scores that the backward
computes again, as kernels are usually compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cut_off
import torch
import torch.nn.functional as F
from dense_one_gpu import LAYERS
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from paceline.config.load import load_recipe
from paceline.config.run import RunConfig
from paceline.costs.layers import training_flops_per_token
from paceline.report.console import make_console, print_table
from paceline.report.table import table
from paceline.runtime.device import device_name, synchronize, versions
from paceline.training.setup import build_model

MODELS = {
    "llama3_8b": ("recipes/llama3_8b.toml", ()),
    "gpt_13b": ("recipes/ladder/7_gathered.toml", ()),
    "llama3_1b": ("recipes/llama3_1b.toml", ()),
}
KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
REPEATS = 10
TINY = (
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.head_dim=16",
    "model.ffn_size=96",
    "model.vocab_size=512",
    "train.seq_len=64",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    parser.add_argument("--one-gpu", action="store_true", help="as many layers as `bench/dense.py --one-gpu` has")
    parser.add_argument("--tiny", action="store_true", help="small shapes on the CPU: whether it runs at all")
    options = parser.parse_args()
    device = torch.device("cpu" if options.tiny else "cuda")
    found: dict[str, Any] = {}
    for name, (recipe, sets) in MODELS.items():
        cut = [f"model.num_layers={LAYERS[name]}"] if options.one_gpu and name in LAYERS else []
        found[name] = ceiling(load_recipe(recipe, [*sets, *cut, *(TINY if options.tiny else ())]).config, device)
    result = {"devices": device_name(device), "versions": versions(), "models": found}
    show(result)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def ceiling(config: RunConfig, device: torch.device) -> dict[str, Any]:
    """Milliseconds of a micro-batch's attention and products, and the speed of both together."""
    tokens = config.train.micro_batch_size * config.train.seq_len
    kernels = attention(config, device)
    products = linears(config, device)
    best = min((each["forward_backward_ms"] for each in kernels.values()), default=None)
    result: dict[str, Any] = {
        "layers": config.model.num_layers,
        "micro_batch_tokens": tokens,
        "attention": kernels,
        "linears": products,
        "linears_ms": sum(each["ms"] * each["number"] for each in products),
    }
    if best is not None:
        result["attention_ms"] = best * config.model.num_layers
        milliseconds = result["attention_ms"] + result["linears_ms"]
        flops = tokens * training_flops_per_token(config.model, config.train.seq_len)
        result["ceiling_tflops"] = flops / milliseconds / 1e9
    return result


def attention(config: RunConfig, device: torch.device) -> dict[str, dict[str, float]]:
    """Of one layer, by kernel; kernels that refuse the shape are left out."""
    model, train = config.model, config.train
    (q_heads, kv_heads, width) = (model.num_heads, model.blocks()[0].attention.num_kv_heads, model.qk_head_dim)
    shape = (train.micro_batch_size, train.seq_len)
    q, k, v = (
        torch.randn(*shape, heads, width, device=device, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for heads in (q_heads, kv_heads, kv_heads)
    )
    gradient = torch.randn(*shape, q_heads, width, device=device, dtype=torch.bfloat16).transpose(1, 2)
    forward_flops = 2 * shape[0] * q_heads * shape[1] ** 2 * width  # causal: half of the scores
    found = {}
    for name, kernel in KERNELS.items() if device.type == "cuda" else [("cpu", SDPBackend.FLASH_ATTENTION)]:

        def forward(kernel: SDPBackend = kernel) -> torch.Tensor:
            with sdpa_kernel(kernel):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q_heads != kv_heads)

        def both(kernel: SDPBackend = kernel) -> None:
            torch.autograd.grad(forward(kernel), (q, k, v), gradient)

        try:
            ahead, all_of_it = milliseconds(forward, device), milliseconds(both, device)
        except RuntimeError:
            continue  # torch's way to say that a kernel does not take this
        found[name] = {
            "forward_ms": ahead,
            "forward_backward_ms": all_of_it,
            "forward_tflops": forward_flops / ahead / 1e9,
            "model_tflops": 3 * forward_flops / all_of_it / 1e9,
            "kernel_tflops": 3.5 * forward_flops / all_of_it / 1e9,
        }
    return found


def linears(config: RunConfig, device: torch.device) -> list[dict[str, Any]]:
    """Every shape of a linear, how many the model has, and the time of its three products."""
    tokens = config.train.micro_batch_size * config.train.seq_len
    modules = (module for module in build_model(config).modules() if isinstance(module, nn.Linear))
    shapes = Counter((module.in_features, module.out_features) for module in modules)
    shapes[config.model.hidden_size, config.model.vocab_size] += 1  # the head, which is no module of that kind
    found = []
    for (width, out), number in shapes.items():
        # the head runs over slices of the tokens, whose logits fit the memory
        rows = min(tokens, config.train.loss_chunk_tokens) if out == config.model.vocab_size else tokens
        x, w = (torch.randn(*size, device=device, dtype=torch.bfloat16) for size in ((rows, width), (out, width)))
        dy = torch.randn(rows, out, device=device, dtype=torch.bfloat16)
        products = (lambda x=x, w=w: x @ w.t(), lambda dy=dy, w=w: dy @ w, lambda dy=dy, x=x: dy.t() @ x)
        each = [milliseconds(product, device) * tokens / rows for product in products]
        flops = 2 * tokens * width * out
        found.append(
            {
                "in": width,
                "out": out,
                "number": number,
                "ms": sum(each),
                "tflops": 3 * flops / sum(each) / 1e9,
                "by_product_tflops": [round(flops / took / 1e9, 1) for took in each],
            }
        )
    return found


def milliseconds(call: Callable[[], Any], device: torch.device) -> float:
    """Median of several calls after three that warm up."""
    for _ in range(3):
        call()
    synchronize(device)
    if device.type != "cuda":
        times = []
        for _ in range(3):
            began = time.perf_counter()
            call()
            times.append((time.perf_counter() - began) * 1e3)
        return statistics.median(times)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    synchronize(device)
    return statistics.median(marks[i].elapsed_time(marks[i + 1]) for i in range(REPEATS))


def show(result: dict[str, Any]) -> None:
    rows = []
    for model, found in result["models"].items():
        for name, each in found["attention"].items():
            rows.append(
                (model, f"attention, {name}", f"{each['forward_backward_ms']:.3f}", f"{each['kernel_tflops']:.0f}")
            )
        for each in found["linears"]:
            title = f"{each['number']} x {each['in']} -> {each['out']}"
            rows.append((model, title, f"{each['ms']:.3f}", f"{each['tflops']:.0f}"))
        if "ceiling_tflops" in found:
            total = f"{found['attention_ms'] + found['linears_ms']:.1f}"
            rows.append((model, "both, of a micro-batch", total, f"{found['ceiling_tflops']:.0f}"))
    print_table(make_console(), table(("model", "what", ">ms", ">TFLOP/s"), rows))


if __name__ == "__main__":
    cut_off.run(main)
