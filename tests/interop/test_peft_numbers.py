"""Real PEFT's numbers (peft_fixture, written by make_peft_fixture.py): its adapters, read, computed, trained and
written by us. fp32; 1e-5 where sums are in another order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.checkpoint.adapters import MergedWeights, Pair
from paceline.checkpoint.pieces import Box
from paceline.config.lora import LoraConfig, is_adapter
from paceline.errors import CheckpointError, ConfigError
from paceline.interop.hf_links import hf_links
from paceline.interop.peft import merge, own_pairs, read_adapter
from paceline.interop.peft_read import adapter_source
from paceline.interop.peft_write import adapter_names, peft_config, peft_tensors, write_peft
from paceline.interop.sources import Opened, open_source
from paceline.models.lora import adapters_off, attach_adapters
from paceline.models.transformer import Transformer
from paceline.parallel.adapters import join_adapters
from paceline.parallel.collectives import Axis
from tests.interop import hub_folders as hub
from tests.interop.peft_numbers import BATCH, FOLDER, KINDS, LR, MODEL, STEPS, WEIGHT_DECAY, base_weights
from tests.parallel.tiny import tiny_model

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def lora_of(kind: str) -> LoraConfig:
    peft = KINDS[kind]
    return LoraConfig(
        rank=peft["r"],
        alpha=peft["lora_alpha"],
        use_rslora=peft.get("use_rslora", False),
        dora=peft.get("use_dora", False),
    )


def numbers(kind: str) -> dict[str, Tensor]:
    return load_file(FOLDER / kind / "numbers.safetensors")


def model_of(kind: str, *, joined: bool) -> Transformer:
    """Our model with PEFT's adapter, as a plain one or as it is trained."""
    lora = lora_of(kind)
    model = tiny_model(MODEL, device="cpu")
    attach_adapters(model, lora)
    source = adapter_source(FOLDER / kind, MODEL, lora)
    assert source is not None
    base = base_weights()
    for name, parameter in model.named_parameters():
        parameter.data.copy_(source.read(name) if is_adapter(name) else base[name])
    if joined:
        join_adapters(model, Axis.alone("tp", 0))
    return model


def their_names(model: Transformer, kind: str) -> dict[str, str]:
    """Ours -> PEFT's."""
    leaves = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "lora_magnitude": "lora_magnitude_vector"}
    modules = adapter_names(MODEL, lora_of(kind)).modules
    found = {}
    for name, _ in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        if is_adapter(name):
            found[name] = f"base_model.model.{modules[f'{owner}.weight'].theirs.removesuffix('weight')}{leaves[leaf]}"
    return found


def logits_of(model: Transformer) -> Tensor:
    logits = model(BATCH[0]).logits
    assert logits is not None
    return logits


@pytest.mark.parametrize("joined", [False, True], ids=["plain", "joined"])
@pytest.mark.parametrize("kind", KINDS)
def test_computes_and_learns_as_peft_does(kind: str, joined: bool) -> None:
    expected, model = numbers(kind), model_of(kind, joined=joined)
    names = their_names(model, kind)
    learned = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert learned.keys() == names.keys()
    with torch.no_grad(), adapters_off(model):
        torch.testing.assert_close(logits_of(model), expected["logits without"], **TOLERANCE)
    matrices = [p for p in learned.values() if p.dim() > 1]
    vectors = [p for p in learned.values() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=LR, betas=(0.9, 0.95), eps=1e-8)
    for step in range(STEPS):
        logits = logits_of(model)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), BATCH[1].flatten())
        torch.testing.assert_close(loss, expected["losses"][step], **TOLERANCE)
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            torch.testing.assert_close(logits, expected["logits"], **TOLERANCE)
            for name, parameter in learned.items():
                torch.testing.assert_close(parameter.grad, expected[f"gradient/{names[name]}"], **TOLERANCE)
        optimizer.step()
    for name, parameter in learned.items():
        torch.testing.assert_close(parameter.data, expected[f"after/{names[name]}"], **TOLERANCE)


