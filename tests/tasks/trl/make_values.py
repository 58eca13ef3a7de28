"""Writes `values.safetensors`: what TRL 1.16.0 makes of one batch, for every loss that Paceline has too.

TRL is no dependency, not even of the tests: run this in an environment of its own, with

    pip install trl==1.16.0 transformers==5.24.0 torch==2.13.0
    python tests/tasks/trl/make_values.py

Each loss is computed by the method of TRL's own trainer, on a tiny random Llama in fp32 on the CPU. In the file:

    policy/..., reference/..., score/...    weights, as Transformers names them
    loss/CASE                               TRL's loss
    gradient/CASE/...                       gradients of some weights
    metric/CASE/...                         what TRL's log would show

The batch is in `batch.json`, the sizes of the models in `config.json`.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import trl
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from trl import DPOTrainer, KTOTrainer, RewardTrainer, SFTTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.utils import add_fused_lm_head

HERE = Path(__file__).parent
WATCHED = ("model.norm.weight", "model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight")
SIZES = {
    "vocab_size": 29,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def main() -> None:
    assert trl.__version__ == "1.16.0", trl.__version__
    batch = json.loads((HERE / "batch.json").read_text())
    (HERE / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]} | SIZES)
    )
    tensors: dict[str, Tensor] = {}
    policy, reference = _model(1), _model(2)
    score = LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=1))
    score.model.load_state_dict(policy.model.state_dict())
    with torch.no_grad():
        score.score.weight.copy_(torch.randn(1, 16, generator=torch.Generator().manual_seed(3)))
    for name, model in (("policy", policy), ("reference", reference), ("score", score)):
        tensors |= {f"{name}/{key}": value.clone() for key, value in model.state_dict().items()}
    add_fused_lm_head(policy, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
    add_fused_lm_head(reference)
    cases: dict[str, Any] = {
        "dpo_sigmoid": lambda: _dpo(policy, reference, batch["pairs"], "sigmoid"),
        "dpo_hinge": lambda: _dpo(policy, reference, batch["pairs"], "hinge"),
        "dpo_ipo": lambda: _dpo(policy, reference, batch["pairs"], "ipo"),
        # this version smooths labels in `aot_unpaired` alone, which is the sigmoid loss for a single pair
        "dpo_smoothed": lambda: _dpo(policy, reference, batch["pairs"][:1], "aot_unpaired", label_smoothing=0.1),
        "orpo": lambda: _orpo(policy, batch["pairs"]),
        "kto": lambda: _kto(policy, reference, batch["examples"]),
        "reward": lambda: _reward(score, batch["pairs"]),
        "sft": lambda: _sft(policy, batch["pairs"]),
    }
    for case, compute in cases.items():
        loss, metrics = compute()
        model = score if case == "reward" else policy
        model.zero_grad()
        loss.backward()
        tensors[f"loss/{case}"] = loss.detach().reshape(())
        parameters = dict(model.named_parameters())
        tensors |= {f"gradient/{case}/{name}": parameters[name].grad.clone() for name in WATCHED}
        for name, values in metrics.items():
            tensors[f"metric/{case}/{name}"] = torch.tensor(float(values[0] if isinstance(values, list) else values))
    versions = {"trl": trl.__version__, "torch": torch.__version__, "python": sys.version.split()[0]}
    save_file(tensors, HERE / "values.safetensors", metadata=versions)


def _model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def _trainer(kind: type, **attributes: Any) -> Any:
    """A trainer of TRL's with what its loss reads, and no data set or optimizer."""
    trainer = kind.__new__(kind)
    common = {
        "accelerator": Accelerator(cpu=True),
        "args": SimpleNamespace(gradient_checkpointing_kwargs=None, **attributes.pop("args", {})),
        "aux_loss_enabled": False,
        "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    for name, value in (common | attributes).items():
        setattr(trainer, name, value)
    return trainer


def _padded(rows: list[list[int]], fill: int = 0) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [fill] * (longest - len(row)) for row in rows])


