"""From another system's file or command line to keys and values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError


def read_arguments_file(path: Path) -> dict[str, Any]:
    """The keys and values of a YAML or JSON file.

    Raises:
        ConfigError: it cannot be read, is neither, or is no table of keys.
    """
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read", evidence=str(error), next_step="Give the file with the other program's arguments."
        ) from error
    try:
        content = json.loads(text) if path.suffix == ".json" else yaml.load(text, Loader=_loader())
    except (ValueError, yaml.YAMLError) as error:
        kind = "JSON" if path.suffix == ".json" else "YAML"
        raise ConfigError(
            f"{path} is not valid {kind}", evidence=" ".join(str(error).split()), next_step="Mend that line."
        ) from error
    if not isinstance(content, Mapping) or not all(isinstance(key, str) for key in content):
        raise ConfigError(
            f"{path} is no table of keys", next_step="It should hold lines such as learning_rate: 1.0e-4."
        )
    return dict(content)


def _loader() -> Any:
    """YAML's safe loader that refuses a key which is given twice: its own takes the last, unsaid."""
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: Any) -> Any:
            """Before `<<` is worked out: what is merged may be given again."""
            node = super().compose_mapping_node(anchor)
            seen: dict[str, int] = {}
            for key, _ in node.value:
                line = key.start_mark.line + 1
                if not isinstance(key, yaml.ScalarNode):
                    raise yaml.YAMLError(f"the key in line {line} is no word")
                if key.value in seen:
                    raise yaml.YAMLError(f"{key.value} is given twice, in lines {seen[key.value]} and {line}")
                seen[key.value] = line
            return node

    return Loader


def read_words(words: Sequence[str]) -> dict[str, Any]:
    """Keys and values of a command line's words: ``--key value``, ``--key v1 v2``, ``--key=value``, ``--switch``.

    Raises:
        ConfigError: a key is given twice with different values.
    """
    given: dict[str, Any] = {}
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.startswith("--"):
            continue  # of a subcommand, or a stray one
        name, equals, attached = word[2:].partition("=")
        end = at
        while not equals and end < len(words) and not words[end].startswith("--"):
            end += 1
        values = [attached] if equals else list(words[at:end])
        at = end
        value: Any = True if not values else values[0] if len(values) == 1 else values
        key = name.replace("-", "_")
        if key in given and given[key] != value:
            raise ConfigError(
                f"--{name} is given twice: {given[key]} and {value}", next_step="Leave out the one that is not meant."
            )
        given[key] = value
    return given
