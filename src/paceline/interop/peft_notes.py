"""What should a person know of an adapter that can be used, but whose settings say more than is read of them?"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.interop.peft_settings import CONFIG

_READ = """
peft_type r lora_alpha rank_pattern alpha_pattern use_rslora use_dora init_lora_weights bias lora_bias modules_to_save
target_modules exclude_modules layers_to_transform layers_pattern target_parameters layer_replication
trainable_token_indices alora_invocation_tokens use_bdlora use_qalora kasa_config arrow_config monteclora_config
"""
_IDLE = """
task_type base_model_name_or_path revision auto_mapping peft_version inference_mode lora_dropout fan_in_fan_out
megatron_config megatron_core loftq_config eva_config corda_config lora_ga_config velora_config qalora_group_size
runtime_config ensure_weight_tying
"""
"""They decide how an adapter is trained, kept or begun, not what its matrices add."""
_KNOWN = frozenset((_READ + _IDLE).split())
_SHOWN = 5


def notes_on(path: Path, config: Mapping[str, Any], modules: Iterable[str]) -> tuple[str, ...]:
    """Settings that are not known, and pairs that PEFT would not read by these settings though the file has them.

    Args:
        modules: of the base that have a pair in the file.
    """
    unknown = [f"{key} = {json.dumps(value)[:60]}" for key, value in config.items() if _says_unknown(key, value)]
    notes = []
    if unknown:
        notes.append(f"{path.name}: {CONFIG} has settings that are not known here, and passed over: {_few(unknown)}")
    left = [module for module in modules if not _selects(config, module)]
    if left:
        said = [f"{key} = {json.dumps(config[key])[:80]}" for key in _SELECTING if config.get(key)]
        notes.append(
            f"{path.name}: {len(left)} of its pairs are of modules that {' and '.join(said)} in {CONFIG} leave"
            f"{'' if len(said) > 1 else 's'} out: PEFT would not read them, here they count: {_few(left)}"
        )
    return tuple(notes)


_SELECTING = ("target_modules", "exclude_modules")


def _says_unknown(key: str, value: object) -> bool:
    return key not in _KNOWN and value not in (None, False, "", [], {})


def _few(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _selects(config: Mapping[str, Any], module: str) -> bool:
    """Whether PEFT gives this module a pair: text is a pattern of whole names, a list has names or their ends."""
    targets, excluded = (config.get(key) for key in _SELECTING)
    if excluded and _matches(excluded, module):
        return False
    return not targets or targets == "all-linear" or _matches(targets, module)


def _matches(asked: object, module: str) -> bool:
    if isinstance(asked, str):
        try:
            return re.fullmatch(asked, module) is not None
        except re.error:
            return False
    names = asked if isinstance(asked, list | tuple) else ()
    return any(module == name or module.endswith(f".{name}") for name in names)
