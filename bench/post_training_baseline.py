"""Fine-tuning of a recipe by Transformers, PEFT and Liger kernels, timed as `paceline train` is.

    python bench/post_training_baseline.py recipes/llama3_8b.toml --set lora.rank=16 --recompute none --out line.jsonl
    torchrun --nproc-per-node 2 bench/post_training_baseline.py recipes/llama3_8b.toml --recompute full --out line.jsonl

Transformers, PEFT and Liger are no dependencies of ours: what is installed is used, and the line says what was. Without
PEFT the same adapters are made here (`Adapted`); without Liger their loss makes whole logits.

The same work: the rows of the recipe's own data in the recipe's order (the loader of `paceline train` hands them out),
documents of a packed row apart, positions that begin anew, labels of answers alone, the loss divided by the labels of
the whole global batch, AdamW, clipping at the recipe's norm. Attention is FlashAttention through PyTorch: `varlen_attn`
over the documents of a row, or SDPA where a row is one document. On a CPU SDPA with a mask takes its place.

Full fine-tuning: fp32 masters and moments, as in bench/moe_baseline.py: on one GPU bf16 weights with masters updated a
tensor at a time, on several FSDP2. Adapters: frozen bf16 weights, whole on every GPU; fp32 masters of adapters alone.
`--recompute` is the baseline's own setting; bench/post_training.py measures both and takes the faster.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import cut_off
import torch
import torch.distributed as dist
from moe_baseline import MISSING, Alone, fill, refuse_other_size, speed_of, their_config
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from paceline.bench.train import StepClock
from paceline.config.load import Recipe, load_recipe
from paceline.config.lora import LoraConfig
from paceline.config.model import ModelConfig
from paceline.config.run import RunConfig
from paceline.costs.layers import Documents
from paceline.data.batch import Batch
from paceline.data.document_lengths import document_lengths
from paceline.parallel.mesh import ParallelMesh
from paceline.runtime.device import choose_device, reset_peak_memory, versions
from paceline.runtime.process import ProcessInfo, process_group, process_info
from paceline.training.feed import Feed, open_datasets

VARLEN = "torch_varlen"
"""As the attention below is known to Transformers."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--recompute", choices=("none", "full"), default="none", help="gradient checkpointing")
    parser.add_argument("--warm-up", type=int, default=2, help="steps that are not measured")
    parser.add_argument("--steps", type=int, default=4, help="steps that are")
    parser.add_argument("--gemm-seconds", type=float, default=2.0)
    parser.add_argument("--out", type=Path, help="append the line of JSON to this file")
    options = parser.parse_args()
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        text = MISSING.replace("moe_baseline", "post_training_baseline")
        parser.exit(2, text.format(python=sys.executable, error=error) + "\n")
    recipe = load_recipe(options.recipe, options.overrides)
    info = process_info()
    device = choose_device(info, recipe.config.cluster.device)
    with process_group(info, device, timeout_seconds=600):
        record = measure(transformers, recipe, info, device, options)
    if info.is_main:
        line = json.dumps({**record, "recipe": recipe.config.model_dump(mode="json")})
        print(line)
        if options.out:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


def measure(
    transformers: Any, recipe: Recipe, info: ProcessInfo, device: torch.device, options: argparse.Namespace
) -> dict[str, Any]:
    """Steps of the whole work; the figures of `paceline bench train`, and what was used."""
    config, train = recipe.config, recipe.config.train
    samples = (options.warm_up + options.steps) * train.global_batch_size
    datasets = open_datasets(config, recipe.registry, train_samples=samples)
    mesh = ParallelMesh(config.parallel, world_size=info.world_size, rank=info.rank, device_type=device.type)
    feed = Feed.open(datasets.train, config, mesh, device, start_sample=0)
    used = {"transformers": transformers.__version__}
    system = build(transformers, config, info, device, recompute=options.recompute == "full", used=used)
    clock, losses = StepClock(device), []
    try:
        for step in range(1, options.warm_up + options.steps + 1):
            losses.append(one_step(system, feed.next_step(), device))
            clock.mark()
            if step == options.warm_up:
                reset_peak_memory(device)
    finally:
        feed.close()
    found = document_lengths(datasets.train.source)
    documents = None if found is None else Documents(counts=found.counts, tokens=found.tokens)
    seconds = clock.seconds()[-options.steps :]
    return {
        **speed_of(config, device, seconds, info.world_size, options.gemm_seconds, documents),
        "loss": losses[-1].item(),
        "losses": [round(loss.item(), 5) for loss in losses],
        "parameters": system.num_parameters,
        "recompute": options.recompute,
        "used": used,
        "versions": versions(),
    }


class System(Protocol):
    """A model of theirs and what trains it."""

    num_parameters: int
    model: nn.Module
    attention: DocumentAttention | None

    def before(self, *, last: bool) -> None:
        """A micro-batch begins."""

    def update(self) -> None: ...


