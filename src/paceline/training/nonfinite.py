"""What happens when a loss or a gradient is not finite: skipped, counted, and after a limit explained.

A step with a non-finite gradient changes neither weights nor moments (the optimizer sees to that, on the device). The
data and the learning-rate schedule go on: the step's samples are consumed, its number is spent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.data.batch import Batch
from paceline.errors import TrainingError
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
    search = _Search(step.stages)
    mine = search.run(number, batches, step)
    found = [text for text in _gather(f"{mesh.describe()}: {mine}" if mine else "") if text]
    summed = non_finite_parameters(step.engine.main_parameters())
    step.engine.zero_gradients()
    if not found:
        found = [text for text in _gather(f"{mesh.describe()}: {_names(summed)}, summed" if summed else "") if text]
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


class _Search:
    """Finds the first module whose output, or whose gradient, is not finite on this rank."""

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        self._stages = stages
        self._forward = ""
        self._backward = ""
        self._parameters: list[str] = []

    def run(self, number: int, batches: Sequence[Batch], step: TrainStep) -> str:
        with self._watched():
            losses = step.rerun(number, batches)
        parts = [
            f"the loss of micro-batch {index} is {float(loss)}"
            for index, loss in enumerate(losses)
            if not bool(torch.isfinite(loss))
        ][:2]
        if self._forward:
            parts.append(f"the first output that is not finite is that of {self._forward}")
        if parts:
            return "; ".join(parts)  # every gradient is then not finite, which says no more
        if self._backward:
            parts.append(f"the first gradient that is not finite is that of {self._backward}")
        if self._parameters:
            parts.append(_names(self._parameters))
        return "; ".join(parts)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        handles = []
        for stage in self._stages:
            for name, module in stage.named_modules():
                if name and not any(True for _ in module.children()):  # leaves: the first one is the culprit
                    handles.append(module.register_forward_hook(self._forward_hook(name)))
            for name, parameter in stage.named_parameters():
                if parameter.requires_grad:
                    handles.append(parameter.register_hook(self._gradient_hook(name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _forward_hook(self, name: str) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            tensors = [item for item in (output if isinstance(output, tuple) else (output,)) if torch.is_tensor(item)]
            for tensor in tensors:
                if not self._forward and tensor.is_floating_point() and not _is_finite(tensor):
                    self._forward = name

        return hook

    def _gradient_hook(self, name: str) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            if name not in self._parameters and not _is_finite(gradient):
                self._backward = self._backward or name
                self._parameters.append(name)

        return hook


def _is_finite(tensor: Tensor) -> bool:
    # detached: where a block is computed again, the second time must keep the same tensors as the first
    return bool(torch.isfinite(tensor.detach()).all())


def _names(parameters: Sequence[str]) -> str:
    more = f" and {len(parameters) - 3} more" if len(parameters) > 3 else ""
    return f"parameters with gradients that are not finite: {', '.join(parameters[:3])}{more}"


def _gather(text: str) -> list[str]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [text]
    reports: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(reports, text)
    return reports
