"""LoRA adapters in PEFT's format: merged, taken out, and refused where they do not fit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.interop.convert import Options, convert
from paceline.interop.peft import merge, read_adapter
from paceline.interop.sources import open_source
from tests.interop import hub_folders as hub

TARGETS = {
    "llama_biases": ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head"],
    "gpt2": ["transformer.h.0.attn.c_attn", "transformer.h.1.mlp.c_proj"],
    "deepseek_v3": ["model.layers.0.self_attn.q_b_proj", "model.layers.1.mlp.experts.3.up_proj"],
}


def write_adapter(folder: Path, base: dict[str, Tensor], targets: list[str], rank: int = 3, **config: Any) -> Path:
    """An adapter with random pairs, as PEFT saves it; a name in `rank_pattern` is the end of a module's."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for module in targets:
        rows, columns = base[f"{module}.weight"].shape
        if module.startswith("transformer."):  # GPT-2 stores [in, out]
            rows, columns = columns, rows
        own = config.get("rank_pattern", {}).get(module.rpartition(".")[2], rank)
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(own, columns, generator=generator)
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(rows, own, generator=generator) * 0.1
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 6, "bias": "none", "use_dora": False, **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def merged_by_hand(base: dict[str, Tensor], adapter: Path, scale: dict[str, float]) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    pairs = load_file(adapter / "adapter_model.safetensors")
    result = dict(base)
    for module, factor in scale.items():
        both = [pairs[f"base_model.model.{module}.lora_{half}.weight"] for half in "BA"]
        delta = factor * (both[0] @ both[1])
        result[f"{module}.weight"] = base[f"{module}.weight"] + (delta.T if "transformer." in module else delta)
    return result


@pytest.mark.parametrize("name", TARGETS)
def test_merged_and_taken_out_again(name: str, tmp_path: Path) -> None:
    """In fp32, to rounding; what the adapter does not name keeps its bits."""
    source = hub.save(name, tmp_path / "hf")
    base = hub.tensors(source)
    adapter = write_adapter(tmp_path / "adapter", base, TARGETS[name])
    convert(merge(open_source(source), read_adapter(adapter)), tmp_path / "merged", Options(to="hf"))
    expected = merged_by_hand(base, adapter, dict.fromkeys(TARGETS[name], 2.0))
    found = hub.tensors(tmp_path / "merged")
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        touched = key.removesuffix(".weight") in TARGETS[name]
        torch.testing.assert_close(found[key], value, atol=1e-6 if touched else 0, rtol=0)
        assert not touched or not torch.equal(found[key], base[key])
    back = merge(open_source(tmp_path / "merged"), read_adapter(adapter), take_out=True)
    convert(back, tmp_path / "back", Options(to="hf"))
    for key, value in hub.tensors(tmp_path / "back").items():
        torch.testing.assert_close(value, base[key], atol=1e-6, rtol=0)


def test_an_adapter_fits_a_model_of_any_format(tmp_path: Path) -> None:
    source = hub.save("llama_biases", tmp_path / "hf")
    adapter = read_adapter(write_adapter(tmp_path / "adapter", hub.tensors(source), TARGETS["llama_biases"]))
    convert(open_source(source), tmp_path / "ours", Options(to="paceline"))
    convert(open_source(source), tmp_path / "megatron", Options(to="megatron"))
    for folder, like in (("hf", None), ("ours", None), ("megatron", source)):
        opened = open_source(tmp_path / folder, like=like)
        convert(merge(opened, adapter), tmp_path / f"{folder} out", Options(to="hf"))
    one = hub.tensors(tmp_path / "hf out")
    assert hub.same(one, hub.tensors(tmp_path / "ours out")) and hub.same(one, hub.tensors(tmp_path / "megatron out"))


