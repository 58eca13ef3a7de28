"""Megatron-LM checkpoints in and out.

What lies where is said here in plain torch, and by a checkpoint that Megatron Core itself wrote
(data/megatron_core_0.16.1, made on CPUs with pp = 2 and ep = 2), with the logits that it computed.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.checkpoint.pieces import Box, Piece, ShardedValue
from paceline.checkpoint.streamed import write_tensors
from paceline.config.hub import differences
from paceline.config.model import ModelConfig
from paceline.config.presets import preset
from paceline.errors import CheckpointError, ConfigError
from paceline.interop.compare import plain_model
from paceline.interop.convert import Options, convert
from paceline.interop.hf_links import model_shapes
from paceline.interop.megatron_config import args_of, model_of
from paceline.interop.sources import detect, open_source
from tests.interop import hub_folders as hub

DENSE = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_size": 48,
    "vocab_size": 99,
    "max_seq_len": 64,
    "norm_eps": 1e-6,
}
GPT = {
    "num_kv_heads": 4,
    "norm": "layernorm",
    "activation": "gelu_tanh",
    "position": "learned",
    "tie_embeddings": True,
    **dict.fromkeys(("qkv_bias", "attention_out_bias", "mlp_bias"), True),
}
MOE = {"qk_norm": True, "num_experts": 4, "top_k": 2, "moe": {"ffn_size": 16}}
LATENT = {
    "num_kv_heads": 0,
    "attention": "mla",
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_experts": 4,
    "top_k": 2,
    "moe": {
        "ffn_size": 16,
        "first_dense_layers": 1,
        "num_shared_experts": 1,
        "score": "sigmoid",
        "bias_balance": True,
        "num_groups": 2,
    },
}
MODELS = {
    "llama": DENSE,
    "qwen2": DENSE | {"qkv_bias": True},
    "qwen3": DENSE | {"qk_norm": True, "head_dim": 12},
    "gpt": DENSE | GPT,
    "moe": DENSE | MOE,
    "latent": DENSE | LATENT,
}


# ---- their layout, said in plain torch


def their_layer(own: dict[str, Tensor], model: ModelConfig, *, is_moe: bool) -> dict[str, Tensor]:
    """Tensors of one layer, by Megatron's names for Transformer Engine's layers."""
    theirs: dict[str, Tensor] = {"self_attention.linear_proj.weight": own["attention.o_proj.weight"]}
    if "attention.o_proj.bias" in own:
        theirs["self_attention.linear_proj.bias"] = own["attention.o_proj.bias"]
    if model.attention == "mla":
        theirs |= their_latent(own, model)
    else:
        for what in ("weight", "bias"):
            if f"attention.q_proj.{what}" in own:
                parts = {
                    p: own[f"attention.{p}_proj.{what}"].unflatten(0, (model.kv_heads, -1)) for p in ("q", "k", "v")
                }
                theirs[f"self_attention.linear_qkv.{what}"] = torch.cat(list(parts.values()), dim=1).flatten(0, 1)
            if f"attention_norm.{what}" in own:
                theirs[f"self_attention.linear_qkv.layer_norm_{what}"] = own[f"attention_norm.{what}"]
        for part in "qk":
            if model.qk_norm:
                theirs[f"self_attention.{part}_layernorm.weight"] = own[f"attention.{part}_norm.weight"]
    before = "pre_mlp_layernorm." if is_moe else "mlp.linear_fc1.layer_norm_"
    theirs |= {
        before + what: own[f"feed_forward_norm.{what}"]
        for what in ("weight", "bias")
        if f"feed_forward_norm.{what}" in own
    }
    if not is_moe:
        return theirs | their_mlp(own, "feed_forward.", "mlp.")
    theirs["mlp.router.weight"] = own["feed_forward.router.weight"]
    if "feed_forward.router.expert_bias" in own:
        theirs["mlp.router.expert_bias"] = own["feed_forward.router.expert_bias"]
    theirs["mlp.experts.experts.linear_fc1.weight"] = own["feed_forward.experts.up_weight"].flatten(1, 2)
    theirs["mlp.experts.experts.linear_fc2.weight"] = own["feed_forward.experts.down_weight"]
    if model.moe.num_shared_experts:
        theirs |= their_mlp(own, "feed_forward.shared.", "mlp.shared_experts.")
    return theirs


def their_mlp(own: dict[str, Tensor], ours: str, prefix: str) -> dict[str, Tensor]:
    theirs = {}
    for what in ("weight", "bias"):
        inputs = [own[f"{ours}{p}_proj.{what}"] for p in ("gate", "up") if f"{ours}{p}_proj.{what}" in own]
        if inputs:
            theirs[f"{prefix}linear_fc1.{what}"] = torch.cat(inputs)
            theirs[f"{prefix}linear_fc2.{what}"] = own[f"{ours}down_proj.{what}"]
    return theirs


def their_latent(own: dict[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    def pairs(rows: Tensor) -> Tensor:
        """x0 x1 ... y0 y1 ... at the end becomes x0 y0 x1 y1 ..."""
        keep, turned = rows[: -model.qk_rope_head_dim], rows[-model.qk_rope_head_dim :]
        return torch.cat((keep, torch.stack(turned.chunk(2), dim=1).flatten(0, 1)))

    heads = own["attention.q_up_proj.weight"].unflatten(0, (model.num_heads, -1))
    return {
        "input_layernorm.weight": own["attention_norm.weight"],
        "self_attention.linear_q_down_proj.weight": own["attention.q_down_proj.weight"],
        "self_attention.linear_q_up_proj.layer_norm_weight": own["attention.q_norm.weight"],
        "self_attention.linear_q_up_proj.weight": torch.cat([pairs(head) for head in heads]),
        "self_attention.linear_kv_down_proj.weight": pairs(own["attention.kv_down_proj.weight"]),
        "self_attention.linear_kv_up_proj.layer_norm_weight": own["attention.kv_norm.weight"],
        "self_attention.linear_kv_up_proj.weight": own["attention.kv_up_proj.weight"],
    }


def their_tensors(ours: dict[str, Tensor], model: ModelConfig, *, stacked: bool, padding: int = 0) -> dict[str, Tensor]:
    def padded(value: Tensor) -> Tensor:
        return torch.cat((value, torch.full((padding, value.shape[1]), 7.0)))

    theirs = {"embedding.word_embeddings.weight": padded(ours["embed.weight"])}
    if "head.weight" in ours:
        theirs["output_layer.weight"] = padded(ours["head.weight"])
    if "embed.position_weight" in ours:
        theirs["embedding.position_embeddings.weight"] = ours["embed.position_weight"]
    theirs |= {
        f"decoder.final_layernorm.{what}": ours[f"norm.{what}"] for what in ("weight", "bias") if f"norm.{what}" in ours
    }
    layers = []
    for block in model.blocks():
        prefix = f"blocks.{block.index}."
        own = {name.removeprefix(prefix): value for name, value in ours.items() if name.startswith(prefix)}
        layers.append(their_layer(own, model, is_moe=block.is_moe))
    if stacked:
        return theirs | {f"decoder.layers.{name}": torch.stack([layer[name] for layer in layers]) for name in layers[0]}
    return theirs | {
        f"decoder.layers.{i}.{name}": value for i, layer in enumerate(layers) for name, value in layer.items()
    }


def random_model(model: ModelConfig, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in model_shapes(model).items()}


def write_megatron(
    folder: Path, theirs: dict[str, Tensor], args: dict | None, *, tp: int = 1, ep: int = 1, step: int = 7, **common
) -> Path:
    """A checkpoint as ranks write it: a chunk a layer (pp cuts there), rows or columns over tp, experts over ep."""
    inside = folder / f"iter_{step:07d}"
    inside.mkdir(parents=True)
    values = {}
    for name, value in theirs.items():
        stacked = name.startswith("decoder.layers.") and not name.split(".")[2].isdigit()
        pieces = [Box(offsets=(0,) * value.dim(), sizes=tuple(value.shape))]
        if stacked:
            pieces = split(pieces, 0, value.shape[0])
        if ".experts.experts." in name:
            pieces = split(pieces, int(stacked), ep)
        columns = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
        if value.dim() > 1 + stacked and not name.endswith("router.weight"):
            pieces = split(pieces, value.dim() - 1 if columns else value.dim() - 2, tp)
        values[name] = ShardedValue(
            global_shape=value.shape,
            dtype=value.dtype,
            pieces=tuple(
                Piece(offsets=b.offsets, tensor=torch.empty(b.sizes, dtype=value.dtype, device="meta")) for b in pieces
            ),
        )
    write_tensors(inside, values, lambda name, box: part(theirs[name], box), threads=3)
    common = {"iteration": step, "checkpoint_version": 3.0, **common}
    torch.save(common if args is None else common | {"args": argparse.Namespace(**args)}, inside / "common.pt")
    (inside / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    (folder / "latest_checkpointed_iteration.txt").write_text(str(step))
    return folder


def split(boxes: list[Box], dim: int, count: int) -> list[Box]:
    result = []
    for box in boxes:
        bounds = [box.sizes[dim] * i // count for i in range(count + 1)]
        for start, end in pairwise(bounds):
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[dim] += start
            sizes[dim] = end - start
            result.append(Box(offsets=tuple(offsets), sizes=tuple(sizes)))
    return result


def part(value: Tensor, box: Box) -> Tensor:
    for dim, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        value = value.narrow(dim, start, size)
    return value.clone()


# ---- in


@pytest.mark.parametrize("layout", [(1, 1), (2, 1), (2, 2), (3, 4)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_any_layout_is_read(name: str, layout: tuple[int, int], tmp_path: Path) -> None:
    model = ModelConfig(**MODELS[name])
    ours = random_model(model)
    for stacked in (False, True) if name != "latent" else (False,):
        theirs = their_tensors(ours, model, stacked=stacked)
        folder = write_megatron(tmp_path / f"{stacked}", theirs, args_of(model), tp=layout[0], ep=layout[1])
        opened = open_source(folder)
        assert opened.format == "megatron" and opened.step == 7 and differences(opened.model, model) == []
        assert opened.weights.shapes() == model_shapes(model)
        assert all(torch.equal(opened.weights.read(key), value) for key, value in ours.items())


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    """Theirs to ours to theirs: the same tensors, and what plain torch says they are."""
    model = ModelConfig(**MODELS[name])
    ours = random_model(model, torch.bfloat16)
    if model.moe.bias_balance:
        ours |= {key: value.float() for key, value in ours.items() if key.endswith("expert_bias")}
    theirs = their_tensors(ours, model, stacked=name != "latent")
    source = write_megatron(tmp_path / "theirs", theirs, args_of(model), tp=2)
    convert(open_source(source), tmp_path / "ours", Options(to="paceline", threads=2))
    convert(open_source(tmp_path / "ours"), tmp_path / "back", Options(to="megatron", threads=2))
    from paceline.checkpoint.chunks import ChunkReader
    from paceline.interop.megatron_files import read_metadata

    inside = tmp_path / "back/iter_0000007"
    reader = ChunkReader(inside, read_metadata(inside))
    assert reader.shapes() == {key: value.shape for key, value in theirs.items()}
    for key, value in theirs.items():
        found = reader.read(key, Box(offsets=(0,) * value.dim(), sizes=tuple(value.shape)))
        assert torch.equal(found, value) and found.dtype == value.dtype, key
    back = open_source(tmp_path / "back")
    assert back.step == 7 and differences(back.model, model) == []


@pytest.mark.parametrize("name", ["llama_biases", "qwen3_moe", "gpt2", "deepseek_v3_top4"])
def test_from_the_hub_to_megatron_and_back(name: str, tmp_path: Path) -> None:
    source = hub.save(name, tmp_path / "hf", torch.bfloat16)
    opened = open_source(source)
    convert(opened, tmp_path / "mega", Options(to="megatron"))
    assert detect(tmp_path / "mega") == "megatron"
    back = open_source(tmp_path / "mega", like=source)
    convert(back, tmp_path / "back", Options(to="hf"))
    assert hub.same(hub.tensors(source), hub.tensors(tmp_path / "back"))
    assert json.loads((source / "config.json").read_text()) == json.loads((tmp_path / "back/config.json").read_text())


def test_experts_and_inputs_one_by_one(tmp_path: Path) -> None:
    """As Megatron writes them with singleton_local_shards."""
    model = ModelConfig(**MODELS["moe"])
    ours = random_model(model)
    theirs = their_tensors(ours, model, stacked=False)
    alone: dict[str, Tensor] = {}
    for key, value in theirs.items():
        if ".experts.experts." not in key:
            alone[key] = value
            continue
        for expert, matrix in enumerate(value):
            own = key.replace(".experts.experts.", f".experts.experts.{expert}.")
            if "linear_fc1" in key:
                alone[own + "_w"], alone[own + "_v"] = matrix.chunk(2)
            else:
                alone[own] = matrix
    opened = open_source(write_megatron(tmp_path, alone, args_of(model), tp=2))
    assert all(torch.equal(opened.weights.read(key), value) for key, value in ours.items())


def test_what_megatron_core_wrote_gives_its_logits() -> None:
    """1e-5: fp32, another order of sums."""
    data = Path(__file__).parent / "data" / "megatron_core_0.16.1"
    opened = open_source(data / "checkpoint")
    expected = torch.load(data / "logits.pt", weights_only=True)
    with torch.no_grad():
        logits = plain_model(opened, torch.float32)(expected["ids"]).logits
    torch.testing.assert_close(logits, expected["logits"], atol=1e-5, rtol=1e-5)


def test_padding_and_what_is_no_weight(tmp_path: Path) -> None:
    """29 rows of padding go away where the size is known; optimizer states are counted and left out."""
    model = ModelConfig(**MODELS["llama"])
    ours = random_model(model)
    theirs = their_tensors(ours, model, stacked=True, padding=29)
    more = {
        "optimizer.state.exp_avg.decoder.final_layernorm.weight": torch.zeros(32),
        "mtp.layers.0.enorm.weight": torch.zeros(32),
    }
    source = write_megatron(tmp_path / "m", theirs | more, args_of(model))
    opened = open_source(source)
    assert opened.model.vocab_size == 128
    assert any("perhaps padded" in note for note in opened.notes) and any(
        "1 tensors that are no" in n for n in opened.notes
    )
    assert any("multi-token prediction" in note for note in opened.notes)
    hf = tmp_path / "like"
    hf.mkdir()
    from paceline.config.hub import config_of

    (hf / "config.json").write_text(json.dumps(config_of(model)))
    (hf / "tokenizer.json").write_text("{}")
    like = open_source(source, like=hf)
    assert like.model.vocab_size == 99 and any("29 rows" in note for note in like.notes)
    convert(like, tmp_path / "out", Options(to="hf"))
    assert torch.equal(hub.tensors(tmp_path / "out")["lm_head.weight"], ours["head.weight"])
    assert (tmp_path / "out/tokenizer.json").is_file()


# ---- what is not right


def test_a_pickle_runs_nothing(tmp_path: Path) -> None:
    """Arguments hold enums and functions of Megatron's; whatever a pickle names, it is not called."""

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'ran'}",)

    model = ModelConfig(**MODELS["llama"])
    source = write_megatron(
        tmp_path / "m",
        their_tensors(random_model(model), model, stacked=True),
        args_of(model) | {"attention_backend": Evil()},
        content_metadata={"note": Evil()},
    )
    assert open_source(source).model.num_layers == 4
    metadata = source / "iter_0000007/.metadata"
    found = pickle.loads(metadata.read_bytes())
    found.planner_data = Evil()
    metadata.write_bytes(pickle.dumps(found))
    open_source(source)
    assert not (tmp_path / "ran").exists()


