"""At which token does an answer end in the template that a run learned by? Other programs stop at the ids of
`generation_config.json`, which are those of the model that the run began from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.config.hub import CONFIG
from paceline.data.chat_template import load_template
from paceline.data.kept_tokenizer import TEMPLATE, is_another_template
from paceline.data.tokenizer import load_tokenizer
from paceline.errors import DataError
from paceline.generate.chat import answer_ends
from paceline.interop.sidecars import SETTINGS


def with_turn_end(contents: Mapping[str, bytes], files: Mapping[str, Path]) -> dict[str, bytes]:
    """``contents``; where a run used another chat template than its first weights came with, the token that ends its
    answers is among the `eos_token_id` of `generation_config.json`, behind those that are there.

    Args:
        contents: name -> content of what goes along with weights.
        files: name -> path of those that are files.
    """
    if TEMPLATE not in files or "tokenizer.json" not in files or not is_another_template(files[TEMPLATE]):
        return dict(contents)
    try:
        tokenizer = load_tokenizer(str(files["tokenizer.json"]))
        ends = answer_ends(load_template(str(files[TEMPLATE]), tokenizer), tokenizer, ())
    except DataError:
        return dict(contents)  # nothing can be read by it: whoever speaks with the model is told
    settings = _read(contents.get(SETTINGS))
    said = settings.get("eos_token_id")
    said = _read(contents.get(CONFIG)).get("eos_token_id") if said is None else said
    known = said if isinstance(said, list) else [] if said is None else [said]
    more = [end for end in ends if end not in known]
    if not more:
        return dict(contents)
    ids = [*known, *more]
    settings["eos_token_id"] = ids if len(ids) > 1 else ids[0]
    return {**contents, SETTINGS: (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()}


def _read(data: bytes | None) -> dict[str, Any]:
    try:
        found = json.loads(data or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
