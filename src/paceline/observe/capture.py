"""A deep look at a few steps: the PyTorch profiler on chosen ranks, with the names of modules and phases in the trace.

Which steps, the recipe says (`observe.capture_at`), or a request that is left in the run folder while the run is at
work. All ranks count steps alike, so their captures are of the same ones. Costs nothing but a look at the folder in
other steps.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from paceline.observe.capture_request import CaptureRequest, read_request, trace_path
from paceline.observe.hooks import Hook, RunEnd, RunStart, StepEnd, StepStart

log = logging.getLogger(__name__)

MODULE, PHASE = "module: ", "phase: "
"""What names of spans begin with."""
_LOOK_SECONDS = 2.0


def owned_by(name: str) -> record_function:
    """Around work that belongs to no module of the model: it is ``name``'s in a capture. Without one it costs about a
    microsecond."""
    return record_function(f"{MODULE}{name}")


class Capture(Hook):
    """Comes after the recorder, whose marks become spans.

    Args:
        modules: by name, of this rank's stages.
        listen: is given who is to be told of phases; None stops that.
        requests: what the recipe asks for.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        device: torch.device,
        *,
        listen: Callable[[Callable[[str], None] | None], None],
        requests: Sequence[CaptureRequest] = (),
    ) -> None:
        self._modules, self._device, self._listen = dict(modules), device, listen
        self._requests = list(requests)
        self._folder: Path | None = None
        self._rank = 0
        self._looked = 0.0
        self._seen: CaptureRequest | None = None
        self._profiler: Any = None
        self._until = 0
        self._first = 0
        self._spans = _Spans()

    def on_start(self, start: RunStart) -> None:
        self._folder, self._rank = start.run_dir, start.rank
        # one that is left of an earlier start is of steps that are over
        self._seen = read_request(start.run_dir)

    def on_step_start(self, start: StepStart) -> None:
        if self._profiler is not None:
            return
        self._look()
        for request in self._requests:
            if request.at <= start.step < request.at + request.steps and request.wants(self._rank):
                if not self._begin(start.step, request.at + request.steps - 1):
                    self._requests.remove(request)  # else it would be tried, and told, at each of its steps
                break

    def on_step_end(self, end: StepEnd) -> None:
        if self._profiler is not None and end.step >= self._until:
            self._finish()

    def on_end(self, end: RunEnd) -> None:
        if self._profiler is not None:
            self._finish()

    def _look(self) -> None:
        now = time.monotonic()
        if self._folder is None or now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        found = read_request(self._folder)
        if found is not None and found != self._seen:
            self._seen = found
            self._requests.append(found)

    def _begin(self, step: int, last: int) -> bool:
        """False where the profiler does not start: another one is at work in this process, or the driver refuses."""
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        profiler = profile(activities=activities, record_shapes=True)
        try:
            profiler.start()
        except (RuntimeError, AssertionError) as error:
            log.warning("the capture of steps %d to %d does not begin: %s", step, last, error)
            return False
        log.info("capturing steps %d to %d", step, last)
        self._first, self._until, self._profiler = step, last, profiler
        self._spans.open(self._modules)
        self._listen(self._spans.phase)
        return True

    def _finish(self) -> None:
        """The trace is there whole or not at all. Whatever fails costs the capture, never the run: an error of the GPU
        comes again with the next work that it is given."""
        assert self._folder is not None
        self._listen(None)
        self._spans.close()
        profiler, self._profiler = self._profiler, None
        path = trace_path(self._folder, self._rank, self._first)
        partial = path.with_name(f"partial-{path.name}")  # an ending that the profiler zips, no name of a trace
        try:
            try:
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
            finally:
                profiler.stop()  # a profiler that goes on would refuse the next one
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(partial))
            partial.replace(path)
        except (OSError, RuntimeError, AssertionError) as error:
            log.warning("the capture of steps %d to %d is lost: %s", self._first, self._until, error)
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            return
        log.info("captured steps %d to %d: %s", self._first, self._until, path)


class _Spans:
    """Named spans around modules' forwards and around phases."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._open: list[record_function] = []
        self._phase: record_function | None = None

    def open(self, modules: Mapping[str, nn.Module]) -> None:
        for name, module in modules.items():
            self._handles.append(module.register_forward_pre_hook(self._enter(f"{MODULE}{name}"), prepend=True))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def _enter(self, name: str) -> Callable[[nn.Module, Any], None]:
        def enter(module: nn.Module, arguments: Any) -> None:
            span = record_function(name)
            span.__enter__()
            self._open.append(span)

        return enter

    def _leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)

    def phase(self, name: str) -> None:
        """A phase begins, the one before ends."""
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
        self._phase = record_function(f"{PHASE}{name}")
        self._phase.__enter__()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        while self._open:
            self._open.pop().__exit__(None, None, None)
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
            self._phase = None