def one_step(system: System, batches: Sequence[Batch], device: torch.device) -> Tensor:
    """Forward, backward and update of a global batch; its loss, the mean over the labels of all ranks."""
    labels = torch.stack([batch.num_tokens() for batch in batches]).sum()
    world = 1
    if dist.is_initialized() and (world := dist.get_world_size()) > 1:
        dist.all_reduce(labels)
    total = torch.zeros((), device=device)
    for number, batch in enumerate(batches, start=1):
        system.before(last=number == len(batches))
        if system.attention is not None:
            system.attention.begin(batch.documents)
        loss = loss_of(system.model, batch, labels)
        # gradients are averaged over ranks
        (loss * world).backward()
        total += loss.detach()
    system.update()
    if world > 1:
        dist.all_reduce(total)
    return total


def loss_of(model: nn.Module, batch: Batch, labels: Tensor) -> Tensor:
    """Sum of a micro-batch's losses over ``labels``. Ours are shifted already."""
    more: dict[str, Any] = {}
    if batch.positions is not None:
        more["position_ids"] = batch.positions
    found: Tensor = model(
        input_ids=batch.tokens, labels=batch.labels, shift_labels=batch.labels, num_items_in_batch=labels, **more
    ).loss
    return found


# ---- attention by documents


class DocumentAttention:
    """Attention of Transformers' form ([B, H, T, D] each, [B, T, H, D] out) within the documents of the rows at hand,
    by FlashAttention of PyTorch; by SDPA where every row is one document."""

    def __init__(self) -> None:
        self._starts: Tensor | None = None
        self._longest = 0
        attend = importlib.import_module("torch.nn.attention.varlen").varlen_attn
        known = inspect.signature(attend).parameters
        # its words for causal changed between 2.10 and 2.13
        causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
        self._attend, self._options, self._groups = attend, causal, "enable_gqa" in known

    @classmethod
    def known_to(cls, transformers: Any) -> DocumentAttention:
        found = cls()
        transformers.AttentionInterface.register(VARLEN, found)
        transformers.AttentionMaskInterface.register(VARLEN, lambda *arguments, **more: None)
        return found

    def begin(self, documents: Tensor | None) -> None:
        """Looks at [B, T] once for all layers: where documents begin, over all rows one after the other."""
        self._starts = None
        if documents is None:
            return
        starts, self._longest = spans(documents)
        if len(starts) - 1 > len(documents):
            self._starts = starts

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **more: Any
    ) -> tuple[Tensor, None]:
        grouped, scale = key.shape[1] != query.shape[1], more.get("scaling")
        if self._starts is None:
            out = nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scale, enable_gqa=grouped
            )
            return out.transpose(1, 2), None
        rows, heads, length, width = query.shape
        query, key, value = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
        options = self._options | ({"enable_gqa": grouped} if self._groups else {})
        starts, longest = self._starts, self._longest
        out = self._attend(query, key, value, starts, starts, longest, longest, scale=scale, **options)
        return out.view(rows, length, heads, width), None


def spans(documents: Tensor) -> tuple[Tensor, int]:
    """int32 [number + 1]: where documents of [B, T] begin in all rows one after the other, and their end; the longest
    of them."""
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    begins = first.flatten().nonzero().flatten().int()
    starts = torch.cat([begins, begins.new_tensor([documents.numel()])])
    return starts, int((starts[1:] - starts[:-1]).max())


# ---- their model of our recipe


def config_of(transformers: Any, model: ModelConfig) -> Any:
    """Their configuration: of Llama here, of mixtures of experts as in bench/moe_baseline.py.

    Raises:
        SystemExit: it is none that they have.
    """
    if model.is_moe:
        return their_config(transformers, model)
    if model.attention != "gqa" or model.activation != "swiglu" or model.qk_norm or model.position != "rope":
        raise SystemExit("bench/post_training_baseline.py: this recipe is no Llama\n  Take recipes/llama3_8b.toml.")
    return transformers.LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.qk_head_dim,
        intermediate_size=model.dense_ffn_size,
        max_position_embeddings=model.max_seq_len,
        rms_norm_eps=model.norm_eps,
        initializer_range=model.init_std,
        tie_word_embeddings=model.tie_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )


def build(
    transformers: Any,
    config: RunConfig,
    info: ProcessInfo,
    device: torch.device,
    *,
    recompute: bool,
    used: dict[str, Any],
) -> System:
    """``used``: is told what the model is made of."""
    shape = config_of(transformers, config.model)
    attention = DocumentAttention.known_to(transformers) if device.type == "cuda" else None
    used["attention"] = "SDPA" if attention is None else "FlashAttention of PyTorch (varlen_attn)"
    sharded = info.world_size > 1 and not config.lora.on
    with torch.device("meta" if sharded else device):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(
            shape,
            dtype=torch.float32 if sharded else torch.bfloat16,
            attn_implementation="sdpa" if attention is None else VARLEN,
            **({"experts_implementation": "grouped_mm"} if config.model.is_moe else {}),
        )
    model.train()
    plain = config.model_copy(update={"lora": LoraConfig()})
    refuse_other_size(sum(each.numel() for each in model.parameters()), plain)
    used["liger"] = add_liger(model, device)
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    system: Adapters | Sharded | Whole
    if config.lora.on:
        model, used["peft"] = add_adapters(model, config.lora)
        system = Adapters(model, config.optim.grad_clip)
    elif sharded:
        system = Sharded(model, shape, device, config.optim.grad_clip)
    else:
        system = Whole(model, config.optim.grad_clip)
    system.attention = attention
    return system


