"""What does the model say at the end of its training?"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import psutil
import torch

from paceline.checkpoint.adapters import OpenBase
from paceline.config.run import RunConfig
from paceline.costs.layers import count_parameters
from paceline.data.build import TokenizerInfo
from paceline.errors import CheckpointError, ConfigError, DataError
from paceline.generate.decode import DecodeParams, generate_text
from paceline.generate.load import load_speaker
from paceline.generate.sample import SamplingParams
from paceline.report.units import gib

log = logging.getLogger(__name__)


def keep_tokenizer(folder: Path, info: TokenizerInfo) -> None:
    """Copies the tokenizer's file into the run folder, so that the run can speak wherever it is moved."""
    source = Path(info.name)
    if not info.name or not source.is_file():
        return
    target = folder / "tokenizer" / source.name
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f"{target.name}.part")
    shutil.copyfile(source, beside)
    beside.replace(target)


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
    except (CheckpointError, ConfigError, DataError) as error:
        log.warning("no samples: %s", error.subject)
        return ()
    params = DecodeParams(
        max_tokens=observe.sample_tokens,
        sampling=SamplingParams(temperature=observe.sample_temperature),
        seed=config.run.seed,
        stop_id=speaker.tokenizer.eod_id,
        vocab_size=speaker.tokenizer.vocab_size,
    )
    found = generate_text(speaker.model, speaker.tokenizer, observe.sample_prompts, params)
    return tuple((completion.prompt, completion.text) for completion in found)
