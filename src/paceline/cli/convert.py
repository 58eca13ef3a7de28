"""`paceline convert`: models from and to other programs."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from paceline.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from paceline.interop.convert import Options
    from paceline.interop.sources import Opened


def convert(
    source: Annotated[
        Path,
        typer.Argument(metavar="SRC", help="A Hugging Face folder, a Paceline run or checkpoint, or Megatron-LM's."),
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The new folder; it must not exist.")],
    to: Annotated[
        str, typer.Option("--to", help="hf, paceline, megatron, or peft. Left out: hf from ours, paceline from others.")
    ] = "",
    dtype: Annotated[str, typer.Option("--dtype", help="keep, fp32, bf16 or fp16.")] = "keep",
    family: Annotated[
        str, typer.Option("--family", help="model_type of a Hugging Face folder, where several could hold the model.")
    ] = "",
    vocab_size: Annotated[
        int, typer.Option("--vocab-size", help="Keep so many rows of the vocabulary: without those that pad it.")
    ] = 0,
    like: Annotated[
        Path | None,
        typer.Option("--like", help="Of a Megatron-LM checkpoint: a Hugging Face folder or run of the same model."),
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option("--adapter", help="A PEFT LoRA adapter of SRC, to merge into the weights.")
    ] = None,
    unmerge: Annotated[
        bool, typer.Option("--unmerge", help="Take the adapter out of SRC, which it was merged into.")
    ] = False,
    shard_gb: Annotated[
        float, typer.Option("--shard-gb", min=0.001, help="Largest weight file of a Hugging Face folder, in GB.")
    ] = 5.0,
    ignore_key: Annotated[
        list[str] | None,
        typer.Option("--ignore-key", metavar="NAME", help="A key of config.json that has no effect. May be repeated."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Run both sides on the same tokens and print the largest logit difference.")
    ] = False,
    threads: Annotated[int, typer.Option("--threads", min=0, help="0 = one a core, at most 8.")] = 0,
) -> None:
    """Convert a model: `paceline convert hub-folder checkpoint`.

    What SRC is, is found out. Weights go through block by block, so memory does
    not limit the size; DST appears when it is complete. Tokenizer, chat template
    and generation settings go along.

    [bold]From the hub, into training[/bold] (or train from the folder itself, model.init_from):
      paceline convert Qwen3-0.6B qwen-start --check

    [bold]A trained run, for vLLM or Transformers[/bold]:
      paceline convert runs/my my-model --dtype bf16

    [bold]A run that trained adapters[/bold]: merged with its base, or as PEFT's adapter:
      paceline convert runs/lora my-model
      paceline convert runs/lora my-adapter --to peft

    [bold]With a PEFT adapter merged[/bold]:
      paceline convert Qwen3-0.6B my-model --to hf --adapter my-adapter

    [bold]From and to Megatron-LM[/bold] (torch_dist):
      paceline convert megatron/iter_0001000 my-model --to hf --like Qwen3-0.6B
      paceline convert my-model for-megatron --to megatron

    """
    from paceline.interop.convert import DTYPES, Options, refuse_existing, refuse_inside
    from paceline.interop.convert import convert as run
    from paceline.interop.sources import FORMATS, cut_vocabulary, open_source
    from paceline.report.console import make_console
    from paceline.report.units import size

    if to == "peft":
        from paceline.interop.peft_write import convert_adapter

        refuse_inside(target, source)
        written = convert_adapter(source, target)
        for note in written.notes:
            make_console(stderr=True).print(note, soft_wrap=True, markup=False)
        of = f"{written.num_tensors} tensors, {size(written.num_bytes)}, of {written.checkpoint}"
        typer.echo(f"{target}: an adapter of {of}")
        return
    if to and to not in FORMATS:
        raise ConfigError(f"--to {to} is unknown", next_step=f"Take {', '.join((*FORMATS, 'peft'))}.")
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype} is unknown", next_step=f"Take {', '.join(DTYPES)}.")
    refuse_existing(target)
    ignored = tuple(ignore_key or ())
    opened = open_source(source, ignore_keys=ignored, like=like)
    refuse_inside(target, source)  # of a run's whole folder, not of its checkpoint alone
    if vocab_size:
        opened = cut_vocabulary(opened, vocab_size)
    if adapter:
        from paceline.interop.peft import merge, read_adapter

        opened = merge(opened, read_adapter(adapter), take_out=unmerge)
    elif unmerge:
        raise ConfigError("--unmerge without --adapter", next_step="Say which adapter: --adapter PATH.")
    wanted = to or ("hf" if opened.format == "paceline" else "paceline")
    options = Options(
        to=cast(Any, wanted),
        model_type=family,
        dtype=cast(Any, dtype),
        shard_bytes=int(shard_gb * 1e9),
        threads=threads,
        ignore_keys=ignored,
    )
    console = make_console(stderr=True)
    for note in opened.notes:
        console.print(note, soft_wrap=True, markup=False)
    began = time.perf_counter()
    with _ends_cleanly(), _Bar(f"{opened.format} -> {wanted}") as bar:
        done = run(opened, target, options, bar)
    seconds = time.perf_counter() - began
    if done.left_out:
        text = f"Multi-token prediction is left out ({len(done.left_out)} tensors): {wanted} has no names for it here."
        console.print(text, soft_wrap=True, markup=False)
    for warning in done.warnings:
        console.print(warning, soft_wrap=True, markup=False)
    typer.echo(
        f"{target}: {done.num_tensors} tensors, {size(done.num_bytes)}, in {seconds:.1f} s "
        f"({size(done.num_bytes / seconds)}/s)"
    )
    if check:
        _check(opened, target, options)


@contextmanager
def _ends_cleanly() -> Iterator[None]:
    """SIGTERM ends a conversion as Ctrl-C does: what was begun is removed."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _check(opened: Opened, target: Path, options: Options) -> None:
    from paceline.interop.compare import compare
    from paceline.interop.convert import DTYPES
    from paceline.interop.sources import open_source

    written = open_source(target, ignore_keys=options.ignore_keys)
    found = compare(opened, written, rounded=DTYPES[options.dtype])
    typer.echo(
        f"largest logit difference: {found.largest_difference:.3g} (logits up to {found.largest_logit:.3g}; "
        f"run by {found.ran_by[0]} and {found.ran_by[1]}, fp32)"
    )
    if not found.is_close:
        raise CheckpointError(
            f"{opened.path} and {target} do not say the same",
            evidence=f"Their logits differ by up to {found.largest_difference:.3g}.",
            next_step="Do not use the converted model, and tell us of it with its config.json.",
        )


class _Bar:
    """A progress bar on standard error, in bytes; nothing where that is no terminal."""

    def __init__(self, what: str) -> None:
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.progress import TransferSpeedColumn as Speed

        from paceline.report.console import make_console

        console = make_console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), Speed(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._task = self._progress.add_task(what, total=None)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def start(self, total_bytes: int) -> None:
        self._progress.update(self._task, total=total_bytes)

    def advance(self, num_bytes: int) -> None:
        self._progress.advance(self._task, num_bytes)


command = convert
