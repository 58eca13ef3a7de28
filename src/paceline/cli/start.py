"""From a recipe on the command line to processes: here, through torch's launcher, or as the outer launcher says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.config.check import check, refuse_errors
from paceline.config.load import Recipe, load_recipe
from paceline.errors import ConfigError
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
    world_size = nproc or info.world_size
    refuse_errors(check(loaded.config, loaded.registry, world_size))
    if world_size > 1 and info.launcher == "single":
        from paceline.runtime.elastic import start_local

        return start_local(arguments, world_size, use_gpus=loaded.config.cluster.device != "cpu")
    return body(loaded, info)
