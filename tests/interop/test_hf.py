"""Hugging Face folders in and out: same logits as Transformers, same bits on the way back, everything accounted for."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.config.hub import model_of
from paceline.errors import CheckpointError, ConfigError
from paceline.interop.compare import logits_of, plain_model
from paceline.interop.convert import Options, convert
from paceline.interop.hf import open_hub
from paceline.interop.hf_links import halves_from_pairs, hf_links, model_shapes
from paceline.interop.links import blocks
from paceline.interop.sources import cut_vocabulary, open_source
from tests.interop import hub_folders as hub
from tests.models.hf_reference import FAMILIES


@pytest.mark.parametrize("name", hub.VARIANTS)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    """Logits as Transformers' to 1e-5 in fp32; the way back, in shards, has the same bits."""
    source = hub.save(name, tmp_path / "hf")
    convert(open_source(source), tmp_path / "ours", Options(to="paceline"))
    ours = open_source(tmp_path / "ours")
    with torch.no_grad():
        expected = hub.reference(name)(input_ids=hub.tokens()).logits
        logits = plain_model(ours, torch.float32)(hub.tokens()).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    convert(ours, tmp_path / "back", Options(to="hf", shard_bytes=20_000))
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    assert hub.same(hub.tensors(source), hub.tensors(tmp_path / "back"))
    assert json.loads((source / "config.json").read_text()) == json.loads((tmp_path / "back/config.json").read_text())
    by_transformers, ran_by = logits_of(open_source(tmp_path / "back"), hub.tokens())
    assert ran_by == "transformers" and torch.equal(by_transformers, expected)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "mixtral"])
def test_a_config_made_anew_means_the_same(name: str, tmp_path: Path) -> None:
    """Without the config that it came with: Transformers loads what we wrote, and computes the same."""
    opened = open_source(hub.save(name, tmp_path / "hf"))
    convert(replace(opened, template=None, sidecars={}), tmp_path / "back", Options(to="hf"))
    names = sorted(path.name for path in (tmp_path / "back").iterdir())
    assert names == ["config.json", "generation_config.json", "model.safetensors"]
    with torch.no_grad():
        expected = hub.reference(name)(input_ids=hub.tokens()).logits
    assert torch.equal(logits_of(open_source(tmp_path / "back"), hub.tokens())[0], expected)


@pytest.mark.parametrize("name", hub.VARIANTS)
def test_links_cover_both_sides_once(name: str) -> None:
    """No number is left at random, none is written twice, whatever the family."""
    config = _config(name)
    table = hf_links(model_of(config), config["model_type"])
    theirs: Counter[str] = Counter()
    for ours, links in table.links.items():
        assert sum(link.ours_at.numel for link in links) == table.shapes[ours].numel(), ours
        for first in links:
            assert not any(first.ours_at.common(other.ours_at) for other in links if other is not first)
        for link in links:
            theirs[link.theirs] += link.theirs_at.numel
    shapes = table.their_shapes()
    assert all(count == shapes[name].numel() for name, count in theirs.items())


def _config(name: str) -> dict:
    return json.loads(hub.reference(name).config.to_json_string(use_diff=False))


def test_bf16_stays_bf16_and_dtypes_are_chosen(tmp_path: Path) -> None:
    source = hub.save("deepseek_v3", tmp_path / "hf", torch.bfloat16, shard="30KB")
    opened = open_source(source)
    convert(opened, tmp_path / "ours", Options(to="paceline"))
    convert(open_source(tmp_path / "ours"), tmp_path / "back", Options(to="hf"))
    assert hub.same(hub.tensors(source), hub.tensors(tmp_path / "back"))
    convert(opened, tmp_path / "wide", Options(to="hf", dtype="fp32"))
    found = hub.tensors(tmp_path / "wide")
    assert {value.dtype for name, value in found.items() if "correction" not in name} == {torch.float32}
    assert json.loads((tmp_path / "wide/config.json").read_text())["dtype"] == "float32"


