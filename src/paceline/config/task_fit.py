"""Does what is to be learned fit the model and the data? Asked before anything starts."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.config.asked import error
from paceline.config.run import RunConfig
from paceline.report.finding import Finding


def task_errors(config: RunConfig) -> Iterator[Finding]:
    """What no layout mends."""
    yield from _score(config)
    yield from _samples(config)
    yield from _reference(config)
    yield from _precomputed(config)
    yield from _data(config)
    if config.task.learns_from_answers and config.model.mtp_layers:
        yield error(
            "config.task-mtp",
            f"task.kind = {config.task.kind!r} does not go with model.mtp_layers = {config.model.mtp_layers}",
            "Its loss is over whole answers; multi-token prediction has one of its own for each token.",
            "Set model.mtp_layers = 0: weights of these layers in model.init_from are then left out.",
        )


def _score(config: RunConfig) -> Iterator[Finding]:
    kind, model = config.task.kind, config.model
    if kind == "reward" and not model.has_score:
        yield error(
            "config.task-score",
            "task.kind = 'reward' needs a model that ends in a score",
            f"model.head = {model.head!r} gives a number for each word of the vocabulary, not one for the text.",
            "Set model.head = 'score'. From model.init_from all else is taken, and the score starts at random.",
        )
    if kind != "reward" and model.has_score:
        yield error(
            "config.task-score",
            f"task.kind = {kind!r} needs a model with a vocabulary for its head, and model.head = 'score'",
            "A score is no probability of tokens.",
            "Set task.kind = 'reward', or leave model.head out.",
        )


def _samples(config: RunConfig) -> Iterator[Finding]:
    if config.model.has_score and config.observe.sample_prompts:
        yield error(
            "config.task-score",
            "observe.sample_prompts has texts to go on from, and a reward model says nothing",
            "model.head = 'score': there is no head for a vocabulary.",
            "Leave observe.sample_prompts out.",
        )


def _reference(config: RunConfig) -> Iterator[Finding]:
    task = config.task
    if task.kind == "kto" and task.reference == "none":
        yield error(
            "config.task-reference",
            "task.kind = 'kto' needs a reference model, and task.reference = 'none'",
            "Its baseline is the divergence of the policy from the reference.",
            "Leave task.reference out: it is then a copy of the weights that the run begins with.",
        )


def _precomputed(config: RunConfig) -> Iterator[Finding]:
    task = config.task
    if not (task.reads_reference and task.precompute_reference) or task.reference == "initial":
        return
    if config.lora.on or not config.model.init_from:
        yield error(
            "config.task-reference",
            f"task.precompute_reference does not go with task.reference = {task.reference!r} "
            + ("and adapters" if config.lora.on else "and weights drawn at random"),
            "While log-probabilities are computed the model has the reference's weights; those that the run begins "
            "with must be there to be read again.",
            "Set task.precompute_reference = false"
            + (", or task.reference = 'initial'." if config.lora.on else ", or give model.init_from."),
        )


def _data(config: RunConfig) -> Iterator[Finding]:
    if config.task.learns_from_answers and config.data.is_synthetic:
        yield error(
            "config.task-data",
            f"task.kind = {config.task.kind!r} cannot learn from data.train = 'synthetic'",
            "Made-up tokens are no answers.",
            "Set data.train to a file or folder with "
            + ("judged answers." if config.task.kind == "kto" else "pairs of answers."),
        )
