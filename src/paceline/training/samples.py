"""What does the model say at the end of its training?"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

from paceline.checkpoint.adapters import OpenBase
from paceline.config.run import RunConfig
from paceline.costs.layers import count_parameters
from paceline.data.build import TokenizerInfo
from paceline.data.chat_template import ChatTemplate, template_source
from paceline.data.kept_tokenizer import keep, template_of_run
from paceline.data.tokenizer import Tokenizer
from paceline.errors import CheckpointError, ConfigError, DataError
from paceline.generate.chat import answer_ends, asked, prompt_ids, template_in
from paceline.generate.decode import Completion, DecodeParams, complete, encode_prompt
from paceline.generate.load import Speaker, load_speaker
from paceline.generate.sample import SamplingParams
from paceline.report.units import gib

log = logging.getLogger(__name__)


def keep_tokenizer(folder: Path, info: TokenizerInfo, config: RunConfig) -> None:
    """Copies the tokenizer and its chat template, or the one of the recipe, into the run folder, so that the run can
    speak, and another begin from it, wherever it is moved.

    Raises:
        DataError: the disk does not allow it.
    """
    origin = config.data.tokenizer or config.model.init_from
    named = config.data.template or template_of_run(Path(origin))
    keep(folder, info.name, template_source(named) if named else "")


def draw_samples(
    folder: Path, config: RunConfig, device: torch.device, open_base: OpenBase | None = None
) -> tuple[tuple[str, str], ...]:
    """(prompt, continuation) for each of `observe.sample_prompts`, from the run's newest checkpoint; for rank 0.

    Reads the checkpoint into a plain model beside the trained one, so it also shows that the checkpoint is good. Where
    there is no room for that, or no tokenizer is known, there are no samples and the log says why.
    """
    observe = config.observe
    if not observe.sample_prompts:
        return ()
    needed = count_parameters(config.model).total * (2 if device.type == "cuda" else 4)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    if needed > 0.8 * free:
        log.warning("no samples: the model needs %s beside the trained one, %s are free", gib(needed), gib(free))
        return ()
    try:
        speaker = load_speaker(folder, device=device, open_base=open_base)
        found = _completions(speaker, config)
    except (CheckpointError, ConfigError, DataError) as error:
        log.warning("no samples: %s", error.subject)
        return ()
    return tuple((completion.prompt, completion.text) for completion in found)


def _completions(speaker: Speaker, config: RunConfig) -> list[Completion]:
    assert speaker.checkpoint is not None, "of this run"
    folder = speaker.checkpoint.folder
    ids, params = ask((folder.parent.parent, folder), config, speaker.tokenizer)
    return complete(speaker.model, speaker.tokenizer, config.observe.sample_prompts, ids, params)


def ask(folders: Sequence[Path], config: RunConfig, tokenizer: Tokenizer) -> tuple[list[list[int]], DecodeParams]:
    """The ids of each prompt, and how to go on.

    Prompts go on as text; where a run has learned from turns, they are turns of a user in its chat template.

    Args:
        folders: of the run, and of its checkpoint if it is one that is asked.

    Raises:
        DataError: the template has no place for a prompt.
    """
    observe = config.observe
    ends: tuple[int, ...] = (tokenizer.eod_id,)
    template = _template(folders, config, tokenizer) if config.task.reads_turns else None
    if template is None:
        ids = [encode_prompt(tokenizer, prompt) for prompt in observe.sample_prompts]
    else:
        ids = [prompt_ids(template, tokenizer, question) for question in asked(observe.sample_prompts)]
        ends = answer_ends(template, tokenizer, ends)
    params = DecodeParams(
        max_tokens=observe.sample_tokens,
        sampling=SamplingParams(temperature=observe.sample_temperature),
        seed=config.run.seed,
        stop_ids=ends,
        vocab_size=tokenizer.vocab_size,
    )
    return ids, params


def _template(folders: Sequence[Path], config: RunConfig, tokenizer: Tokenizer) -> ChatTemplate | None:
    """None where rows were tokens or text already: nothing of the run has turns."""
    try:
        return template_in(folders, config.data.template, tokenizer)
    except DataError:
        return None
