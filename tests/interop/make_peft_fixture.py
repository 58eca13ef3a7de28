"""Writes tests/interop/peft_fixture: adapters as PEFT saves them, and what PEFT computes and learns with them.

Run where `peft` is installed (0.21.2 wrote what is there):

    PYTHONPATH=src:. python tests/interop/make_peft_fixture.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.interop.hf_links import hf_links
from tests.interop.peft_numbers import BATCH, FOLDER, KINDS, LR, MODEL, STEPS, WEIGHT_DECAY, base_weights


def main() -> None:
    for kind, settings in KINDS.items():
        folder = FOLDER / kind
        model = _model()
        adapted = _adapt(model, settings)
        adapted.save_pretrained(folder)
        config = folder / "adapter_config.json"
        config.write_text(config.read_text().replace(str(Path.cwd()), ""))
        numbers = _numbers(adapted)
        save_file(
            {name: value.detach().contiguous() for name, value in numbers.items()}, folder / "numbers.safetensors"
        )
        (folder / "README.md").unlink(missing_ok=True)

    _write_eva(FOLDER / "eva")
    _write_reward(FOLDER / "reward")


def _write_reward(folder: Path) -> None:
    """A classifier of one label: pairs, and its score saved whole."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForSequenceClassification

    language = _model()
    config = language.config
    config.num_labels, config.pad_token_id = 1, 0
    torch.manual_seed(1)
    model = LlamaForSequenceClassification(config)
    model.model.load_state_dict(language.model.state_dict())
    settings: dict[str, Any] = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    adapted = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", **settings))
    for name, parameter in adapted.named_parameters():
        if ".lora_B." in name or "score.modules_to_save" in name:
            parameter.data.normal_(std=0.2)
    adapted.eval().save_pretrained(folder)
    tokens = BATCH[0].clamp(min=1)  # no padding: the last token is scored
    with torch.no_grad():
        scores = adapted(input_ids=tokens).logits[:, 0]
    save_file({"scores": scores.contiguous()}, folder / "numbers.safetensors")
    (folder / "README.md").unlink(missing_ok=True)


def _write_eva(folder: Path) -> None:
    """An adapter that EVA began: ranks dealt out by what inputs explain, and alphas that keep its scale."""
    from peft import EvaConfig, LoraConfig, get_peft_model
    from peft.tuners.lora.eva import initialize_lora_eva_weights

    torch.manual_seed(1)
    eva = EvaConfig(rho=3.0)
    config = LoraConfig(
        task_type="CAUSAL_LM", target_modules="all-linear", r=2, lora_alpha=6, init_lora_weights="eva", eva_config=eva
    )
    adapted = get_peft_model(_model(), config, low_cpu_mem_usage=True)
    inputs = torch.randint(0, MODEL.vocab_size, (8, 2, MODEL.max_seq_len))
    batches = [{"input_ids": rows, "attention_mask": torch.ones_like(rows)} for rows in inputs]
    initialize_lora_eva_weights(adapted, batches)
    for name, parameter in adapted.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(std=0.2)
    adapted.save_pretrained(folder)
    with torch.no_grad():
        logits = adapted(input_ids=BATCH[0]).logits
    save_file({"logits": logits.contiguous()}, folder / "numbers.safetensors")
    (folder / "README.md").unlink(missing_ok=True)


def _model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=MODEL.vocab_size,
        hidden_size=MODEL.hidden_size,
        intermediate_size=MODEL.ffn_size,
        num_hidden_layers=MODEL.num_layers,
        num_attention_heads=MODEL.num_heads,
        num_key_value_heads=MODEL.num_kv_heads,
        max_position_embeddings=MODEL.max_seq_len,
        rms_norm_eps=MODEL.norm_eps,
        rope_theta=MODEL.rope_theta,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config)
    table, ours = hf_links(MODEL, "llama"), base_weights()
    theirs = {link.theirs: ours[name] for name, links in table.links.items() for link in links}
    model.load_state_dict(theirs, strict=True)
    return model


def _adapt(model: Any, settings: dict[str, Any]) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", lora_dropout=0.0, **settings)
    adapted = get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(std=0.2)
        if "magnitude" in name:
            parameter.data.mul_(torch.empty_like(parameter).uniform_(0.7, 1.4))
    return adapted


def _numbers(adapted: Any) -> dict[str, Tensor]:
    learned = {name: parameter for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    # vectors do not decay, as in ours
    groups = [
        {"params": [p for p in learned.values() if (p.dim() > 1) == matrices], "weight_decay": decay}
        for matrices, decay in ((True, WEIGHT_DECAY), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=LR, betas=(0.9, 0.95), eps=1e-8)
    found: dict[str, Tensor] = {}
    losses = []
    tokens, labels = BATCH
    for step in range(STEPS):
        logits = adapted(input_ids=tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.detach())
        if step == 0:
            found["logits"] = logits
            found |= {f"gradient/{_saved(name)}": parameter.grad.clone() for name, parameter in learned.items()}
        optimizer.step()
    with torch.no_grad(), adapted.disable_adapter():
        found["logits without"] = adapted(input_ids=tokens).logits
    merged = adapted.merge_and_unload()
    with torch.no_grad():
        found["logits merged after"] = merged(input_ids=tokens).logits
    found |= {f"after/{_saved(name)}": parameter.detach().clone() for name, parameter in learned.items()}
    return found | {"losses": torch.stack(losses)}


def _saved(name: str) -> str:
    """As PEFT calls it in a file."""
    return name.replace(".default", "").replace("lora_magnitude_vector.weight", "lora_magnitude_vector")


if __name__ == "__main__":
    main()
