"""From a run folder to a model that can speak: recipe, weights, tokenizer."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from paceline.checkpoint.adapters import BaseReference, OpenBase, whole_model
from paceline.checkpoint.locate import Report, find_checkpoint
from paceline.checkpoint.pieces import ShardedValue
from paceline.checkpoint.store import Checkpoint
from paceline.checkpoint.weights import CheckpointSource, WeightSource, fill
from paceline.config.load import validate
from paceline.config.model import ModelConfig
from paceline.config.run import RunConfig
from paceline.data.kept_tokenizer import find_kept
from paceline.data.sidecar import read_sidecar
from paceline.data.tokenizer import Tokenizer, load_tokenizer
from paceline.errors import CheckpointError, ConfigError
from paceline.models.transformer import Transformer
from paceline.runtime.device import supports_bf16


class Placed(Protocol):
    """Where a parameter lies in the plain model."""

    @property
    def whole(self) -> torch.Size: ...
    @property
    def offsets(self) -> tuple[int, ...]: ...


Spread = Callable[[Transformer], Mapping[str, Placed]]
"""Cuts a plain model on the meta device over the ranks of a process group, and says what is left here; a parameter that
is not named is whole. ``parallel/inference.py`` has one."""


def stay_whole(model: Transformer) -> Mapping[str, Placed]:
    """One device."""
    return {}


@dataclass(frozen=True, kw_only=True)
class Speaker:
    """A trained model with its tokenizer."""

    model: Transformer
    tokenizer: Tokenizer
    config: RunConfig
    checkpoint: Checkpoint | None = None
    """None where the weights are of another program."""
    ends: tuple[int, ...] = ()
    """Tokens that end a text where the model says so itself; otherwise the tokenizer's end of document does."""

    begins: tuple[int, ...] = ()
    """Tokens that the tokenizer of a model of another program puts before every text; none where we trained it."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        return self.ends or (self.tokenizer.eod_id,)

    @property
    def step(self) -> int:
        """Of the run that the weights are from; 0 where there is none."""
        return 0 if self.checkpoint is None else self.checkpoint.step


def load_speaker(
    path: Path,
    *,
    device: torch.device,
    tokenizer: str = "",
    report: Report | None = None,
    spread: Spread = stay_whole,
    open_base: OpenBase | None = None,
) -> Speaker:
    """Builds the model of a run folder or checkpoint. On one device no process group is needed.

    Weights are fp32 on the CPU and bf16 on GPUs that compute in it. Multi-token-prediction heads are left out.

    Args:
        tokenizer: overrides the one that the run used.
        report: hears of damaged checkpoints that were passed over.
        spread: each rank then reads its own part.
        open_base: of a run with adapters, opens the weights that they belong to; None = those of another run of ours.

    Raises:
        CheckpointError: no whole checkpoint is there, or its weights are not those of its recipe.
        ConfigError: no tokenizer is known, or it has more ids than the model.
        DataError: the tokenizer cannot be read.
    """
    checkpoint = find_checkpoint(path, report=report)
    config = recipe_of(checkpoint)
    found = load_tokenizer(tokenizer or tokenizer_of(checkpoint, config))
    refuse_tokenizer(found, config.model.vocab_size)
    model = load_model(
        checkpoint, config, device=device, dtype=speaking_dtype(device), spread=spread, open_base=open_base
    )
    return Speaker(model=model, tokenizer=found, checkpoint=checkpoint, config=config)


def refuse_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises ConfigError where it has more ids than the model."""
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size} ids, the model's vocabulary {vocab_size}",
            evidence="It is not the tokenizer that the model was trained with.",
            next_step="Give that one: --tokenizer PATH.",
        )


def speaking_dtype(device: torch.device) -> torch.dtype:
    """bf16 on GPUs that compute in it, fp32 elsewhere."""
    return torch.bfloat16 if device.type == "cuda" and supports_bf16(device) else torch.float32


