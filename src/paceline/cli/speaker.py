"""Which model speaks, with which adapter, on how many cards?

One card where the model fits on it; otherwise as many as it needs of those that are there: this command is started
again in so many processes, which share its heads (`parallel/inference.py`). Only the first of them prints.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast, get_args

import typer

from paceline.errors import ConfigError, LaunchError

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from paceline.config.model import ModelConfig
    from paceline.generate.fit import Speech
    from paceline.generate.load import Speaker, Spread
    from paceline.runtime.launcher import ProcessInfo

_DeviceKind = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the command line says of the model."""

    source: Path
    tokenizer: str = ""
    adapter: Path | None = None
    device: str = "auto"
    tp: int = 0
    """Cards; 0 = as few as it fits on."""


def speak(
    asked: Asked,
    speech: Callable[[], Speech],
    arguments: Callable[[], Sequence[str]],
    body: Callable[[Speaker, bool], None],
) -> None:
    """Loads the model and calls ``body(speaker, is_main)``: here, or in as many processes as the model needs.

    Args:
        speech: what is to be written; asked for only where there is a choice of cards.
        arguments: the command line that started processes run.

    Raises:
        ConfigError: the model fits on no number of the cards that are there, or ``--tp`` is none that its heads allow.
    """
    from paceline.runtime.process import process_info

    info = process_info()
    kind = device_kind(asked.device)
    if info.world_size > 1:
        _as_one_of_many(asked, info, kind, body)
        return
    degree = _degree(asked, kind, speech)
    if degree > 1:
        from paceline.runtime.elastic import start_local

        raise typer.Exit(start_local(arguments(), degree, use_gpus=kind != "cpu", when_interrupted="\n").code)
    from paceline.report.console import make_console
    from paceline.runtime.device import choose_device

    body(_speaker(asked, choose_device(replace(info, local_rank=0), kind), make_console(stderr=True)), True)


def _as_one_of_many(asked: Asked, info: ProcessInfo, kind: _DeviceKind, body: Callable[[Speaker, bool], None]) -> None:
    from paceline.config.parallel import ParallelConfig
    from paceline.parallel.inference import spread_to_read
    from paceline.parallel.mesh import ParallelMesh
    from paceline.report.console import make_console
    from paceline.runtime.device import choose_device
    from paceline.runtime.elastic import end_with_launcher
    from paceline.runtime.process import process_group

    if info.launcher != "single":
        end_with_launcher()
    device = choose_device(info, kind)
    _refuse_degree(_model_of(asked.source), info.world_size)
    with process_group(info, device):
        config = ParallelConfig(tp=info.world_size)
        mesh = ParallelMesh(config, world_size=info.world_size, rank=info.rank, device_type=device.type)
        console = make_console(stderr=True)
        console.quiet = not info.is_main  # what is told of checkpoints is told once
        speaker = _speaker(asked, device, console, lambda model: spread_to_read(model, mesh["tp"]))
        body(speaker, info.is_main)


def _speaker(asked: Asked, device: torch.device, console: Console, spread: Spread | None = None) -> Speaker:
    from paceline.config.hub import is_hub_folder
    from paceline.generate.load import load_speaker, stay_whole
    from paceline.report.console import print_findings

    over = spread or stay_whole
    if asked.adapter is not None or is_hub_folder(asked.source) or _has_adapters(asked.source):
        from paceline.interop.speak import load_hub_speaker

        return load_hub_speaker(
            asked.source, device=device, tokenizer=asked.tokenizer, adapter=asked.adapter, spread=over
        )
    return load_speaker(
        asked.source,
        device=device,
        tokenizer=asked.tokenizer,
        report=lambda finding: print_findings(console, [finding]),
        spread=over,
    )


def _has_adapters(source: Path) -> bool:
    """Whether it is a run whose checkpoints lack the weights that its adapters belong to."""
    from paceline.interop.sources import is_adapted

    return is_adapted(source)


def _degree(asked: Asked, kind: _DeviceKind, speech: Callable[[], Speech]) -> int:
    """On how many cards; 1 also on the CPU, unless ``--tp`` says otherwise."""
    if asked.tp == 1:
        return 1
    import torch

    cards = 0 if kind == "cpu" else torch.cuda.device_count()
    if asked.tp:
        if 0 < cards < asked.tp:
            raise LaunchError(
                f"--tp {asked.tp} needs {asked.tp} GPUs, {cards} are visible",
                next_step=f"Take --tp {cards}, leave it out, or look at CUDA_VISIBLE_DEVICES.",
            )
        _refuse_degree(_model_of(asked.source), asked.tp)
        return asked.tp
    if cards == 0:
        return 1
    from paceline.generate.fit import SAFE_SHARE, choose_degree, speaking_bytes

    model, wanted = _model_of(asked.source), speech()
    # asking a card takes some of its memory: the others are asked only where one is not enough
    if speaking_bytes(model, 1, wanted) <= SAFE_SHARE * torch.cuda.mem_get_info(0)[0]:
        return 1
    return choose_degree(model, [torch.cuda.mem_get_info(card)[0] for card in range(cards)], wanted)


def _refuse_degree(model: ModelConfig, tp: int) -> None:
    from paceline.generate.fit import legal_degrees

    legal = legal_degrees(model, max(tp, 16))
    if tp not in legal:
        raise ConfigError(
            f"the model cannot be spread over {tp} ranks",
            evidence=f"It has {model.num_heads} heads, {model.kv_heads} for keys and values; a rank needs whole ones.",
            next_step=f"Possible are --tp {', '.join(map(str, legal))}.",
        )


def _model_of(source: Path) -> ModelConfig:
    from paceline.config.hub import is_hub_folder, model_of, read_config

    if is_hub_folder(source):
        return model_of(read_config(source))
    from paceline.checkpoint.locate import find_checkpoint
    from paceline.generate.load import recipe_of

    return recipe_of(find_checkpoint(source)).model


def device_kind(text: str) -> _DeviceKind:
    """What `--device` says.

    Raises:
        ConfigError: it is no device.
    """
    for kind in get_args(_DeviceKind):
        if kind == text:
            return cast(_DeviceKind, kind)
    raise ConfigError(f"--device {text} is unknown", next_step="Take auto, cpu or cuda.")


@contextmanager
def standard_input_as_file(text: str) -> Iterator[Path]:
    """What was read from standard input, for processes that have none of their own."""
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        file = Path(folder) / "stdin.txt"
        file.write_text(text, encoding="utf-8")
        yield file
