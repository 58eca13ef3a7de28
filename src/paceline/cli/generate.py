"""`paceline generate`: let a trained model write."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.speaker import Asked, speak, standard_input_as_file
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.generate.chat import Question
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
    chat: Annotated[
        bool, typer.Option("--chat", help="Prompts are turns of a user: put them into the model's chat template.")
    ] = False,
    messages: Annotated[
        Path | None,
        typer.Option(
            "--messages", help="Conversations to answer: .jsonl of {messages, tools}, or a .json list of turns."
        ),
    ] = None,
    system: Annotated[str, typer.Option("--system", help="System prompt of --chat and --messages.")] = "",
    template: Annotated[
        str, typer.Option("--template", help="Another chat template than the model's: a name or a Jinja file.")
    ] = "",
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

    [bold]A chat model[/bold], asked once, or as a file says; with a LoRA adapter:
      paceline generate Qwen3-0.6B --chat --prompt "Who are you?"
      paceline generate Qwen3-0.6B --messages questions.jsonl --json \\
        --adapter runs/my/adapter

    [bold]An earlier checkpoint, and a prompt from a file[/bold]:
      paceline generate runs/demo/checkpoints/step_00000500 \\
        --prompt-file start.txt --max-tokens 400
    """
    from paceline.generate.fit import Speech
    from paceline.generate.sample import SamplingParams

    sampling = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
    )
    wanted = _wanted(_prompts(prompt, prompt_file), chat, messages, system, template, num_samples)
    asked = Asked(source=source, tokenizer=tokenizer, adapter=adapter, device=device, tp=tp)

    def speech() -> Speech:
        # a token is at least a byte
        return Speech(batch_size=len(wanted), tokens=max(one.num_bytes for one in wanted) + 1 + max_tokens)

    def body(speaker: Speaker, is_main: bool) -> None:
        from paceline.generate.decode import DecodeParams

        ids, stop_ids = _encode(wanted, speaker, template)
        params = DecodeParams(
            max_tokens=max_tokens,
            sampling=sampling,
            seed=seed,
            stop_ids=stop_ids,
            vocab_size=speaker.tokenizer.vocab_size,
        )
        if len(wanted) == 1 and not as_json:
            _stream(speaker, wanted[0], ids[0], params, is_main)
        else:
            _print_all(speaker, wanted, ids, params, as_json, is_main)

    with ExitStack() as kept:

        def arguments() -> list[str]:
            given = sys.argv[1:]
            if str(prompt_file) != "-":
                return given
            file = kept.enter_context(standard_input_as_file(wanted[0].prompt))
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


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """One text to write: what goes on from a prompt, or what answers turns."""

    prompt: str = ""
    question: Question | None = None

    @property
    def num_bytes(self) -> int:
        turns = () if self.question is None else self.question.messages
        # what a template puts around a turn, and tools, are more; they are small
        return len(self.prompt.encode()) + sum(len(turn.content.encode()) + 64 for turn in turns)


def _wanted(
    prompts: list[str], chat: bool, messages: Path | None, system: str, template: str, num_samples: int
) -> list[_Wanted]:
    if not chat and messages is None:
        if system or template:
            option = "--system" if system else "--template"
            raise ConfigError(f"{option} without --chat or --messages", next_step="Add --chat, or leave it out.")
        return [_Wanted(prompt=text) for text in prompts for _ in range(num_samples)]
    from paceline.generate.chat import asked, read_questions

    if messages is not None and any(prompts):
        raise ConfigError("--messages and a prompt are both given", next_step="Leave one out.")
    if messages is None and not any(prompts):
        raise ConfigError("--chat without a prompt", next_step='Say what to ask: --prompt "Who are you?"')
    questions = asked(prompts, system) if messages is None else read_questions(messages, system)
    return [
        _Wanted(prompt=question.messages[-1].content, question=question)
        for question in questions
        for _ in range(num_samples)
    ]


def _encode(wanted: Sequence[_Wanted], speaker: Speaker, template_name: str) -> tuple[list[list[int]], tuple[int, ...]]:
    """Ids of each prompt, and the tokens that end a text."""
    from paceline.generate.decode import encode_prompt

    if wanted[0].question is None:
        return [encode_prompt(speaker.tokenizer, one.prompt, speaker.begins) for one in wanted], speaker.stop_ids
    from paceline.generate.chat import answer_ends, prompt_ids, template_of

    template = template_of(speaker, template_name)
    ids = [prompt_ids(template, speaker.tokenizer, one.question) for one in wanted if one.question is not None]
    return ids, answer_ends(template, speaker.tokenizer, speaker.stop_ids)


def _stream(speaker: Speaker, wanted: _Wanted, ids: list[int], params: DecodeParams, is_main: bool) -> None:
    from paceline.generate.decode import generate_ids, stream_text

    steps = generate_ids(speaker.model, [ids], params)
    show = typer.echo if is_main else _say_nothing
    if wanted.question is None:
        show(wanted.prompt, nl=False)
    for text in stream_text(speaker.tokenizer, ids, (token for [token] in steps if token is not None)):
        show(text, nl=False)
        sys.stdout.flush()
    show()


def _print_all(
    speaker: Speaker,
    wanted: Sequence[_Wanted],
    ids: list[list[int]],
    params: DecodeParams,
    as_json: bool,
    is_main: bool,
) -> None:
    from dataclasses import asdict

    from paceline.generate.decode import complete

    show = typer.echo if is_main else _say_nothing
    done = complete(speaker.model, speaker.tokenizer, [one.prompt for one in wanted], ids, params)
    for number, (one, completion) in enumerate(zip(wanted, done, strict=True), start=1):
        if as_json:
            line = {**asdict(completion), "step": speaker.step}
            if one.question is not None:
                line = {"messages": one.question.as_dicts(), **line}
            show(json.dumps(line, ensure_ascii=False))
            continue
        show(f"--- {number} of {len(wanted)} ---")
        show(completion.prompt + completion.text if one.question is None else completion.text)


def _say_nothing(*_: object, **__: object) -> None:
    """What a process prints that only helps another."""


command = generate
