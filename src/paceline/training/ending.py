"""What follows the last step: the evaluation of everything, samples, and the summary."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from paceline.config.plugins import Registry
from paceline.costs.layers import count_parameters
from paceline.data.build import Datasets
from paceline.observe.events import RunFolder
from paceline.runtime.device import device_name
from paceline.runtime.signals import StopRequest
from paceline.training.foreign import open_weights
from paceline.training.samples import draw_samples
from paceline.training.setup import Parts, rates
from paceline.training.summary import summarize
from paceline.training.trainer import Trainer
from paceline.training.validate import Evaluation, Evaluator, with_prefix


def finish(
    parts: Parts,
    trainer: Trainer,
    datasets: Datasets,
    folder: RunFolder,
    registry: Registry,
    *,
    reason: str,
    stop: StopRequest,
    start_up: Mapping[str, float],
) -> None:
    """Collective. ``reason``: why the run stopped before its last step, or "". ``start_up``: seconds by phase."""
    config, is_main = parts.config, parts.info.is_main
    evaluation: Evaluation | None = None
    samples: tuple[tuple[str, str], ...] = ()
    parts.engine.wait_for_weights()
    if not reason:
        evaluation = _final_evaluation(parts, trainer, datasets, folder, stop)
        if is_main and config.checkpoint.save_last:
            samples = draw_samples(
                folder.path, config, parts.device, lambda source: open_weights(Path(source), registry, config)
            )
    if is_main and folder.metrics_path.exists():
        summary = summarize(
            folder.path,
            steps=trainer.progress.step,
            total_steps=config.train.steps,
            tokens=trainer.progress.tokens,
            stopped_by=reason,
            parameters=count_parameters(config.model).total,
            world_size=parts.info.world_size,
            devices=f"{parts.info.world_size} x {device_name(parts.device)}",
            flops_per_token=rates(config, parts.device, parts.documents).flops_per_token,
            evaluation=evaluation,
            samples=samples,
            made_up_tokens=config.data.is_synthetic,
            is_score=config.model.has_score,
            is_chat=config.task.reads_turns,
            start_up=start_up,
        )
        summary.write(folder.path)


def _final_evaluation(
    parts: Parts, trainer: Trainer, datasets: Datasets, folder: RunFolder, stop: StopRequest
) -> Evaluation | None:
    """On the test split where there is one, else on all of the validation data."""
    evaluator = trainer.evaluator
    test = datasets.test
    if test is not None:
        evaluator = Evaluator(parts.config, test, staged=parts.staged, device=parts.device)
    if evaluator is None:
        return None
    evaluation = evaluator.run(None, should_stop=lambda: bool(stop))
    if parts.info.is_main and evaluation is not None:
        name = "test" if test is not None else "valid"
        folder.write_event(
            "evaluation",
            step=parts.config.train.steps,
            whole=True,
            **with_prefix(name, evaluation.values()),
        )
    return evaluation
