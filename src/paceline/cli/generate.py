"""`paceline generate`: let a trained model write."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast, get_args

import typer

from paceline.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from paceline.generate.decode import DecodeParams
    from paceline.generate.load import Speaker

_DeviceKind = Literal["auto", "cpu", "cuda"]


def generate(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_OR_MODEL",
            help="A run folder (its newest whole checkpoint), one checkpoint, or a Hugging Face folder.",
        ),
    ],
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="Text to go on from; may be repeated. None: a new document."),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option("--prompt-file", help="A file with one prompt in it, read as it is; - reads standard input."),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="New tokens at most.")] = 128,
    temperature: Annotated[
        float, typer.Option("--temperature", "-t", help="0 = always the most likely token; 1 = as the model says.")
    ] = 0.8,
    top_k: Annotated[int, typer.Option("--top-k", help="Draw from the k most likely tokens; 0 = all.")] = 0,
    top_p: Annotated[
        float, typer.Option("--top-p", help="Draw from the most likely tokens that reach this probability; 1 = all.")
    ] = 0.95,
    min_p: Annotated[
        float, typer.Option("--min-p", help="Leave out tokens less likely than this share of the best; 0 = none.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option("--repetition-penalty", help="Above 1: tokens already in the text become less likely.")
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="The same seed gives the same text.")] = 0,
    num_samples: Annotated[int, typer.Option("--num-samples", min=1, help="Texts for each prompt.")] = 1,
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", help="Another tokenizer than the one that the run used.")
    ] = "",
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON line a text: prompt, text, token_ids, finish_reason, step.")
    ] = False,
) -> None:
    """Let a trained model write: `paceline generate runs/demo --prompt "Once"`.

    Recipe, weights and tokenizer are found in the run folder; the newest
    checkpoint that is whole is used, damaged ones are named on standard error.
    One text is shown as it is written; it ends at the end-of-document token or
    after --max-tokens.

    [bold]Greedy, for a test that must not change[/bold]:
      paceline generate runs/demo --prompt "def main" --temperature 0

    [bold]Three different texts, as JSON lines[/bold]:
      paceline generate runs/demo --prompt "The" --num-samples 3 --seed 7 --json

    [bold]An earlier checkpoint, and a prompt from a file[/bold]:
      paceline generate runs/demo/checkpoints/step_00000500 \\
        --prompt-file start.txt --max-tokens 400
    """
    prompts = _prompts(prompt, prompt_file)
    kind = device_kind(device)

    from paceline.generate.decode import DecodeParams
    from paceline.generate.sample import SamplingParams
    from paceline.report.console import make_console
    from paceline.runtime.device import choose_device
    from paceline.runtime.process import ProcessInfo

    sampling = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
    )
    console = make_console(stderr=True)
    speaker = speaker_of(source, choose_device(ProcessInfo(), kind), tokenizer, console)
    params = DecodeParams(
        max_tokens=max_tokens,
        sampling=sampling,
        seed=seed,
        stop_id=speaker.tokenizer.eod_id,
        vocab_size=speaker.tokenizer.vocab_size,
    )
    repeated = [text for text in prompts for _ in range(num_samples)]
    if len(repeated) == 1 and not as_json:
        _stream(speaker, repeated[0], params)
    else:
        _print_all(speaker, repeated, params, as_json)


def speaker_of(source: Path, device: torch.device, tokenizer: str, console: Console) -> Speaker:
    """The model of a run, a checkpoint or a Hugging Face folder, with its tokenizer."""
    from paceline.config.hub import is_hub_folder
    from paceline.generate.load import load_speaker
    from paceline.report.console import print_findings

    if is_hub_folder(source):
        from paceline.interop.speak import load_hub_speaker

        return load_hub_speaker(source, device=device, tokenizer=tokenizer)
    return load_speaker(
        source, device=device, tokenizer=tokenizer, report=lambda finding: print_findings(console, [finding])
    )


def device_kind(text: str) -> _DeviceKind:
    """What `--device` says.

    Raises:
        ConfigError: it is no device.
    """
    for kind in get_args(_DeviceKind):
        if kind == text:
            return cast(_DeviceKind, kind)
    raise ConfigError(f"--device {text} is unknown", next_step="Take auto, cpu or cuda.")


def _prompts(prompt: list[str] | None, prompt_file: Path | None) -> list[str]:
    if prompt_file is None:
        return prompt or [""]
    if prompt:
        raise ConfigError("--prompt and --prompt-file are both given", next_step="Leave one out.")
    try:
        return [sys.stdin.read() if str(prompt_file) == "-" else prompt_file.read_text(encoding="utf-8")]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the prompt file {prompt_file} cannot be read", evidence=str(error), next_step="Give a UTF-8 text file."
        ) from error


def _stream(speaker: Speaker, prompt: str, params: DecodeParams) -> None:
    from paceline.generate.decode import encode_prompt, generate_ids, stream_text

    ids = encode_prompt(speaker.tokenizer, prompt)
    steps = generate_ids(speaker.model, [ids], params)
    typer.echo(prompt, nl=False)
    for text in stream_text(speaker.tokenizer, ids, (token for [token] in steps if token is not None)):
        typer.echo(text, nl=False)
        sys.stdout.flush()
    typer.echo()


def _print_all(speaker: Speaker, prompts: list[str], params: DecodeParams, as_json: bool) -> None:
    from dataclasses import asdict

    from paceline.generate.decode import generate_text

    for number, completion in enumerate(generate_text(speaker.model, speaker.tokenizer, prompts, params), start=1):
        if as_json:
            line = {**asdict(completion), "step": speaker.step}
            typer.echo(json.dumps(line, ensure_ascii=False))
            continue
        typer.echo(f"--- {number} of {len(prompts)} ---")
        typer.echo(completion.prompt + completion.text)


command = generate