def add_liger(model: nn.Module, device: torch.device) -> str | None:
    """Their fused kernels of norms, rope, SwiGLU and loss; their version, or None without them or a GPU."""
    if device.type != "cuda":
        return None
    try:
        liger = importlib.import_module("liger_kernel.transformers")
    except ImportError:
        return None
    # experts of Transformers 5 are one module of grouped products, which their fused MLP does not know
    more = {"swiglu": False} if hasattr(model.config, "num_experts") else {}
    liger._apply_liger_kernel_to_instance(model=model, **more)
    return importlib.import_module("importlib.metadata").version("liger-kernel")


# ---- adapters

_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def add_adapters(model: nn.Module, lora: LoraConfig) -> tuple[nn.Module, str | None]:
    """Frozen weights, and adapters by PEFT beside the linears that the recipe names; its version, or None without."""
    targets = [name for name in _NAMES if "all-linear" in lora.targets or name in lora.targets]
    # routed experts are one tensor each, which the recipe's adapters leave alone too
    try:
        peft = importlib.import_module("peft")
    except ImportError:
        model.requires_grad_(False)
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and name.rpartition(".")[2] in targets:
                model.set_submodule(name, Adapted(module, lora))
        return model, None
    wanted = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        use_rslora=lora.use_rslora,
        use_dora=lora.dora,
        bias="none",
        task_type="CAUSAL_LM",
    )
    # bf16 adapters with fp32 masters: fp32 ones would multiply in fp32, which costs them time
    return peft.get_peft_model(model, wanted, autocast_adapter_dtype=False), str(peft.__version__)


class Adapted(nn.Module):
    """A frozen linear and its pair, as PEFT computes it."""

    def __init__(self, linear: nn.Linear, lora: LoraConfig) -> None:
        super().__init__()
        weight, self.linear, self.scale = linear.weight, linear, lora.scale
        self.dropout = nn.Dropout(lora.dropout) if lora.dropout else nn.Identity()
        self.lora_A = nn.Linear(linear.in_features, lora.rank, bias=False, device=weight.device, dtype=weight.dtype)
        self.lora_B = nn.Linear(lora.rank, linear.out_features, bias=False, device=weight.device, dtype=weight.dtype)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x) + self.lora_B(self.lora_A(self.dropout(x))) * self.scale
        return found


# ---- what trains it


class Whole(Alone):
    """All weights on one GPU."""

    attention: DocumentAttention | None = None

    def before(self, *, last: bool) -> None:
        pass


class Adapters:
    """Frozen weights whole on every GPU; fp32 masters of the adapters, whose gradients are averaged once a step."""

    attention: DocumentAttention | None = None

    def __init__(self, model: nn.Module, clip: float) -> None:
        self.model, self.clip = model, clip
        self.num_parameters = sum(weight.numel() for weight in model.parameters())
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        self.masters = [weight.detach().float() for weight in self.weights]
        self.optimizer = torch.optim.AdamW(self.masters, lr=2e-4, fused=self.weights[0].device.type == "cuda")

    def before(self, *, last: bool) -> None:
        pass

    @torch.no_grad()
    def update(self) -> None:
        missing = [index for index, weight in enumerate(self.weights) if weight.grad is None]
        assert not missing, f"{len(missing)} adapters have no gradient"
        flat = torch.cat([weight.grad.flatten().float() for weight in self.weights if weight.grad is not None])
        if dist.is_initialized() and (world := dist.get_world_size()) > 1:
            dist.all_reduce(flat)
            flat /= world
        flat *= (self.clip / (torch.linalg.vector_norm(flat) + 1e-6)).clamp(max=1.0)
        for master, piece in zip(self.masters, flat.split([each.numel() for each in self.masters]), strict=True):
            master.grad = piece.view_as(master)
        self.optimizer.step()
        torch._foreach_copy_(self.weights, self.masters)
        for weight in self.weights:
            weight.grad = None


class Sharded:
    """FSDP2 over each layer: fp32 shards, bf16 in the products, gradients reduced once a step."""

    attention: DocumentAttention | None = None

    def __init__(self, model: Any, shape: Any, device: torch.device, clip: float) -> None:
        self.model, self.clip = model, clip
        self.num_parameters = sum(weight.numel() for weight in model.parameters())
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=policy, reshard_after_forward=True)
        fully_shard(model, mp_policy=policy, reshard_after_forward=True)
        model.to_empty(device=device)
        fill(model, shape.initializer_range)
        for name, module in list(model.named_modules()):
            if type(module).__name__.endswith("RotaryEmbedding"):
                # its buffers are computed where it is built, not kept in a state
                with torch.device(device):
                    model.set_submodule(name, type(module)(shape))
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")

    def before(self, *, last: bool) -> None:
        model: Any = self.model
        model.set_requires_gradient_sync(last)

    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    cut_off.run(main)
