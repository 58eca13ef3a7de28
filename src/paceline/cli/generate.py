"""`paceline generate`: let a trained model write."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.speaker import Asked, speak, standard_input_as_file
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.generate.decode import DecodeParams
    from paceline.generate.load import Speaker


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
    adapter: Annotated[
        Path | None, typer.Option("--adapter", help="A PEFT LoRA adapter of the model, merged while it is read.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    tp: Annotated[int, typer.Option("--tp", min=0, help="Cards that share the model; 0 = as few as it fits on.")] = 0,
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
    from paceline.generate.fit import Speech
    from paceline.generate.sample import SamplingParams

    sampling = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
    )
    prompts = [text for text in _prompts(prompt, prompt_file) for _ in range(num_samples)]
    asked = Asked(source=source, tokenizer=tokenizer, adapter=adapter, device=device, tp=tp)

    def speech() -> Speech:
        # a token is at least a byte
        longest = max(len(text.encode()) for text in prompts)
        return Speech(batch_size=len(prompts), tokens=longest + 1 + max_tokens)

    def body(speaker: Speaker, is_main: bool) -> None:
        from paceline.generate.decode import DecodeParams

        params = DecodeParams(
            max_tokens=max_tokens,
            sampling=sampling,
            seed=seed,
            stop_ids=speaker.stop_ids,
            vocab_size=speaker.tokenizer.vocab_size,
        )
        if len(prompts) == 1 and not as_json:
            _stream(speaker, prompts[0], params, is_main)
        else:
            _print_all(speaker, prompts, params, as_json, is_main)

    with ExitStack() as kept:

        def arguments() -> list[str]:
            given = sys.argv[1:]
            if str(prompt_file) != "-":
                return given
            file = kept.enter_context(standard_input_as_file(prompts[0]))
            return [*given, "--prompt-file", str(file)]  # the last one counts

        speak(asked, speech, arguments, body)


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


def _stream(speaker: Speaker, prompt: str, params: DecodeParams, is_main: bool) -> None:
    from paceline.generate.decode import encode_prompt, generate_ids, stream_text

    ids = encode_prompt(speaker.tokenizer, prompt)
    steps = generate_ids(speaker.model, [ids], params)
    show = typer.echo if is_main else _say_nothing
    show(prompt, nl=False)
    for text in stream_text(speaker.tokenizer, ids, (token for [token] in steps if token is not None)):
        show(text, nl=False)
        sys.stdout.flush()
    show()


def _print_all(speaker: Speaker, prompts: list[str], params: DecodeParams, as_json: bool, is_main: bool) -> None:
    from dataclasses import asdict

    from paceline.generate.decode import generate_text

    show = typer.echo if is_main else _say_nothing
    for number, completion in enumerate(generate_text(speaker.model, speaker.tokenizer, prompts, params), start=1):
        if as_json:
            line = {**asdict(completion), "step": speaker.step}
            show(json.dumps(line, ensure_ascii=False))
            continue
        show(f"--- {number} of {len(prompts)} ---")
        show(completion.prompt + completion.text)


def _say_nothing(*_: object, **__: object) -> None:
    """What a process prints that only helps another."""


command = generate
