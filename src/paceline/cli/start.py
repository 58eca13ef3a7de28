"""From a recipe on the command line to processes: here, through torch's launcher, or as the outer launcher says."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.cli.cards import asked_card
from paceline.cli.host_check import host_findings
from paceline.config.check import check, refuse_errors
from paceline.config.load import Recipe, load_recipe
from paceline.config.run import RunConfig
from paceline.errors import ConfigError, LaunchError
from paceline.observe.events import RunFolder, read_events
from paceline.report.console import make_console, print_error, print_findings
from paceline.runtime.compile_cache import keep_compiled
from paceline.runtime.host import host_memory
from paceline.runtime.launcher import ProcessInfo, process_info


def start(
    arguments: Sequence[str],
    recipe: str,
    overrides: Sequence[str],
    nproc: int | None,
    body: Callable[[Recipe, ProcessInfo], int],
) -> int:
    """Checks the recipe, then starts ``nproc`` processes of this command or runs ``body`` in this one.

    Args:
        arguments: the command line that the started processes run, without ``--nproc``.

    Returns:
        the exit code.

    Raises:
        ConfigError: the recipe is not usable, found before any process starts.
    """
    loaded = load_recipe(recipe, overrides)
    info = process_info()
    if nproc is not None and info.launcher != "single":
        raise ConfigError(
            f"--nproc {nproc} under {info.launcher}, which has already started {info.world_size} processes",
            next_step="Leave --nproc out: the launcher's environment decides.",
        )
    keep_compiled()
    world_size = nproc or info.world_size
    asked_card(loaded.config)
    refuse_errors(check(loaded.config, loaded.registry, world_size))
    _check_host(loaded.config, world_size, info)
    if world_size > 1 and info.launcher == "single":
        from paceline.runtime.elastic import start_local

        if arguments[0] == "train":
            from paceline.training.resume import refuse_start

            refuse_start(loaded.config)
        ended = start_local(arguments, world_size, use_gpus=loaded.config.cluster.device != "cpu")
        _tell_signal(ended.code, _what_then(loaded.config) if arguments[0] == "train" else "")
        interrupted = ended.signal == signal.SIGINT and _was_stopped(loaded)
        return 128 + signal.SIGINT if interrupted and not ended.code else ended.code
    if info.launcher != "single":
        from paceline.runtime.elastic import end_with_launcher

        end_with_launcher()
    return body(loaded, info)


def _was_stopped(recipe: Recipe) -> bool:
    """Whether the run ended before its last step: a Ctrl-C at the very end interrupts nothing."""
    events = Path(recipe.config.run.folder) / "events.jsonl"
    return not events.is_file() or read_events(events)[-1]["event"] != "end"


def _check_host(config: RunConfig, world_size: int, info: ProcessInfo) -> None:
    """Refuses what this host's memory cannot hold; a warning is told once, by who was started by hand."""
    import torch  # only now: a recipe that does not fit is refused without waiting for it

    started_here = info.launcher == "single"
    findings = host_findings(
        config,
        world_size,
        world_size if started_here else info.local_world_size,
        on_cpu=config.cluster.device == "cpu" or not torch.cuda.device_count(),
        memory=host_memory(),
    )
    if started_here:
        print_findings(make_console(stderr=True), findings)


def _what_then(config: RunConfig) -> str:
    """What the same command would do after a run that was cut off."""
    from paceline.checkpoint.locate import step_folders

    steps = [step for step, _ in step_folders(RunFolder(config.run.folder).checkpoints)]
    if not steps:
        return " There is no checkpoint yet: the same command starts from the beginning (see checkpoint.interval)."
    if config.checkpoint.resume == "never":
        return f" With checkpoint.resume = 'auto' the same command goes on from step {steps[-1]}."
    return f" The same command goes on from step {steps[-1]}."


def _tell_signal(code: int, what_then: str) -> None:
    """A process that the system ended could not say anything itself."""
    number = code - 128
    if number <= 0 or number in (signal.SIGINT, signal.SIGTERM):
        return
    name = signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"
    error = LaunchError(
        f"a process of the run was ended by {name}",
        evidence="SIGKILL most often means that the host's memory was full." if number == signal.SIGKILL else "",
        next_step=f"Look at `dmesg` and at the files in the run folder's logs.{what_then}",
    )
    print_error(make_console(stderr=True), error)
