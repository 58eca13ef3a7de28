"""Reward models and Hugging Face folders of sequence classifiers with one label: in, trained, and out again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from paceline.checkpoint.pieces import ShardedValue
from paceline.checkpoint.weights import fill
from paceline.config.load import resolve
from paceline.errors import ConfigError
from paceline.generate.load import empty_model
from paceline.interop import formats
from paceline.interop.hf import open_hub
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
    overrides = [
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
        "checkpoint.export=hf",
        layout,
    ]
    distributed.run(_train, 2, overrides)
    exported = folder / "exports" / "step_00000003"
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(exported).float().eval()
    assert loaded.config.architectures == ["LlamaForSequenceClassification"] and loaded.num_labels == 1
    torch.testing.assert_close(our_scores(read(exported)), their_scores(loaded), atol=1e-5, rtol=1e-5)
    before, after = (model.state_dict()["model.norm.weight"] for model in (began, loaded))
    assert not torch.equal(before, after), "nothing was learned"