def spoil_missing(folder: Path) -> None:
    next(iter(folder.glob("iter_*/*.distcp"))).unlink()


BAD = {
    "a file is missing": (spoil_missing, r"lacks 1 of its files: __\d_0.distcp"),
    "no index": (lambda f: (f / "iter_0000007/.metadata").unlink(), "has no .metadata"),
    "broken index": (lambda f: (f / "iter_0000007/.metadata").write_bytes(b"\x80\x04N."), ".metadata cannot be read"),
    "broken arguments": (lambda f: (f / "iter_0000007/common.pt").write_bytes(b"x"), "common.pt cannot be read"),
    "an older iteration": (lambda f: (f / "latest_checkpointed_iteration.txt").write_text("9"), "names iter_0000009"),
    "another backend": (
        lambda f: (f / "iter_0000007/metadata.json").write_text('{"sharded_backend": "zarr"}'),
        "is a zarr checkpoint",
    ),
    "no kind": (lambda f: (f / "iter_0000007/metadata.json").unlink(), "it has no metadata.json"),
}


@pytest.mark.parametrize("case", BAD)
def test_damaged_folders_are_refused_by_name(case: str, tmp_path: Path) -> None:
    model = ModelConfig(**MODELS["llama"])
    source = write_megatron(tmp_path / "m", their_tensors(random_model(model), model, stacked=True), args_of(model))
    spoil, message = BAD[case]
    spoil(source)
    with pytest.raises(CheckpointError, match=message):
        open_source(source)


