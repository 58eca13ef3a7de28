"""The work of a recipe by the Transformers library's own model of the same widths, timed as `paceline bench train` is.

    python bench/moe_baseline.py recipes/qwen3_moe_12l.toml --set model.num_layers=6 --steps 4 --out line.jsonl
    torchrun --nproc-per-node 2 bench/moe_baseline.py recipes/qwen3_moe_12l.toml --out line.jsonl

Transformers is no dependency of ours: `pip install transformers` beside a torch for the GPU. The models are
Qwen3-MoE, Mixtral and DeepSeek-V2, read off the recipe's [model] section, with experts by grouped products
(`experts_implementation="grouped_mm"`), attention by torch (`sdpa`), nothing recomputed and the whole vocabulary.

The same work: as many sequences a micro-batch and micro-batches a step, made-up tokens, bf16 weights, fp32 masters and
moments, clipping of the global norm at 1.0, AdamW. One GPU: bf16 weights and gradients, masters updated layer by layer,
so that no second copy of the gradients lies in memory. Several: FSDP2 over each layer with fp32 shards, gradients
reduced once a step. Left out, in their favour: the balance loss, which their code makes of one-hot tensors.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cut_off
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from paceline.bench.train import StepClock
from paceline.config.load import load_recipe
from paceline.config.model import ModelConfig
from paceline.config.run import RunConfig
from paceline.costs.layers import Documents
from paceline.runtime.device import GIB, choose_device, device_name, memory_stats, reset_peak_memory, versions
from paceline.runtime.gemm import sustained_gemm
from paceline.runtime.process import ProcessInfo, process_group, process_info
from paceline.training.setup import build_model, rates

MISSING = (
    "bench/moe_baseline.py needs the Transformers library, which cannot be imported in {python}: {error}\n"
    "  It is no dependency of Paceline: install it there (pip install transformers), or leave the part `baseline` out."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--warm-up", type=int, default=2, help="steps that are not measured")
    parser.add_argument("--steps", type=int, default=4, help="steps that are")
    parser.add_argument("--gemm-seconds", type=float, default=2.0)
    parser.add_argument("--out", type=Path, help="append the line of JSON to this file")
    options = parser.parse_args()
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        parser.exit(2, MISSING.format(python=sys.executable, error=error) + "\n")
    config = load_recipe(options.recipe, ["data.train=synthetic", *options.overrides]).config
    info = process_info()
    device = choose_device(info, config.cluster.device)
    with process_group(info, device, timeout_seconds=600):
        record = measure(transformers, config, info, device, options)
    if info.is_main:
        line = json.dumps({**record, "recipe": config.model_dump(mode="json")})
        print(line)
        if options.out:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


def measure(
    transformers: Any, config: RunConfig, info: ProcessInfo, device: torch.device, options: argparse.Namespace
) -> dict[str, Any]:
    """Steps of the whole work; the figures of `paceline bench train`."""
    train = config.train
    micro_batches = train.global_batch_size // (train.micro_batch_size * info.world_size)
    trained = Sharded.build if info.world_size > 1 else Alone.build
    system = trained(their_config(transformers, config.model), transformers, device, config.optim.grad_clip)
    refuse_other_size(system.num_parameters, config)
    clock, generator = StepClock(device), torch.Generator(device=device).manual_seed(info.rank)
    shape = (train.micro_batch_size, train.seq_len)
    loss = torch.zeros(())
    for step in range(1, options.warm_up + options.steps + 1):
        losses = []
        for micro_batch in range(1, micro_batches + 1):
            tokens = torch.randint(config.model.vocab_size, shape, device=device, generator=generator)
            losses.append(system.micro_batch(tokens, micro_batches, last=micro_batch == micro_batches))
        system.update()
        clock.mark()
        loss = torch.stack(losses).mean()
        if step == options.warm_up:
            reset_peak_memory(device)
    return {
        **speed_of(config, device, clock.seconds()[-options.steps :], info.world_size, options.gemm_seconds),
        "loss": loss.item(),
        "parameters": system.num_parameters,
        "versions": {**versions(), "transformers": transformers.__version__},
    }


def speed_of(
    config: RunConfig,
    device: torch.device,
    seconds: Sequence[float],
    world_size: int,
    gemm_seconds: float,
    documents: Documents | None = None,
) -> dict[str, Any]:
    """What every baseline says of its measured steps; a matrix product is measured here, after the peak is read.

    Attention counts within ``documents``, where rows hold several, as it does for ours.
    """
    train, peak = config.train, memory_stats(device).peak_bytes / GIB
    gemm = sustained_gemm(device, seconds=gemm_seconds)
    tokens_per_second = train.global_batch_size * train.seq_len / statistics.median(seconds) / world_size
    flops = rates(config, device, documents).flops_per_token or math.nan
    return {
        "step_seconds": statistics.median(seconds),
        "step_seconds_min": min(seconds),
        "step_seconds_max": max(seconds),
        "steps": len(seconds),
        "tokens_per_second_per_gpu": tokens_per_second,
        "tflops_per_gpu": tokens_per_second * flops / 1e12,
        "peak_memory_gib": peak,
        "sustained_gemm_tflops": gemm.tflops,
        "fraction_of_gemm": tokens_per_second * flops / 1e12 / gemm.tflops,
        "devices": f"{world_size} x {device_name(device)}",
    }


# ---- their model of our recipe


def their_config(transformers: Any, model: ModelConfig) -> Any:
    """Their configuration of this network.

    Raises:
        SystemExit: it is none of the three families.
    """
    shared: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_heads if model.attention == "mla" else model.kv_heads,
        "intermediate_size": model.dense_ffn_size,
        "max_position_embeddings": model.max_seq_len,
        "rms_norm_eps": model.norm_eps,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tie_embeddings,
        "num_experts_per_tok": model.top_k,
        "use_cache": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    theta = {"rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta}}
    expert = model.moe.ffn_size or model.dense_ffn_size
    if model.attention == "mla" and model.moe.num_shared_experts:
        return transformers.DeepseekV2Config(
            **shared,
            **theta,  # yarn changes constants, not the work
            kv_lora_rank=model.kv_lora_rank,
            q_lora_rank=model.q_lora_rank or None,
            qk_nope_head_dim=model.qk_nope_head_dim,
            qk_rope_head_dim=model.qk_rope_head_dim,
            v_head_dim=model.v_head_dim,
            n_routed_experts=model.num_experts,
            n_shared_experts=model.moe.num_shared_experts,
            moe_intermediate_size=expert,
            first_k_dense_replace=model.moe.first_dense_layers,
            norm_topk_prob=model.moe.normalize_top_k,
        )
    if model.is_moe and model.qk_norm:
        return transformers.Qwen3MoeConfig(
            **shared,
            **theta,
            head_dim=model.qk_head_dim,
            num_experts=model.num_experts,
            moe_intermediate_size=expert,
            norm_topk_prob=model.moe.normalize_top_k,
        )
    if model.is_moe and model.attention == "gqa" and model.activation == "swiglu":
        return transformers.MixtralConfig(
            **{**shared, **theta, "intermediate_size": expert},
            head_dim=model.qk_head_dim,
            num_local_experts=model.num_experts,
        )
    raise SystemExit(
        "bench/moe_baseline.py: this recipe is neither Qwen3-MoE, Mixtral nor DeepSeek-V2 as Transformers has them\n"
        "  Take recipes/qwen3_moe_12l.toml, recipes/moe/mixtral_4l.toml or recipes/moe/deepseek_v2_lite_10l.toml."
    )


def their_model(config: Any, transformers: Any, dtype: torch.dtype, device: torch.device | str) -> nn.Module:
    with torch.device(device):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="sdpa", experts_implementation="grouped_mm"
        )
    return model.train()


def refuse_other_size(theirs: int, config: RunConfig) -> None:
    """
    Raises:
        SystemExit: their model has other parameters than ours, so it would not be the same work.
    """
    ours = sum(parameter.numel() for parameter in build_model(config).parameters())
    if theirs != ours:
        raise SystemExit(f"bench/moe_baseline.py: their model has {theirs:,} parameters, ours {ours:,}: other work")


# ---- one GPU, and several


class Alone:
    """bf16 weights and gradients; fp32 masters and moments, updated a module at a time."""

    def __init__(self, model: nn.Module, clip: float) -> None:
        self.model, self.clip = model, clip
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        self.num_parameters = sum(weight.numel() for weight in model.parameters())
        self.masters = [weight.detach().float() for weight in self.weights]
        fused = self.weights[0].device.type == "cuda"
        self.optimizers = [torch.optim.AdamW([master], lr=3e-4, fused=fused) for master in self.masters]

    @classmethod
    def build(cls, config: Any, transformers: Any, device: torch.device, clip: float) -> Alone:
        return cls(their_model(config, transformers, torch.bfloat16, device), clip)

    def micro_batch(self, tokens: Tensor, number: int, *, last: bool) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        (loss / number).backward()
        return loss.detach()

    @torch.no_grad()
    def update(self) -> None:
        gradients = [weight.grad for weight in self.weights if weight.grad is not None]
        # torch.nn.utils.get_total_norm (2.13) has no dtype, and would round the norm of bf16 gradients to bf16
        norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
        factor = (self.clip / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-6)).clamp(max=1.0)
        for weight, master, optimizer in zip(self.weights, self.masters, self.optimizers, strict=True):
            if weight.grad is None:
                continue  # of an expert layer that nobody chose, or a parameter that takes no part
            master.grad = weight.grad.float().mul_(factor)
            optimizer.step()
            master.grad, weight.grad = None, None
            weight.copy_(master)


class Sharded:
    """FSDP2: fp32 shards, bf16 in the products, gradients kept whole and reduced once a step."""

    def __init__(self, model: nn.Module, num_parameters: int, clip: float) -> None:
        self.model, self.clip, self.num_parameters = model, clip, num_parameters
        fused = next(model.parameters()).device.type == "cuda"
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=fused)

    @classmethod
    def build(cls, config: Any, transformers: Any, device: torch.device, clip: float) -> Sharded:
        model: Any = their_model(config, transformers, torch.float32, "meta")
        size = sum(parameter.numel() for parameter in model.parameters())
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=policy, reshard_after_forward=True)
        fully_shard(model, mp_policy=policy, reshard_after_forward=True)
        model.to_empty(device=device)
        fill(model, config.initializer_range)
        for name, module in list(model.named_modules()):
            if type(module).__name__.endswith("RotaryEmbedding"):
                # its buffers are computed where it is built, not kept in a state
                with torch.device(device):
                    model.set_submodule(name, type(module)(config))
        return cls(model, size, clip)

    def micro_batch(self, tokens: Tensor, number: int, *, last: bool) -> Tensor:
        model: Any = self.model
        model.set_requires_gradient_sync(last)
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        (loss / number).backward()
        return loss.detach()

    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def fill(model: nn.Module, std: float) -> None:
    """Random matrices, ones for norms: what their own initialisation gives, on shards."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, std)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            parameter.fill_(1.0)


if __name__ == "__main__":
    cut_off.run(main)
