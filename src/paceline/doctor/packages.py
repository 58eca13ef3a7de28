"""Which packages does a recipe need that this Python does not have? Torch-free; nothing is imported."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from paceline.config.run import RunConfig
from paceline.errors import to_install
from paceline.report.finding import Finding


@dataclass(frozen=True, kw_only=True)
class _Need:
    package: str
    extra: str
    option: str
    """What in the recipe asks for it; ``{}`` stands for the value."""
    value: Callable[[RunConfig], str]
    """Of the option, where it asks for the package; else empty."""
    off: str
    """What to set to do without."""


_NEEDS = (
    _Need(
        package="torchao",
        extra="qlora",
        option="lora.base = {}",
        value=lambda config: config.lora.base if config.lora.on and config.lora.base == "nf4" else "",
        off="lora.base=bf16",
    ),
    _Need(
        package="torchao",
        extra="lowbit",
        option="optim.name = {}",
        value=lambda config: config.optim.name if config.optim.name == "adamw8bit" else "",
        off="optim.name=adamw",
    ),
    *(
        _Need(
            package=package,
            extra=package,
            option=f"observe.{name} = {{}}",
            value=lambda config, name=name: str(getattr(config.observe, name)),  # type: ignore[misc]
            off=f"observe.{name}=",
        )
        for package, name in (
            ("wandb", "wandb_project"),
            ("mlflow", "mlflow_experiment"),
            ("trackio", "trackio_project"),
        )
    ),
)


def judge_packages(config: RunConfig) -> Iterator[Finding]:
    """A warning for each optional package that a run would look for in vain: it is refused at its start."""
    for need in _NEEDS:
        value = need.value(config)
        if value and not _is_here(need.package):
            yield Finding(
                id="recipe.package",
                severity="warning",
                subject=f"{need.option.format(repr(value))} needs the package {need.package}, which is not here",
                evidence="A run in this environment is refused at its start.",
                next_step=f"--set {need.off}, or {to_install(need.extra)}.",
            )


def _is_here(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # one that hides itself, as tests do
        return False
