"""What happens when a loss or a gradient is not finite: skipped, counted, and after a limit explained.

A step with a non-finite gradient changes neither weights nor moments (the optimizer sees to that, on the device). The
data and the learning-rate schedule go on: the step's samples are consumed, its number is spent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.data.batch import Batch
from paceline.errors import TrainingError
from paceline.models.transformer import ModelOutput
from paceline.optim.clip import non_finite_parameters
from paceline.parallel.mesh import ParallelMesh
from paceline.training.step import TrainStep


class SkipWatch:
    """Notices a row of skipped steps without waiting for the device.

    The longest row so far is counted on the device and copied to host memory behind each step; ``longest`` is what has
    arrived. On a GPU it may lag a few steps behind.
    """

    def __init__(self, device: torch.device) -> None:
        # in a row now, longest row, last step that was skipped
        self._rows = torch.zeros(3, dtype=torch.int64, device=device)
        self._host = torch.zeros(3, dtype=torch.int64, pin_memory=device.type == "cuda")

    def add(self, step: int, finite: Tensor) -> None:
        """``finite``: bool scalar on the device, equal on all ranks."""
        self._rows[0] = (self._rows[0] + 1) * (~finite)
        self._rows[1] = torch.maximum(self._rows[1], self._rows[0])
        self._rows[2] += (step - self._rows[2]) * (~finite)
        self._host.copy_(self._rows, non_blocking=True)

    @property
    def longest(self) -> int:
        return int(self._host[1])

    def last_skipped(self) -> int:
        """The last step that was skipped. Waits for the device."""
        return int(self._rows[2])


def explain_nonfinite(
    number: int, limit: int, batches: Sequence[Batch], step: TrainStep, mesh: ParallelMesh
) -> TrainingError:
    """Runs the micro-batches of the skipped step ``number`` again, looking for where numbers stop being finite.

    The weights are those of the last good step, since skipped steps left them alone; so the same batches fail again,
    unless the fault lies outside the program. Collective.
    """
    mine = _Search(step.stages).run(number, batches, step)
    found = _origins(_gather(replace(mine, text=f"{mesh.describe()}: {mine.text}" if mine.text else "")))
    summed = non_finite_parameters(step.engine.main_parameters())
    step.engine.zero_gradients()
    if not found:
        found = _origins(_gather(_Found(text=f"{mesh.describe()}: {_names(summed)}, summed" if summed else "")))
    evidence = "\n  ".join(found) or (
        "Run again, the same micro-batches gave finite losses and gradients on every rank: the fault does not "
        "repeat, which points to memory or a device rather than to the recipe."
    )
    return TrainingError(
        f"step {number}: the loss or a gradient was not finite"
        + (f", for the {limit}th step in a row" if limit > 3 else f" ({limit} steps in a row)" * (limit > 1)),
        evidence=evidence,
        next_step="The weights are those of the last good step. Try a lower optim.lr, a smaller optim.grad_clip, more "
        "optim.warmup_steps, or train.precision = 'fp32' from the last checkpoint; look at the samples of this step. "
        "train.max_skipped_steps sets the limit.",
    )


@dataclass(frozen=True, kw_only=True)
class _Found:
    """What a rank knows; "" = nothing of its own."""

    text: str
    in_forward: bool = False


def _origins(by_rank: Sequence[_Found]) -> list[str]:
    """What is worth telling: where an output is not finite, every gradient after it is not either."""
    known = [found for found in by_rank if found.text]
    in_forward = [found for found in known if found.in_forward]
    return [found.text for found in in_forward or known]


class _Search:
    """Finds the first module whose output, or whose gradient, is not finite on this rank.

    What came from another pipeline stage says nothing about this one: once activations that are not finite have come
    in, outputs are no longer looked at; gradients likewise.
    """

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        self._stages = stages
        self._forward = ""
        self._backward = ""
        self._parameters: list[str] = []
        self._spoiled_forward = False
        self._spoiled_backward = False

    def run(self, number: int, batches: Sequence[Batch], step: TrainStep) -> _Found:
        with self._watched():
            losses = step.rerun(number, batches)
        parts = [
            f"the loss of micro-batch {index} is {float(loss)}"
            for index, loss in enumerate(losses)
            if not bool(torch.isfinite(loss)) and (self._forward or not self._spoiled_forward)
        ][:2]
        if self._forward:
            parts.append(f"the first output that is not finite is that of {self._forward}")
        if parts:
            return _Found(text="; ".join(parts), in_forward=True)
        if self._backward:
            parts.append(f"the first gradient that is not finite is that of {self._backward}")
        if self._parameters:
            parts.append(_names(self._parameters))
        return _Found(text="; ".join(parts))

    @contextmanager
    def _watched(self) -> Iterator[None]:
        handles, replaced = [], []
        for stage in self._stages:
            handles.append(stage.register_forward_pre_hook(self._before_stage, with_kwargs=True))
            handles.append(stage.register_forward_hook(self._after_stage))
            for name, module in stage.named_modules():
                if name and not any(True for _ in module.children()):  # leaves: the first one is the culprit
                    handles.append(module.register_forward_hook(self._forward_hook(name)))
                if "project" in vars(module):
                    # products of fp8 or of tp: the layers themselves are not called
                    replaced.append((module, module.project))
                    module.project = self._watched_products(name, module)
            for name, parameter in stage.named_parameters():
                if parameter.requires_grad:
                    handles.append(parameter.register_hook(self._gradient_hook(name)))
        try:
            # a compiled block would not see the hooks
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            for handle in handles:
                handle.remove()
            for module, project in replaced:
                module.project = project

    def _before_stage(self, stage: nn.Module, args: object, kwargs: Mapping[str, Tensor | None]) -> None:
        hidden = kwargs.get("hidden")
        self._spoiled_forward |= hidden is not None and not _is_finite(hidden)

    def _after_stage(self, stage: nn.Module, args: object, output: ModelOutput) -> None:
        def look(gradient: Tensor) -> None:
            self._spoiled_backward |= not _is_finite(gradient)

        if output.hidden is not None and output.hidden.requires_grad:
            output.hidden.register_hook(look)

    def _forward_hook(self, name: str) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            tensors = [item for item in (output if isinstance(output, tuple) else (output,)) if torch.is_tensor(item)]
            for tensor in tensors:
                if (
                    not self._forward
                    and not self._spoiled_forward
                    and tensor.is_floating_point()
                    and not _is_finite(tensor)
                ):
                    self._forward = name

        return hook

    def _watched_products(self, name: str, sublayer: nn.Module) -> Callable[[Tensor], tuple[Tensor, ...]]:
        products: Callable[[Tensor], tuple[Tensor, ...]] = sublayer.project  # type: ignore[assignment]
        layers: Sequence[nn.Linear] = sublayer.in_projs  # type: ignore[assignment]
        names = {layer: f"{name}.{leaf}" for leaf, layer in sublayer.named_children()}

        def project(x: Tensor) -> tuple[Tensor, ...]:
            outputs = products(x)
            if not self._forward and not self._spoiled_forward:
                spoiled = [layer for layer, out in zip(layers, outputs, strict=True) if not _is_finite(out)]
                # in fp8 one scale serves all of them, and one layer's weights spoil every output
                guilty = [layer for layer in spoiled if not _is_finite(layer.weight)]
                self._forward = " and ".join(names[layer] for layer in guilty or spoiled)
            return outputs

        return project

    def _gradient_hook(self, name: str) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            if name not in self._parameters and not self._spoiled_backward and not _is_finite(gradient):
                self._backward = self._backward or name
                self._parameters.append(name)

        return hook


def _is_finite(tensor: Tensor) -> bool:
    # detached: where a block is computed again, the second time must keep the same tensors as the first
    return bool(torch.isfinite(tensor.detach()).all())


def _names(parameters: Sequence[str]) -> str:
    more = f" and {len(parameters) - 3} more" if len(parameters) > 3 else ""
    return f"parameters with gradients that are not finite: {', '.join(parameters[:3])}{more}"


def _gather(found: _Found) -> list[_Found]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [found]
    reports = [found] * dist.get_world_size()
    dist.all_gather_object(reports, found)
    return reports
