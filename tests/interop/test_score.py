"""Reward models and Hugging Face folders of sequence classifiers with one label: in, trained, and out again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from paceline.checkpoint.locate import find_checkpoint
from paceline.checkpoint.pieces import ShardedValue
from paceline.checkpoint.weights import CheckpointSource, fill
from paceline.config.load import resolve
from paceline.config.lora import SCORE, is_adapter
from paceline.errors import ConfigError
from paceline.generate.load import empty_model
from paceline.interop import formats
from paceline.interop.convert import Options, convert
from paceline.interop.hf import open_hub
from paceline.interop.peft import merge, read_adapter
from paceline.interop.peft_write import convert_adapter
from paceline.interop.sources import open_source
from paceline.models.transformer import Transformer
from paceline.runtime.process import ProcessInfo
from paceline.runtime.signals import StopRequest
from paceline.training.run import run_in_group
from tests import distributed
from tests.interop import hub_folders as hub
from tests.models.hf_reference import randomize

NAMES = ("gpt2", "llama", "qwen2_tied", "mixtral")


def classifier(name: str, folder: Path, kind: str = "SequenceClassification", **more: int) -> nn.Module:
    """Saved in ``folder``; of one label, unless ``more`` says otherwise."""
    family = hub.VARIANTS[name]
    sizes = family.hf | {"num_labels": 1, "pad_token_id": 0} | more
    config = getattr(transformers, f"{family.hf_class}Config")(**sizes)
    model = getattr(transformers, f"AutoModelFor{kind}").from_config(config).float().eval()
    randomize(model)
    model.save_pretrained(folder)
    return model


def read(folder: Path) -> Transformer:
    opened = open_hub(folder)
    model = Transformer(opened.model)
    model.reset_buffers()
    fill(opened.weights, {name: ShardedValue.from_full(value.data) for name, value in model.named_parameters()})
    return model.eval()


@torch.no_grad()
def their_scores(model: nn.Module) -> torch.Tensor:
    """Of whole texts without padding: the last token's."""
    return model(hub.tokens()).logits[:, 0]


@torch.no_grad()
def our_scores(model: Transformer) -> torch.Tensor:
    scores = model(hub.tokens()).scores
    assert scores is not None
    return scores[:, -1]


@pytest.mark.parametrize("name", NAMES)
def test_scores_are_theirs(name: str, tmp_path: Path) -> None:
    reference = classifier(name, tmp_path)
    model = read(tmp_path)
    assert model.config.has_score and model.head is None
    torch.testing.assert_close(our_scores(model), their_scores(reference), atol=1e-5, rtol=1e-5)


def test_a_classifier_of_several_labels_is_refused(tmp_path: Path) -> None:
    classifier("llama", tmp_path, num_labels=3)
    with pytest.raises(ConfigError, match="num_labels = 3"):
        open_hub(tmp_path)


def test_a_reward_model_does_not_speak(tmp_path: Path) -> None:
    classifier("llama", tmp_path)
    with pytest.raises(ConfigError, match="one score"):
        empty_model(open_hub(tmp_path).model, device=torch.device("cpu"), dtype=torch.float32)


def _train(rank: int, world_size: int, overrides: list[str]) -> None:
    recipe = resolve({}, overrides)
    formats.register(recipe.registry)
    info = ProcessInfo(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size)
    run_in_group(recipe, info, torch.device("cpu"), StopRequest())


@pytest.mark.parametrize(
    ("start", "layout"), [("CausalLM", "parallel.tp=2"), ("SequenceClassification", "parallel.zero=3")]
)
def test_trained_from_a_folder_and_exported(start: str, layout: str, tmp_path: Path) -> None:
    """What Transformers reads of the export scores as our weights do."""
    source, folder, data = tmp_path / "source", tmp_path / "run", tmp_path / "pairs.jsonl"
    began = classifier("llama", source, start, vocab_size=320)
    data.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    overrides = _recipe(source, folder, data, "checkpoint.export=hf", layout)
    distributed.run(_train, 2, overrides)
    exported = folder / "exports" / "step_00000003"
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(exported).float().eval()
    assert loaded.config.architectures == ["LlamaForSequenceClassification"] and loaded.num_labels == 1
    torch.testing.assert_close(our_scores(read(exported)), their_scores(loaded), atol=1e-5, rtol=1e-5)
    before, after = (model.state_dict()["model.norm.weight"] for model in (began, loaded))
    assert not torch.equal(before, after), "nothing was learned"


