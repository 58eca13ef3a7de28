"""Which parameters does a module have, where do they hang, and in which precision does each compute?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from paceline.models.precision import fp32_parameters

Precision = Literal["fp32", "bf16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Site:
    """One parameter of a rank, and every place that refers to it: more than one where it is tied."""

    name: str
    """The first of its names, in the order of `nn.Module.named_parameters`."""
    owners: tuple[tuple[nn.Module, str], ...]
    compute_dtype: torch.dtype
    stages: tuple[int, ...]
    """Which of the rank's stages use it: more than one where the first and the last share an embedding."""

    @property
    def parameter(self) -> nn.Parameter:
        module, attribute = self.owners[0]
        found = module._parameters[attribute]
        assert found is not None
        return found

    def replace(self, tensor: Tensor) -> nn.Parameter:
        """All places refer to a new parameter on the memory of ``tensor``; attributes set on the old one are kept."""
        old = self.parameter
        # .data: a version counter of its own, so that writing into the flat buffer while a forward is under way does
        # not look like a change of the weights that the forward has saved
        new = nn.Parameter(tensor.data, requires_grad=old.requires_grad)
        new.__dict__.update(old.__dict__)
        self.put(new)
        return new

    def put(self, parameter: Tensor | None) -> None:
        """All places refer to ``parameter`` (a `nn.Parameter`, or DTensor of one); None takes it out of the model."""
        for module, attribute in self.owners:
            module._parameters[attribute] = cast(nn.Parameter | None, parameter)


def parameter_sites(stages: Sequence[nn.Module], precision: Precision) -> dict[str, Site]:
    """Parameters of all stages by name, in their order, tied and shared ones once.

    With "bf16" all compute in bf16 but those of `fp32_parameters`. A float64 model, a reference in tests, stays one.
    """
    names: dict[int, str] = {}
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    used: dict[int, list[int]] = {}
    dtypes: dict[int, torch.dtype] = {}
    for index, stage in enumerate(stages):
        kept = fp32_parameters(stage)
        for name, module, attribute, parameter in _parameters(stage):
            key = id(parameter)
            if key not in names:
                names[key], owners[key], used[key] = name, [], []
                exact = precision == "fp32" or name in kept
                dtypes[key] = main_dtype(parameter.dtype) if exact else torch.bfloat16
            if (module, attribute) not in owners[key]:
                owners[key].append((module, attribute))
            if index not in used[key]:
                used[key].append(index)
    return {
        name: Site(name=name, owners=tuple(owners[key]), compute_dtype=dtypes[key], stages=tuple(used[key]))
        for key, name in names.items()
    }


def _parameters(stage: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    for prefix, module in stage.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{prefix}.{attribute}" if prefix else attribute, module, attribute, parameter


def main_dtype(dtype: torch.dtype) -> torch.dtype:
    """Precision of the weights that the optimizer updates, for a parameter that was built in ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def units(model: nn.Module) -> list[nn.Module]:
    """The parts of a model in the order of their use: its children, containers such as ``blocks`` taken apart."""
    return list(_units(model))


def _units(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleDict | nn.ModuleList):
            yield from _units(child)
        else:
            yield child


def persistent_buffers(stages: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Buffers that belong to the model's state (router biases), by name; not those that are computed (RoPE tables)."""
    found = {}
    for stage in stages:
        for prefix, module in stage.named_modules():
            for attribute, buffer in module._buffers.items():
                if buffer is not None and attribute not in module._non_persistent_buffers_set:
                    found[f"{prefix}.{attribute}" if prefix else attribute] = buffer
    return found