def _inputs(texts: list[tuple[list[int], list[int]]], prefix: str = "") -> dict[str, Tensor]:
    """Prompts with answers, padded on the right."""
    return {
        f"{prefix}input_ids": _padded([prompt + answer for prompt, answer in texts]),
        f"{prefix}attention_mask": _padded([[1] * len(prompt + answer) for prompt, answer in texts]),
        f"{prefix}completion_mask": _padded([[0] * len(prompt) + [1] * len(answer) for prompt, answer in texts]),
    }


def _chosen_then_rejected(pairs: list[dict[str, Any]]) -> list[tuple[list[int], list[int]]]:
    return [(pair["prompt"], pair[which]) for which in ("chosen", "rejected") for pair in pairs]


def _dpo(
    policy: Any, reference: Any, pairs: list[dict[str, Any]], loss: str, label_smoothing: float = 0.0
) -> tuple[Tensor, Any]:
    trainer = _trainer(
        DPOTrainer,
        model=policy,
        ref_model=reference,
        beta=0.3,
        ld_alpha=None,
        precompute_ref_logps=False,
        f_divergence_type="reverse_kl",
        loss_types=[loss],
        loss_weights=[1.0],
        label_smoothing=label_smoothing,
        use_weighting=False,
    )
    found = trainer._compute_loss(policy, _inputs(_chosen_then_rejected(pairs)), False)
    return found, trainer._metrics["eval"]


def _orpo(policy: Any, pairs: list[dict[str, Any]]) -> tuple[Tensor, Any]:
    trainer = _trainer(
        ORPOTrainer, beta=0.3, is_encoder_decoder=False, padding_value=0, max_length=None, args={"max_length": None}
    )
    batch: dict[str, Tensor] = {}
    for which in ("chosen", "rejected"):
        found = _inputs([(pair["prompt"], pair[which]) for pair in pairs])
        batch[f"{which}_input_ids"] = found["input_ids"]
        batch[f"{which}_attention_mask"] = found["attention_mask"]
        batch[f"{which}_labels"] = found["input_ids"].masked_fill(found["completion_mask"] == 0, -100)
    return trainer.get_batch_loss_metrics(policy, batch)


def _kto(policy: Any, reference: Any, examples: list[dict[str, Any]]) -> tuple[Tensor, Any]:
    trainer = _trainer(
        KTOTrainer,
        model=policy,
        ref_model=reference,
        beta=0.3,
        loss_type="kto",
        calculate_KL=True,
        precompute_ref_logps=False,
        desirable_weight=1.0,
        undesirable_weight=1.5,
    )
    inputs = _inputs([(example["prompt"], example["answer"]) for example in examples])
    inputs |= _inputs([(example["prompt"], example["mismatched"]) for example in examples], "KL_")
    inputs["label"] = torch.tensor([example["desirable"] for example in examples])
    return trainer._compute_loss(policy, inputs, False), trainer._metrics["eval"]


def _reward(score: Any, pairs: list[dict[str, Any]]) -> tuple[Tensor, Any]:
    trainer = _trainer(RewardTrainer, model=score, args={"center_rewards_coefficient": 0.01})
    inputs = _inputs(_chosen_then_rejected(pairs))
    del inputs["completion_mask"]
    inputs["margin"] = torch.tensor([pair["margin"] for pair in pairs])
    score.eval()
    return trainer.compute_loss(score, inputs), trainer._metrics["eval"]


def _sft(policy: Any, pairs: list[dict[str, Any]]) -> tuple[Tensor, Any]:
    trainer = _trainer(
        SFTTrainer,
        model=policy,
        compute_loss_func=None,
        label_smoother=None,
        args={"loss_type": "nll", "average_tokens_across_devices": False},
    )
    inputs = _inputs([(pair["prompt"], pair["chosen"]) for pair in pairs])
    labels = inputs["input_ids"].masked_fill(inputs.pop("completion_mask") == 0, -100)
    return trainer.compute_loss(policy, inputs | {"labels": labels}), trainer._metrics["eval"]


if __name__ == "__main__":
    main()