class _Base:
    """The base, to be read: a `WeightSource`."""

    def __init__(self) -> None:
        self._tensors = base_weights()

    def shapes(self) -> dict[str, torch.Size]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32

    def read(self, name: str, box: Box | None = None) -> Tensor:
        value = self._tensors[name]
        for dim, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True) if box else ()):
            value = value.narrow(dim, start, size)
        return value


@pytest.mark.parametrize("kind", KINDS)
def test_merged_is_what_peft_merges(kind: str, tmp_path: Path) -> None:
    """The adapter as it is after training; read block by block, too."""
    expected, names = numbers(kind), adapter_names(MODEL, lora_of(kind))
    pairs = {}
    for ours, link in names.modules.items():
        module = "after/base_model.model." + link.theirs.removesuffix("weight")
        pairs[ours] = Pair(
            down=expected[f"{module}lora_A.weight"],
            up=expected[f"{module}lora_B.weight"],
            scale=lora_of(kind).scale,
            magnitude=expected.get(f"{module}lora_magnitude_vector"),
        )
    merged = MergedWeights(_Base(), pairs)
    model = tiny_model(MODEL, device="cpu")
    for name, parameter in model.named_parameters():
        parameter.data.copy_(merged.read(name))
    torch.testing.assert_close(logits_of(model), expected["logits merged after"], **TOLERANCE)
    name = "blocks.1.feed_forward.down_proj.weight"
    part = merged.read(name, Box(offsets=(3, 5), sizes=(6, 7)))
    torch.testing.assert_close(part, merged.read(name)[3:9, 5:12])


def test_an_adapter_that_eva_began_gives_pefts_logits() -> None:
    """Its modules have ranks and alphas of their own; the base is as it was."""
    settings = json.loads((FOLDER / "eva/adapter_config.json").read_text())
    assert settings["init_lora_weights"] == "eva" and set(settings["rank_pattern"].values()) == {1, 3}
    merged = MergedWeights(_Base(), own_pairs(read_adapter(FOLDER / "eva"), hf_links(MODEL, "llama")))
    model = tiny_model(MODEL, device="cpu")
    for name, parameter in model.named_parameters():
        parameter.data.copy_(merged.read(name))
    torch.testing.assert_close(logits_of(model), numbers("eva")["logits"], **TOLERANCE)


def test_a_reward_models_adapter_scores_as_in_peft(tmp_path: Path) -> None:
    """Its score is saved whole; the base is a language model or the classifier. As it is learned on, too."""
    adapter = read_adapter(FOLDER / "reward")
    assert adapter.score is not None
    model_config, expected = MODEL.model_copy(update={"head": "score"}), numbers("reward")["scores"]
    opened = Opened(format="hf", path=tmp_path, model=MODEL, weights=_Base(), sidecars={}, template=None)
    merged = merge(opened, adapter)
    assert merged.model == model_config and "head.weight" not in merged.weights.shapes()
    model = tiny_model(model_config, device="cpu")
    for name, parameter in model.named_parameters():
        parameter.data.copy_(merged.weights.read(name))
    torch.testing.assert_close(_scores(model), expected, **TOLERANCE)
    lora = LoraConfig(rank=3, alpha=6, targets=("q_proj", "v_proj", "down_proj"))
    source = adapter_source(FOLDER / "reward", model_config, lora)
    assert source is not None
    model, base = tiny_model(model_config, device="cpu"), base_weights()
    attach_adapters(model, lora)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(source.read(name) if lora.learns(name) else base[name])
    torch.testing.assert_close(_scores(model), expected, **TOLERANCE)
    with pytest.raises(CheckpointError, match="it has a score: it is of a reward model"):
        adapter_source(FOLDER / "reward", MODEL, lora)
    with pytest.raises(CheckpointError, match="cannot be taken out: its score was learned whole"):
        merge(opened, adapter, take_out=True)