def test_a_box_of_any_cut_is_what_it_should_be(tmp_path: Path) -> None:
    """Ranks and blocks cut tensors anywhere, within a head's rotary rows too."""
    weights = open_hub(hub.save("deepseek_v3", tmp_path / "hf")).weights
    for name, shape in weights.shapes().items():
        value = weights.read(name)
        for box in blocks(shape, 4, 7 * 4 * 13):
            part = value
            for dim, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                part = part.narrow(dim, start, size)
            assert torch.equal(weights.read(name, box), part), (name, box)


# ---- public problems


def test_rope_base_and_factor_reach_the_model(tmp_path: Path) -> None:
    """NVIDIA/Megatron-LM#6305, lyogavin/airllm#369: a base or factor that is dropped shows at long range only."""
    source = hub.save("llama3", tmp_path / "hf")
    opened = open_source(source)
    scaling = opened.model.rope_scaling
    assert (scaling.kind, scaling.factor, opened.model.rope_theta) == ("llama3", 32.0, 500000.0)
    hub.change_config(source, rope_parameters=hub.LLAMA3 | {"rope_type": "dynamic"})
    with pytest.raises(ConfigError, match=r"rope_scaling.rope_type = 'dynamic'"):
        open_source(source)


def test_epsilon_is_the_configs(tmp_path: Path) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#5712: every norm has it, or the model is refused."""
    model = plain_model(open_source(hub.save("llama_eps", tmp_path / "hf")), torch.float32)
    assert {module.eps for module in model.modules() if hasattr(module, "eps")} == {1e-2}
    source = hub.save("deepseek_v3", tmp_path / "mla")
    hub.change_config(source, rms_norm_eps=1e-5)
    with pytest.raises(ConfigError, match="rms_norm_eps = 1e-05"):
        open_source(source)


def test_without_the_permutation_logits_differ(tmp_path: Path) -> None:
    """huggingface/transformers#25199: the two rotary layouts look alike for the first tokens only."""
    opened = open_source(hub.save("deepseek_v3", tmp_path / "hf"))
    model = plain_model(opened, torch.float32)
    right = model(hub.tokens(60)).logits
    rows = halves_from_pairs(4 * 24, 24, 8)
    with torch.no_grad():
        for block in model.blocks.values():
            weight = block.attention.q_up_proj.weight
            weight.copy_(torch.empty_like(weight).index_copy_(0, rows, weight.clone()))
    assert (model(hub.tokens(60)).logits - right)[:, 50].abs().max() > 1e-3


def test_tied_heads(tmp_path: Path) -> None:
    """THUDM/slime#345: tied without a head works, untied without one is refused, tied with another one is told."""
    source = hub.save("llama_tied", tmp_path / "hf")
    head = torch.randn(101, 64)
    hub.change_tensors(source, **{"lm_head.weight": hub.tensors(source)["model.embed_tokens.weight"].clone()})
    assert open_source(source).notes == ()
    hub.change_tensors(source, **{"lm_head.weight": head})
    (note,) = open_source(source).notes
    assert "lm_head.weight is stored with other values than embed.weight" in note
    hub.change_tensors(source, **{"lm_head.weight": None})
    hub.change_config(source, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match="1 difference") as caught:
        open_source(source)
    assert "missing: lm_head.weight [101, 64]" in str(caught.value) and "not tied" in str(caught.value)