def test_patterns_and_rank_stabilised_scale(tmp_path: Path) -> None:
    source = hub.save("llama_biases", tmp_path / "hf")
    base, targets = hub.tensors(source), TARGETS["llama_biases"]
    patterns = {"rank_pattern": {"q_proj": 9}, "alpha_pattern": {"down_proj": 12}}
    adapter = write_adapter(tmp_path / "a", base, targets, use_rslora=True, **patterns)
    pairs = read_adapter(adapter).pairs
    assert [pairs[f"{module}.weight"].scale for module in targets] == pytest.approx(
        [6 / math.sqrt(9), 12 / math.sqrt(3), 6 / math.sqrt(3)]
    )


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"target_modules": ["q_proj", "down_proj", "lm_head"]}, ""),
        ({"target_modules": "all-linear", "lora_dropout": 0.1, "megatron_core": "megatron.core"}, ""),
        ({"target_modules": r".*\.q_proj"}, "2 of its pairs are of modules that target_modules = "),
        ({"exclude_modules": ["q_proj"]}, 'exclude_modules = ["q_proj"] in adapter_config.json leaves out: PEFT would'),
        ({"use_newlora": True, "new_config": None}, "settings that are not known here, and passed over: use_newlora"),
    ],
)
def test_what_settings_say_beside_the_pairs_is_told(config: dict, said: str, tmp_path: Path) -> None:
    source = hub.save("llama_biases", tmp_path / "hf")
    adapter = read_adapter(write_adapter(tmp_path / "a", hub.tensors(source), TARGETS["llama_biases"], **config))
    assert len(adapter.pairs) == 3 and (said in " ".join(adapter.notes) if said else adapter.notes == ())
    assert set(adapter.notes) <= set(merge(open_source(source), adapter).notes)


def _drop_half(folder: Path) -> None:
    from safetensors.torch import load_file

    found = load_file(folder / "adapter_model.safetensors")
    found.pop(next(name for name in found if "lora_A" in name))
    save_file(found, folder / "adapter_model.safetensors")


def _cut(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-20])


def _pickle(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def _add(folder: Path) -> None:
    from safetensors.torch import load_file

    found = load_file(folder / "adapter_model.safetensors")
    save_file(found | {"base_model.model.lm_head.weight": torch.ones(3, 3)}, folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("spoil", "config", "message"),
    [
        (lambda f: (f / "adapter_config.json").unlink(), {}, "is no PEFT adapter"),
        (lambda f: (f / "adapter_config.json").write_text("[1"), {}, "is no PEFT adapter"),
        (lambda f: (f / "adapter_config.json").write_text("[]"), {}, r"is no table of settings: \[\]"),
        (lambda f: (f / "adapter_config.json").write_text('{"r": 3}'), {}, "has no peft_type"),
        (lambda f: None, {"r": 8}, r"lm_head.lora_A \[3, 64\] has rank 3, r = 8"),
        (lambda f: None, {"rank_pattern": {"lm_h.*": 5}}, r"has rank 3, rank_pattern\['lm_h\.\*'\] = 5"),
        (_cut, {}, "adapter_model.safetensors cannot be read"),
        (_pickle, {}, "has adapter_model.bin alone, which is not read"),
        (_drop_half, {}, "is not whole: .* has lora_B"),
        (_add, {}, "no half of a pair: base_model.model.lm_head.weight"),
        (lambda f: None, {"use_dora": True}, "is not whole: lm_head has lora_A and lora_B"),
        (lambda f: None, {"peft_type": "IA3", "bias": "all"}, "peft_type = 'IA3', bias = 'all'"),
        (lambda f: None, {"modules_to_save": ["lm_head"]}, "modules_to_save"),
        *((lambda f: None, {f"{name}_config": {"x": 1}}, f"{name}_config") for name in ("kasa", "arrow", "monteclora")),
    ],
)
def test_bad_adapters_are_refused_by_name(spoil: Any, config: dict, message: str, tmp_path: Path) -> None:
    base = {"lm_head.weight": torch.zeros(101, 64)}
    adapter = write_adapter(tmp_path / "adapter", base, ["lm_head"], **config)
    spoil(adapter)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_adapter(adapter)
    assert caught.value.next_step


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"r": None}, "r = None in .*adapter_config.json"),
        ({"r": 0}, "r = 0 in"),
        ({"r": True}, "r = True in"),
        ({"r": "four"}, "r = 'four' in"),
        ({"lora_alpha": "16"}, "lora_alpha = '16' in"),
        ({"lora_alpha": math.nan}, "lora_alpha = nan in"),
        ({"rank_pattern": {"(": 4}}, r"rank_pattern = {'\(': 4} in"),
        ({"rank_pattern": {"q_proj": 0}}, r"rank_pattern\['q_proj'\] = 0 in"),
        ({"alpha_pattern": [1]}, r"alpha_pattern = \[1\] in"),
        ({"alpha_pattern": {"q_proj": None}}, r"alpha_pattern\['q_proj'\] = None in"),
    ],
)
def test_settings_that_are_no_numbers_are_named(config: dict, message: str, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", {"lm_head.weight": torch.zeros(101, 64)}, ["lm_head"])
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(settings | config))
    with pytest.raises(CheckpointError, match=message) as caught:
        read_adapter(adapter)
    assert caught.value.next_step and caught.value.evidence