def _scores(model: Transformer) -> Tensor:
    with torch.no_grad():
        scores = model(BATCH[0].clamp(min=1)).scores
    assert scores is not None
    return scores[:, -1]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_what_peft_wrote(kind: str, tmp_path: Path) -> None:
    lora, theirs = lora_of(kind), FOLDER / kind
    pairs = own_pairs(read_adapter(theirs), hf_links(MODEL, "llama"))
    names = adapter_names(MODEL, lora)
    write_peft(tmp_path / "ours", peft_config(lora, names, "somewhere"), peft_tensors(pairs, names), {})
    written, expected = (load_file(path / "adapter_model.safetensors") for path in (tmp_path / "ours", theirs))
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    ours, known = (json.loads((path / "adapter_config.json").read_text()) for path in (tmp_path / "ours", theirs))
    assert ours.keys() <= known.keys(), "a key that PEFT does not know"
    differ = {key for key in ours if ours[key] != known[key]}
    assert differ == {"target_modules", "base_model_name_or_path"}
    assert set(ours["target_modules"]) == {module.rpartition(".")[2] for module in known["target_modules"]}


def test_names_are_whole_where_their_ends_would_mean_experts_too(tmp_path: Path) -> None:
    model = open_source(hub.save("deepseek_v3", tmp_path / "hf")).model
    names = adapter_names(model, LoraConfig(rank=2))
    targets = peft_config(LoraConfig(rank=2), names, "")["target_modules"]
    assert "gate_proj" not in targets and "model.layers.1.mlp.shared_experts.gate_proj" in targets


def test_rotary_rows_come_back_in_their_order(tmp_path: Path) -> None:
    """DeepSeek's queries have rows in another order there."""
    model, lora = open_source(hub.save("deepseek_v3", tmp_path / "hf")).model, LoraConfig(rank=2)
    names = adapter_names(model, lora)
    table = hf_links(model, "deepseek_v3")
    generator = torch.Generator().manual_seed(0)
    pairs = {
        name: Pair(
            down=torch.randn(2, table.shapes[name][1], generator=generator),
            up=torch.randn(table.shapes[name][0], 2, generator=generator),
            scale=lora.scale,
        )
        for name in names.modules
    }
    tensors = peft_tensors(pairs, names)
    moved = "base_model.model.model.layers.0.self_attn.q_b_proj.lora_B.weight"
    assert not torch.equal(tensors[moved], pairs["blocks.0.attention.q_up_proj.weight"].up)
    for name, link in names.modules.items():
        if link.rows is not None:
            up = tensors[f"base_model.model.{link.theirs.removesuffix('weight')}lora_B.weight"]
            torch.testing.assert_close(up.index_select(0, link.rows), pairs[name].up)


def test_gpt2_has_one_matrix_for_queries_keys_and_values(tmp_path: Path) -> None:
    model = open_source(hub.save("gpt2", tmp_path / "hf")).model
    with pytest.raises(ConfigError, match="queries, keys and values in one matrix"):
        adapter_names(model, LoraConfig(rank=2))
    assert len(adapter_names(model, LoraConfig(rank=2, targets=("o_proj", "up_proj", "down_proj"))).modules) == 6


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (LoraConfig(rank=4, alpha=8), "has rank 3 there, lora.rank = 4"),
        (LoraConfig(rank=3, alpha=3), "is scaled by 2 there, by lora.alpha and lora.rank it would be 1"),
        (LoraConfig(rank=3, alpha=6, targets=("q_proj",)), "lora.targets leaves it out"),
        (LoraConfig(rank=3, alpha=6, dora=True), "is not DoRA's there, lora.dora = True"),
    ],
)
def test_an_adapter_that_is_not_the_recipes_is_refused(lora: LoraConfig, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        adapter_source(FOLDER / "lora", MODEL, lora)


def test_an_adapter_of_another_model_is_refused_by_name() -> None:
    small = MODEL.model_copy(update={"num_layers": 1})
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.down_proj\.weight is not in the model"):
        adapter_source(FOLDER / "lora", small, lora_of("lora"))
    wide = MODEL.model_copy(update={"ffn_size": 40})
    with pytest.raises(CheckpointError, match=r"down_proj\.weight would be \[16, 24\], the model's is \[16, 40\]"):
        adapter_source(FOLDER / "lora", wide, lora_of("lora"))


def test_what_is_no_adapter_is_none(tmp_path: Path) -> None:
    assert adapter_source(tmp_path, MODEL, lora_of("lora")) is None