def _recipe(source: Path, folder: Path, data: Path, *more: str) -> list[str]:
    return [
        f"run.dir={folder}",
        f"model.init_from={source}",
        "model.head=score",
        "task.kind=reward",
        f"data.train={data}",
        "data.tokenizer=byte",
        "data.template=chatml",
        "train.steps=3",
        "train.seq_len=128",
        "train.global_batch_size=2",
        "train.precision=fp32",
        "optim.lr=0.01",
        "observe.tensorboard=false",
        "observe.progress=none",
        "cluster.device=cpu",
        *more,
    ]


@pytest.mark.parametrize(
    ("start", "layout"), [("CausalLM", "parallel.tp=2"), ("SequenceClassification", "parallel.pp=2")]
)
def test_adapters_and_a_score_that_learns_whole(start: str, layout: str, tmp_path: Path) -> None:
    """From a language model, and from a classifier: through a checkpoint, merged, and as PEFT's folder; then on."""
    source, folder, data = tmp_path / "source", tmp_path / "run", tmp_path / "pairs.jsonl"
    classifier("llama", source, start, vocab_size=320)
    data.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    lora = ("lora.rank=4", "lora.alpha=8", "checkpoint.export=peft", "optim.lr=0.05")
    distributed.run(_train, 2, _recipe(source, folder, data, *lora, layout, "train.steps=2"))
    distributed.run(_train, 1, _recipe(source, folder, data, *lora, "checkpoint.allow_change=lr"))  # on one rank
    checkpoint = find_checkpoint(folder)
    saved = CheckpointSource(checkpoint).shapes()
    assert checkpoint.step == 3 and SCORE in saved and all(is_adapter(name) or name == SCORE for name in saved)
    convert(open_source(folder), tmp_path / "merged", Options(to="hf"))
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").float().eval()
    scores = their_scores(loaded)
    torch.testing.assert_close(our_scores(read(tmp_path / "merged")), scores, atol=1e-5, rtol=1e-5)
    adapter = folder / "exports" / "step_00000003"
    settings = json.loads((adapter / "adapter_config.json").read_text())
    assert (settings["task_type"], settings["modules_to_save"]) == ("SEQ_CLS", ["score"])
    convert_adapter(folder, tmp_path / "by hand")
    written = (path / "adapter_model.safetensors" for path in (adapter, tmp_path / "by hand"))
    assert len({path.read_bytes() for path in written}) == 1
    convert(merge(open_source(source), read_adapter(adapter)), tmp_path / "again", Options(to="hf"))
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "again").float().eval()
    torch.testing.assert_close(their_scores(again), scores, atol=1e-5, rtol=1e-5)
    # what another run goes on from is where this one ended
    still = ("optim.lr=1e-30", "train.steps=1", "checkpoint.export=", "lora.rank=4", "lora.alpha=8")
    for name, begin in (("peft", adapter), ("ours", folder)):
        later = tmp_path / name
        distributed.run(_train, 1, _recipe(source, later, data, *still, f"lora.init_adapter={begin}"))
        found = CheckpointSource(find_checkpoint(later))
        assert torch.equal(found.read(SCORE), CheckpointSource(checkpoint).read(SCORE))
    distributed.run(_train, 1, _recipe(folder, tmp_path / "whole", data, "optim.lr=1e-30", "train.steps=1"))
    assert torch.equal(
        CheckpointSource(find_checkpoint(tmp_path / "whole")).read(SCORE), CheckpointSource(checkpoint).read(SCORE)
    )