def load_model(
    checkpoint: Checkpoint,
    config: RunConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    spread: Spread = stay_whole,
    open_base: OpenBase | None = None,
) -> Transformer:
    """The plain model in evaluation mode, filled from a checkpoint; adapters are merged into the weights.

    Raises:
        CheckpointError: names or shapes differ.
    """
    model, into = empty_model(config.model, device=device, dtype=dtype, spread=spread)
    source = CheckpointSource(checkpoint)
    if config.lora.on:
        base = BaseReference.from_extra(checkpoint.state().extra)
        fill(whole_model(source, config.lora, base, open_base or _open_run, str(checkpoint.folder)), into)
    else:
        source.fill(into, ignore=("mtp.",))
    return model.eval()


def _open_run(source: str) -> WeightSource:
    return CheckpointSource(Path(source))


def empty_model(
    config: ModelConfig, *, device: torch.device, dtype: torch.dtype, spread: Spread = stay_whole
) -> tuple[Transformer, dict[str, ShardedValue]]:
    """The model without values and without multi-token prediction, and where its weights and stored buffers go.

    Raises:
        ConfigError: it is a reward model, which does not speak.
    """
    if config.has_score:
        raise ConfigError(
            "a reward model says nothing: it gives one score for a text",
            evidence="model.head = 'score': there is no head for a vocabulary.",
            next_step="For its scores load its export in Transformers: AutoModelForSequenceClassification.",
        )
    model = Transformer(config.model_copy(update={"mtp_layers": 0}), dtype=dtype, device="meta")
    placed = spread(model)
    model.to_empty(device=device)
    model.reset_buffers()
    into = {}
    # tied weights are one parameter
    for name, tensor in model.named_parameters():
        value = ShardedValue.from_full(tensor)
        into[name] = value.inside(placed[name].whole, placed[name].offsets) if name in placed else value
    # buffers that no checkpoint stores (rotary frequencies) are not in the state
    stored = model.state_dict().keys()
    buffers: dict[str, Tensor] = {name: tensor for name, tensor in model.named_buffers() if name in stored}
    return model, into | {name: ShardedValue.from_full(tensor) for name, tensor in buffers.items()}


def recipe_of(checkpoint: Checkpoint) -> RunConfig:
    """The recipe saved in the checkpoint; plugins are not loaded, since a resolved recipe names every field."""
    try:
        return validate(tomllib.loads(checkpoint.recipe()))
    except (OSError, tomllib.TOMLDecodeError, ConfigError) as error:
        raise CheckpointError(
            f"The recipe in {checkpoint.folder} cannot be read.",
            evidence=str(error),
            next_step="Use the version of paceline that wrote it (`versions` in its state.json).",
        ) from error


def tokenizer_of(checkpoint: Checkpoint, config: RunConfig) -> str:
    """The copy in the run folder, else the one that came with the first weights, else what the recipe names, else what
    the dataset's description names.

    Raises:
        ConfigError: none is known.
    """
    return tokenizer_in((checkpoint.folder.parent.parent, checkpoint.folder), config)


def tokenizer_in(folders: Sequence[Path], config: RunConfig) -> str:
    """As `tokenizer_of`, of run folders and checkpoints of one run, the innermost last."""
    if kept := find_kept(*folders):
        return kept
    if config.data.tokenizer:
        return config.data.tokenizer
    train = config.data.train
    for prefix in [train] if isinstance(train, str) else [source.path for source in train]:
        sidecar = read_sidecar(prefix)
        if sidecar is not None:
            return sidecar.tokenizer
    raise ConfigError(
        f"no tokenizer is known for {folders[-1]}",
        evidence="None was kept in the run folder (tokenizer/), the recipe has no data.tokenizer, and the dataset "
        f"{train!r} is not here or does not say which it was built with.",
        next_step="Give one: --tokenizer tokenizer.json (or a SentencePiece .model, or byte).",
    )