def test_a_pair_of_a_changed_base_is_refused(tmp_path: Path) -> None:
    """PiSSA's pairs belong to W less what they began with: added to W itself they would count twice."""
    base = {"lm_head.weight": torch.zeros(101, 64)}
    for number, begun in enumerate(
        ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "new", 1, ["pissa"], {})
    ):
        adapter = write_adapter(tmp_path / f"changed{number}", base, ["lm_head"], init_lora_weights=begun)
        with pytest.raises(CheckpointError, match="init_lora_weights = ") as caught:
            read_adapter(adapter)
        assert repr(begun) in str(caught.value)
        assert "path_initial_model_for_weight_conversion" in caught.value.next_step
    for number, begun in enumerate((True, False, None, "gaussian", "orthogonal", "eva")):
        assert read_adapter(write_adapter(tmp_path / f"{number}", base, ["lm_head"], init_lora_weights=begun)).pairs


def test_a_base_that_was_saved_with_the_adapter(tmp_path: Path) -> None:
    """PEFT saves the head where it is adapted; it has to be the model's."""
    from safetensors.torch import load_file

    source = hub.save("llama_biases", tmp_path / "hf")
    base = hub.tensors(source)
    adapter = write_adapter(tmp_path / "adapter", base, ["lm_head"])
    pairs = load_file(adapter / "adapter_model.safetensors")
    head = {"base_model.model.lm_head.base_layer.weight": base["lm_head.weight"].clone()}
    save_file(pairs | head, adapter / "adapter_model.safetensors")
    assert merge(open_source(source), read_adapter(adapter)).changed
    head["base_model.model.lm_head.base_layer.weight"][3, 3] += 1
    save_file(pairs | head, adapter / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight was saved with it"):
        merge(open_source(source), read_adapter(adapter))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is not in the model"):
        merge(open_source(hub.save("llama_tied", tmp_path / "tied")), read_adapter(adapter))


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    source = hub.save("llama_biases", tmp_path / "hf")
    base = {
        "model.layers.0.self_attn.q_proj.weight": torch.zeros(64, 32),
        "model.layers.9.mlp.up_proj.weight": torch.zeros(8, 8),
    }
    adapter = write_adapter(tmp_path / "adapter", base, [name.removesuffix(".weight") for name in base])
    with pytest.raises(CheckpointError, match="fits another model: 2 of its 2 pairs") as caught:
        merge(open_source(source), read_adapter(adapter))
    assert "layers.9.mlp.up_proj.weight is not in the model" in str(caught.value)
    assert "would be [64, 32], the model's is [64, 64]" in str(caught.value)