def test_tensors_that_do_not_fit_the_arguments(tmp_path: Path) -> None:
    """NVIDIA/Megatron-LM#5844: an expert that is not there must not stay at random."""
    model = ModelConfig(**MODELS["moe"])
    theirs = their_tensors(random_model(model), model, stacked=True)
    router = theirs.pop("decoder.layers.mlp.router.weight")
    theirs |= {"decoder.layers.mlp.router.bias": router[..., 0], "decoder.final_layernorm.weight": torch.ones(5)}
    with pytest.raises(CheckpointError) as caught:
        open_source(write_megatron(tmp_path, theirs, args_of(model)))
    for problem in (
        "missing: decoder.layers.0.mlp.router.weight",
        "unexpected: decoder.layers.mlp.router.bias",
        "is [5] there",
    ):
        assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotary_interleaved": True}, "rotary_interleaved = True"),
        ({"position_embedding_type": "relative"}, "position_embedding_type = 'relative'"),
        ({"num_layers": None}, "num_layers is missing"),
        ({"moe_layer_freq": [1, 1, 0, 1], "num_experts": 4}, "moe_layer_freq"),
        (
            {"num_experts": 8, "moe_router_topk": 6, "moe_router_num_groups": 4, "moe_router_group_topk": 2},
            "best 3 experts",
        ),
        ({"softmax_type": "learnable"}, "softmax_type"),
    ],
)
def test_arguments_without_a_counterpart(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_of(args_of(ModelConfig(**DENSE)) | changes, 99)


def test_without_arguments_a_model_is_named(tmp_path: Path) -> None:
    model = ModelConfig(**MODELS["llama"])
    source = write_megatron(tmp_path / "m", their_tensors(random_model(model), model, stacked=True), None)
    with pytest.raises(CheckpointError, match="has no args") as caught:
        open_source(source)
    assert "--like" in caught.value.next_step
    with pytest.raises(ConfigError, match="with a source that says itself"):
        open_source(hub.save("llama", tmp_path / "hf"), like=tmp_path / "hf")


@pytest.mark.parametrize(
    "name", ["llama3_8b", "llama3_405b", "qwen3_30b_a3b", "gpt2", "mistral_7b", "deepseek_v3", "mixtral_8x7b"]
)
def test_presets_in_their_words_and_back(name: str) -> None:
    model = ModelConfig(**preset(name))
    assert differences(model_of(args_of(model), model.vocab_size), model) == []


def test_groups_that_megatron_would_judge_in_another_way(tmp_path: Path) -> None:
    """It adds up top_k / top_k_groups experts of a group; the DeepSeek-V3 of the other tests asks for two of one."""
    with pytest.raises(ConfigError, match="no arguments") as caught:
        convert(open_source(hub.save("deepseek_v3", tmp_path / "hf")), tmp_path / "out", Options(to="megatron"))
    assert "group_score" in str(caught.value) and not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="no arguments"):
        args_of(ModelConfig(**DENSE | LATENT, qkv_bias=True))


def test_a_model_that_megatron_has_no_words_for() -> None:
    with pytest.raises(ConfigError, match="no arguments") as caught:
        args_of(ModelConfig(**preset("gemma2_2b")))
    assert "attention_softcap" in str(caught.value)