def test_the_first_gpt2_files_have_no_prefix(tmp_path: Path) -> None:
    source = hub.save("gpt2", tmp_path / "hf")
    found = {name.removeprefix("transformer."): value for name, value in hub.tensors(source).items()}
    (source / "model.safetensors").unlink()
    hub.change_tensors(source, **found, **{"h.0.attn.bias": torch.ones(1, 1, 128, 128)})
    opened = open_source(source)
    with torch.no_grad():
        expected = hub.reference("gpt2")(input_ids=hub.tokens()).logits
        logits = plain_model(opened, torch.float32)(hub.tokens()).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_multi_token_prediction_comes_and_goes(tmp_path: Path) -> None:
    """DeepSeek-V3 stores it as one more layer, with copies of embedding and head."""
    source = hub.save("deepseek_v3", tmp_path / "hf")
    found = hub.tensors(source)
    more = {
        name.replace("layers.1.", "layers.2."): torch.randn_like(t) for name, t in found.items() if "layers.1." in name
    }
    for name, shape in {"enorm": (64,), "hnorm": (64,), "eh_proj": (64, 128), "shared_head.norm": (64,)}.items():
        more[f"model.layers.2.{name}.weight"] = torch.randn(shape)
    more["model.layers.2.embed_tokens.weight"] = found["model.embed_tokens.weight"].clone()
    more["model.layers.2.shared_head.head.weight"] = found["lm_head.weight"].clone()
    hub.change_tensors(source, **more)
    opened = open_source(source)
    assert opened.model.mtp_layers == 1 and opened.notes == ()
    convert(opened, tmp_path / "ours", Options(to="paceline"))
    convert(open_source(tmp_path / "ours"), tmp_path / "back", Options(to="hf"))
    assert hub.same(hub.tensors(source), hub.tensors(tmp_path / "back"))


def test_prediction_of_more_tokens_is_left_out_where_it_has_no_name(tmp_path: Path) -> None:
    opened = open_source(hub.save("llama", tmp_path / "hf"))
    model = opened.model.model_copy(update={"mtp_layers": 1})
    weights = {name: torch.randn(shape) for name, shape in model_shapes(model).items()}

    class Given:
        def shapes(self):
            return {name: value.shape for name, value in weights.items()}

        def dtype(self, name):
            return torch.float32

        def read(self, name, box=None):
            value = weights[name]
            for dim, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                value = value.narrow(dim, start, size)
            return value

    more = replace(opened, model=model, weights=Given())
    for to in ("hf", "megatron"):
        done = convert(more, tmp_path / f"to_{to}", Options(to=to))
        assert done.left_out and all(name.startswith("mtp.1.") for name in done.left_out)
        assert open_source(tmp_path / f"to_{to}").model.mtp_layers == 0
    convert(more, tmp_path / "ours", Options(to="paceline"))
    assert open_source(tmp_path / "ours").model.mtp_layers == 1


# ---- what is not right


