"""A user's own Python file adds presets, data sources, tasks and hooks.

A plugin is a module (``my_package.my_module``) or a file (``my_plugin.py``, relative to the working directory) with one
function::

    def register(registry: Registry) -> None:
        registry.preset("my_model", {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "vocab_size": 1000})
        registry.task("my_task", MyTask)
        registry.data_source("my_source", open_my_source)
        registry.hook(MyHook)

The registry is an object that is handed on, not a global: two runs in one process may have different plugins.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.errors import ConfigError, PacelineError


@dataclass
class Registry:
    """What plugins have added. Factories are called by the room that knows their type."""

    presets: dict[str, dict[str, Any]] = field(default_factory=dict)
    tasks: dict[str, Callable[..., Any]] = field(default_factory=dict)
    data_sources: dict[str, Callable[..., Any]] = field(default_factory=dict)
    hooks: list[Callable[..., Any]] = field(default_factory=list)
    weight_sources: list[Callable[..., Any]] = field(default_factory=list)
    exports: dict[str, Callable[..., Any]] = field(default_factory=dict)
    adapter_sources: list[Callable[..., Any]] = field(default_factory=list)

    def preset(self, name: str, fields: Mapping[str, Any]) -> None:
        """Makes ``model.preset = name`` mean these fields of the `[model]` section."""
        self._add(self.presets, "preset", name, dict(fields))

    def task(self, kind: str, factory: Callable[..., Any]) -> None:
        """Makes ``task.kind = kind`` mean the task that ``factory(config)`` returns (see `tasks/task.py`)."""
        self._add(self.tasks, "task", kind, factory)

    def data_source(self, scheme: str, factory: Callable[..., Any]) -> None:
        """Makes ``data.train = "scheme:rest"`` read the dataset that ``factory(rest, context)`` returns."""
        self._add(self.data_sources, "data source", scheme, factory)

    def hook(self, factory: Callable[..., Any]) -> None:
        """Adds the hook that ``factory(config)`` returns (see `observe/hooks.py`) to the run."""
        self.hooks.append(factory)

    def weight_source(self, factory: Callable[..., Any]) -> None:
        """Lets ``model.init_from`` name what ``factory(path, model)`` can read: it returns `ForeignWeights`, or None
        where the path is of another kind (see `checkpoint/weights.py`)."""
        self.weight_sources.append(factory)

    def adapter_source(self, factory: Callable[..., Any]) -> None:
        """Lets ``lora.init_adapter`` name what ``factory(path, model, lora)`` can read: it returns a `WeightSource` of
        the adapter's parameters, or None where the path is of another kind."""
        self.adapter_sources.append(factory)

    def export(self, name: str, function: Callable[..., Any]) -> None:
        """Makes ``checkpoint.export = name`` call ``function(ExportJob)`` (see `checkpoint/weights.py`)."""
        self._add(self.exports, "export", name, function)

    def _add(self, table: dict[str, Any], what: str, name: str, value: Any) -> None:
        if name in table:
            raise ConfigError(
                f"two plugins register the {what} {name!r}", next_step="Rename one, or leave one out of run.plugins."
            )
        table[name] = value


def load_plugins(names: Sequence[str] | str) -> Registry:
    """Imports each plugin and lets it register.

    Raises:
        ConfigError: a plugin cannot be found or imported, or has no ``register`` function.
    """
    registry = Registry()
    for name in [names] if isinstance(names, str) else names:
        module = _import(name)
        register = getattr(module, "register", None)
        if not callable(register):
            raise ConfigError(
                f"the plugin {name!r} has no function `register(registry)`",
                next_step="Define it in that module; it gets a paceline.config.plugins.Registry.",
            )
        try:
            register(registry)
        except PacelineError:
            raise
        except Exception as error:
            raise _broken(name, "its function `register` failed", error) from error
    return registry


def _import(name: str) -> ModuleType:
    try:
        return _import_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)
    except Exception as error:
        raise _broken(name, "it cannot be imported", error) from error


def _broken(name: str, what: str, error: Exception) -> ConfigError:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return ConfigError(
        f"the plugin {name!r} of run.plugins is not usable: {what}",
        evidence=f"{type(error).__name__}: {error}{place}",
        next_step="Give an importable module, or the path of a .py file relative to the working directory; mend it "
        "where the fault is its own.",
    )


def _import_file(path: Path) -> ModuleType:
    path = path.resolve(strict=True)
    name = f"paceline_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that classes of the plugin can be pickled to worker processes
    spec.loader.exec_module(module)
    return module
