"""Which tokenizer goes along with the weights of our own run, and at which token does a text end?

Other programs find both in a folder by the hub's names. What a family's code assumes where nothing is said (id 2 ends a
text of Llama) is an ordinary token of another tokenizer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.checkpoint.store import Checkpoint
from paceline.checkpoint.weights import COMPANIONS
from paceline.config.hub import CONFIG, is_hub_folder
from paceline.config.run import RunConfig
from paceline.data.kept_tokenizer import with_used
from paceline.data.sidecar import read_sidecar
from paceline.data.tokenizer import ByteTokenizer, load_tokenizer
from paceline.errors import ConfigError, DataError
from paceline.generate.load import tokenizer_of
from paceline.interop.sidecars import IDS, SETTINGS, TOKENIZER, sidecars_in

TOKENIZER_CONFIG = "tokenizer_config.json"


@dataclass(frozen=True, kw_only=True)
class TextFiles:
    """What a run has beside its weights, under the hub's names."""

    files: Mapping[str, Path] = field(default_factory=dict)
    made: Mapping[str, bytes] = field(default_factory=dict)
    """Content of files that lie nowhere yet."""


def files_of_run(checkpoint: Checkpoint, recipe: RunConfig) -> dict[str, Path]:
    """Name -> path of what goes along with a checkpoint: what its first weights came with, the tokenizer and the chat
    template that the run used."""
    folder = checkpoint.folder
    run = folder.parent.parent
    places = [folder / COMPANIONS, run / COMPANIONS]
    if recipe.model.init_from and is_hub_folder(recipe.model.init_from):
        places.append(Path(recipe.model.init_from))
    return with_used(sidecars_in(*places), run, folder)


def text_files_of(checkpoint: Checkpoint, recipe: RunConfig, found: Mapping[str, Path]) -> TextFiles:
    """What ``found`` lacks: the tokenizer that the run was trained with, and which of its tokens ends a text.

    Args:
        found: name -> path of what the weights came with; it wins; a hub's config among it names the ids.
    """
    files: dict[str, Path] = {}
    name = str(next((found[name] for name in TOKENIZER if name in found), ""))
    if not name:
        try:
            name = tokenizer_of(checkpoint, recipe)
        except (ConfigError, DataError):
            name = ""
        path = _file_of(name)
        if path is not None:
            files["tokenizer.json" if path.suffix == ".json" else "tokenizer.model"] = path
    if CONFIG in found:
        return TextFiles(files=files)
    return TextFiles(files=files, made=made_files(recipe, name, found))


def made_files(recipe: RunConfig, tokenizer: str, found: Mapping[str, Path]) -> dict[str, bytes]:
    """Generation settings and, for a `tokenizer.json`, its `tokenizer_config.json`, where ``found`` has none.

    A text begins with the token that ends one, since that is what precedes every document but the first in training.
    """
    end = end_of_document(recipe, tokenizer)
    if end is None:
        return {}
    made: dict[str, Any] = {SETTINGS: dict.fromkeys(IDS, end)}
    path = _file_of(tokenizer)
    word = None if path is None or path.suffix != ".json" else _word(path, end)
    if word is not None:
        made[TOKENIZER_CONFIG] = {
            # without it, the class of the model's family puts its own rules in the place of the file's
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": word,
            "eos_token": word,
            "clean_up_tokenization_spaces": False,
            "model_max_length": recipe.model.max_seq_len,
        }
    return {
        name: (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
        for name, content in made.items()
        if name not in found
    }


def end_of_document(recipe: RunConfig, tokenizer: str) -> int | None:
    """The id that the training set was built with, where it is here and of this tokenizer; else what the tokenizer
    itself names; None where neither is known.

    Args:
        tokenizer: path, or `byte`; empty where none is known.
    """
    fingerprint = _fingerprint(tokenizer)
    train = recipe.data.train
    paths = [train] if isinstance(train, str) else [source.path for source in train]
    for prefix in paths if not recipe.data.is_synthetic else ():
        try:
            sidecar = read_sidecar(prefix)
        except DataError:
            continue
        if sidecar is not None and fingerprint in ("", sidecar.tokenizer_fingerprint):
            return sidecar.eod_id
    try:
        return load_tokenizer(tokenizer).eod_id if tokenizer else None
    except DataError:
        return None


def unsaid(names: Collection[str], *, ends: bool) -> list[str]:
    """Warnings about what a folder with these files lacks.

    Args:
        ends: whether it is known which token ends a text.
    """
    warnings = []
    if not any(name in names for name in TOKENIZER):
        warnings.append(
            "No tokenizer goes along: none that is a file was found. Other programs cannot read or write text with "
            "this model until its tokenizer.json lies beside the weights; `paceline generate` takes --tokenizer."
        )
    if not ends:
        warnings.append(
            "Which token ends a text is not known: bos_token_id and eos_token_id are null, so generation goes on to "
            f"the limit of tokens. Name them in {CONFIG} and {SETTINGS} if you know them."
        )
    return warnings


def _file_of(tokenizer: str) -> Path | None:
    """The file that a name of `load_tokenizer` means."""
    path = Path(tokenizer)
    if tokenizer and path.is_dir():
        path = next((path / name for name in TOKENIZER[:2] if (path / name).is_file()), path)
    return path if tokenizer and path.is_file() else None


def _fingerprint(tokenizer: str) -> str:
    path = _file_of(tokenizer)
    if path is not None:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return ByteTokenizer.fingerprint if tokenizer == "byte" else ""


def _word(path: Path, token_id: int) -> str | None:
    """The token of a `tokenizer.json` with this id."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = content["model"]["vocab"]
        # of Unigram models a list of (word, score)
        words = vocabulary if isinstance(vocabulary, dict) else {word: i for i, (word, _) in enumerate(vocabulary)}
        words = words | {token["content"]: token["id"] for token in content.get("added_tokens", ())}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return next((str(word) for word, number in words.items() if number == token_id), None)