BAD_FOLDERS = {
    "wrong family": ("gemma2", lambda f: None, "model_type = 'gemma2' is not a family"),
    "no config": ("llama", lambda f: (f / "config.json").unlink(), "safetensors files, but no config.json"),
    "config cut": ("llama", lambda f: (f / "config.json").write_text("{"), "no model_type"),
    "no weights": ("llama", lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors"),
    "pickled": ("llama", lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "pytorch_model.bin"),
    "cut short": ("llama", lambda f: _cut(f / "model.safetensors", -10), "is cut short"),
    "cut in the header": ("llama", lambda f: _cut(f / "model.safetensors", 40), "not a whole safetensors file"),
    "no file at all": ("llama", lambda f: _cut(f / "model.safetensors", 0), "not a whole safetensors file"),
    "missing": ("llama", lambda f: hub.change_tensors(f, **{"model.norm.weight": None}), "missing: model.norm.weight"),
    "unexpected": ("llama", lambda f: hub.change_tensors(f, extra=torch.ones(3)), r"unexpected: extra \[3\]"),
    "shape": (
        "llama",
        lambda f: hub.change_tensors(f, **{"model.norm.weight": torch.ones(3)}),
        r"model.norm.weight is \[3\] there, \[64\] by the config",
    ),
    "integers": (
        "llama",
        lambda f: hub.change_tensors(f, **{"model.norm.weight": torch.ones(64, dtype=torch.int8)}),
        "stored as torch.int8",
    ),
    "quantized": (
        "llama",
        lambda f: hub.change_config(f, quantization_config={"quant_method": "awq"}),
        r"are quantized \(awq\)",
    ),
    "unknown key": ("llama", lambda f: hub.change_config(f, residual_multiplier=0.2), "residual_multiplier = 0.2"),
    "key gone": ("llama", lambda f: hub.change_config(f, hidden_size="gone"), "hidden_size is missing"),
    "activation": ("llama", lambda f: hub.change_config(f, hidden_act="gelu"), "hidden_act = 'gelu'"),
    "impossible": ("llama", lambda f: hub.change_config(f, num_key_value_heads=3), "does not divide"),
    "window in some": (
        "qwen2",
        lambda f: hub.change_config(
            f, use_sliding_window=True, sliding_window=8, max_window_layers=1, layer_types=None
        ),
        "max_window_layers = 1: .*full attention in some layers",
    ),
}


def _cut(file: Path, length: int) -> None:
    file.write_bytes(file.read_bytes()[:length])


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_bad_folders_are_refused_by_name(case: str, tmp_path: Path) -> None:
    name, spoil, message = BAD_FOLDERS[case]
    FAMILIES[name].reference().save_pretrained(tmp_path / "hf")
    spoil(tmp_path / "hf")
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        convert(open_source(tmp_path / "hf"), tmp_path / "out", Options(to="paceline"))
    assert re.search(message, str(caught.value)), str(caught.value)
    assert caught.value.next_step
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    source = hub.save("llama", tmp_path / "hf", shard="100KB")
    gone = sorted(source.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=f"lacks 1 of .* weight files: {gone.name}"):
        open_source(source)


def test_a_tensor_in_two_files_is_noticed(tmp_path: Path) -> None:
    source = hub.save("llama", tmp_path / "hf", shard="100KB")
    first, second = sorted(source.glob("*.safetensors"))[:2]
    shutil.copyfile(first, second)
    with pytest.raises(CheckpointError, match=r"twice: in .*00001.* and in .*00002"):
        open_source(source)


def test_an_index_of_another_model_is_noticed(tmp_path: Path) -> None:
    source = hub.save("llama", tmp_path / "hf", shard="100KB")
    index = source / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.layers.7.mlp.up_proj.weight"] = sorted(content["weight_map"].values())[0]
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="names 1 tensors that are in none of the files"):
        open_source(source)


def test_a_disk_error_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_source(hub.save("llama", tmp_path / "hf"))
    for to, place in (("hf", "os.pwrite"), ("paceline", "torch.save")):
        monkeypatch.setattr(place, _disk_full)
        with pytest.raises(CheckpointError, match="could not be written"):
            convert(opened, tmp_path / "out", Options(to=to, threads=2))
        monkeypatch.undo()
        assert [path.name for path in tmp_path.iterdir()] == ["hf"], to


def _disk_full(*args, **kwargs):
    raise OSError(28, "No space left on device")


def test_source_that_breaks_while_it_is_read(tmp_path: Path) -> None:
    source = hub.save("llama", tmp_path / "hf")
    opened = open_source(source)
    _cut(source / "model.safetensors", 9000)
    for to in ("hf", "paceline"):
        with pytest.raises(CheckpointError, match="ended while it was read"):
            convert(opened, tmp_path / "out", Options(to=to, threads=2))
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_padding_of_the_vocabulary_is_cut(tmp_path: Path) -> None:
    source = hub.save("llama_wide_heads", tmp_path / "hf")
    opened = cut_vocabulary(open_source(source), 1000)
    convert(opened, tmp_path / "out", Options(to="hf"))
    before, after = hub.tensors(source), hub.tensors(tmp_path / "out")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(after[name], before[name][:1000])
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == 1000
    with pytest.raises(ConfigError, match="--vocab-size 1004"):
        cut_vocabulary(open_source(source), 1004)


def test_an_existing_folder_is_not_touched(tmp_path: Path) -> None:
    opened = open_source(hub.save("llama", tmp_path / "hf"))
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        convert(opened, tmp_path / "out", Options(to="hf"))
    assert list((tmp_path / "out").iterdir()) == []


def test_a_model_that_the_family_cannot_hold(tmp_path: Path) -> None:
    opened = open_source(hub.save("qwen3", tmp_path / "hf"))
    with pytest.raises(ConfigError, match="qk_norm = True"):
        convert(opened, tmp_path / "out", Options(to="hf", model_type="llama"))
    assert not (tmp_path / "out").exists()
