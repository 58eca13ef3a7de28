"""`paceline eval`: how well does a model predict a text, or solve tasks?"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.speaker import Asked, speak
from paceline.errors import ConfigError, DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from rich.console import Console

    from paceline.generate.fit import Speech
    from paceline.generate.load import Speaker


def evaluate(
    source: Annotated[
        Path,
        typer.Argument(metavar="RUN_OR_MODEL", help="A run folder, one checkpoint, or a Hugging Face folder."),
    ],
    data: Annotated[
        str,
        typer.Argument(metavar="[DATA]", help="A dataset (its prefix, as in data.train), or a .txt file."),
    ] = "",
    tasks: Annotated[
        str,
        typer.Option("--tasks", help="Tasks of lm-evaluation-harness in place of DATA: hellaswag,arc_easy."),
    ] = "",
    num_fewshot: Annotated[
        int | None, typer.Option("--num-fewshot", min=0, help="Solved examples before each question of a task.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Questions of each task, for a try; 0 = all.")] = 0,
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask tasks as turns of a user, by the model's chat template.")
    ] = False,
    include_path: Annotated[
        Path | None, typer.Option("--include-path", help="A folder with tasks of your own (YAML).")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", help="Write all results of tasks there, as JSON.")] = None,
    seq_len: Annotated[
        int, typer.Option("--seq-len", min=0, help="Tokens of a window; 0 = as in training, or at most 2048.")
    ] = 0,
    micro_batch_size: Annotated[
        int, typer.Option("--micro-batch-size", min=1, help="Windows, or questions, at a time.")
    ] = 4,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=0, help="Stop after so many; 0 = all.")] = 0,
    tokenizer: Annotated[str, typer.Option("--tokenizer", help="Another one than the model's, for a text file.")] = "",
    adapter: Annotated[Path | None, typer.Option("--adapter", help="A PEFT LoRA adapter of the model.")] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    tp: Annotated[int, typer.Option("--tp", min=0, help="Cards that share the model; 0 = as few as it fits on.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line.")] = False,
) -> None:
    r"""How well a model predicts a text, or solves tasks: `paceline eval runs/demo data/mine-valid`.

    Loss in nats a token, perplexity, and bits per byte where the length of the
    text is known. The text is read as one stream in windows of --seq-len; every
    token but the first is predicted once. In bf16 on GPUs, on as many as the
    model needs.

      paceline eval runs/demo data/mine-valid
      paceline eval Qwen3-0.6B book.txt --seq-len 4096 --json

    With --tasks: lm-evaluation-harness asks the model (in the clone,
    pip install -c constraints.txt -e '.\[eval]'), through its own interface.

      paceline eval Qwen3-0.6B --tasks hellaswag,arc_easy --num-fewshot 5
    """
    if bool(data) == bool(tasks):
        what = "DATA and --tasks are both given" if data else "there is nothing to evaluate on"
        raise ConfigError(what, next_step="Give a dataset or a text file, or --tasks hellaswag.")
    asked = Asked(source=source, tokenizer=tokenizer, adapter=adapter, device=device, tp=tp)

    def speech() -> Speech:
        from paceline.generate.fit import Speech

        # windows are read as prompts are, all of their tokens at once; the loss takes no logits of all of them
        return Speech(batch_size=micro_batch_size, tokens=seq_len or 2048)

    if data:
        _refuse_rows(data)
    if tasks:
        from paceline.cli.evaluate_tasks import Wanted, ask, refuse_missing

        wanted = Wanted(
            tasks=tuple(name.strip() for name in tasks.split(",") if name.strip()),
            num_fewshot=num_fewshot,
            limit=limit,
            chat=chat,
            include_path=include_path,
            output=output,
            batch_size=micro_batch_size,
            as_json=as_json,
        )
        refuse_missing(wanted)
        speak(asked, speech, lambda: sys.argv[1:], lambda speaker, is_main: ask(speaker, wanted, is_main))
        return

    def body(speaker: Speaker, is_main: bool) -> None:
        _perplexity(speaker, data, seq_len, micro_batch_size, max_tokens, as_json, is_main)

    speak(asked, speech, lambda: sys.argv[1:], body)


def _refuse_rows(data: str) -> None:
    from paceline.config.data import names_rows

    if names_rows(data) and not data.endswith(".txt"):
        raise DataError(
            f"{data} holds rows, not one text",
            evidence="Which of their tokens count, and in which template, is said by a recipe: its task, data.mask and "
            "data.template.",
            next_step=f"Score them in the run: data.valid = {data!r}, and train.eval_interval, or data.test, once at "
            "the end.",
        )


def _perplexity(
    speaker: Speaker, data: str, seq_len: int, micro_batch_size: int, max_tokens: int, as_json: bool, is_main: bool
) -> None:
    from paceline.generate.perplexity import score
    from paceline.report.console import make_console

    console = make_console(stderr=True)
    console.quiet = not is_main
    parts, bytes_per_token = _text(data, speaker) if data.endswith(".txt") else _dataset(data, speaker, console)
    length = seq_len or _usual_length(speaker)
    if length > speaker.config.model.max_seq_len:
        raise ConfigError(
            f"--seq-len {length} is longer than the model's {speaker.config.model.max_seq_len} positions",
            next_step="Give a shorter one.",
        )
    with _Count(console) as count:
        found = score(
            speaker.model,
            parts,
            seq_len=length,
            micro_batch_size=micro_batch_size,
            max_tokens=max_tokens,
            advance=count.advance,
        )
    if not is_main:
        return
    bits = found.bits_per_byte(bytes_per_token) if bytes_per_token else None
    if as_json:
        record = {"loss": found.loss, "perplexity": found.perplexity, "bits_per_byte": bits}
        typer.echo(json.dumps(record | {"tokens": found.num_tokens, "seq_len": length, "step": speaker.step}))
        return
    more = "" if bits is None else f", {bits:.4f} bits a byte"
    typer.echo(
        f"loss {found.loss:.4f}, perplexity {found.perplexity:.3f}{more}: "
        f"{found.num_tokens:,} tokens in windows of {length}"
    )


def _usual_length(speaker: Speaker) -> int:
    longest = speaker.config.model.max_seq_len
    return min(longest, 2048 if speaker.checkpoint is None else speaker.config.train.seq_len)


def _dataset(prefix: str, speaker: Speaker, console: Console) -> tuple[Iterator[NDArray], float]:
    """Its tokens, and bytes of text a token (0 where they are not known)."""
    from paceline.data.indexed import IndexedDataset
    from paceline.data.sidecar import read_sidecar

    dataset, sidecar = IndexedDataset(prefix), read_sidecar(prefix)
    parts = (tokens for _, tokens in dataset.blocks())
    if sidecar is None:
        return parts, 0.0
    if sidecar.tokenizer_fingerprint != speaker.tokenizer.fingerprint:
        text = f"{prefix} was made with another tokenizer file ({sidecar.tokenizer}) than the model's: do ids agree?"
        console.print(text, soft_wrap=True, markup=False)
    return parts, sidecar.bytes_per_token


def _text(path: str, speaker: Speaker) -> tuple[Iterator[NDArray], float]:
    import numpy as np

    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} cannot be read as text", evidence=str(error), next_step="Give a UTF-8 text file."
        ) from error
    begins = speaker.begins or (speaker.tokenizer.eod_id,)
    tokens = np.array([*begins, *speaker.tokenizer.encode(text)], dtype=np.int64)
    return iter([tokens]), len(text.encode()) / max(1, len(tokens) - 1)


class _Count:
    """Tokens so far, on standard error; nothing where that is no terminal."""

    def __init__(self, console: Console) -> None:
        from rich.progress import Progress, SpinnerColumn, TextColumn

        columns = (SpinnerColumn(), TextColumn("{task.completed:,} tokens"))
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> _Count:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, num_tokens: int) -> None:
        self._progress.advance(self._task, num_tokens)


command = evaluate
