"""A step that is not logged never waits for the GPU: not in the loop, the metrics, the optimizer or the data feed."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paceline.checkpoint.manager import CheckpointManager
from paceline.checkpoint.ranks import Ranks
from paceline.config.load import resolve
from paceline.observe.hooks import Hook, Hooks, RunEnd, RunStart, StepEnd, StepStart
from paceline.observe.telemetry.record import read_rank
from paceline.runtime.process import ProcessInfo
from paceline.runtime.signals import StopRequest
from paceline.training.feed import Feed, open_datasets
from paceline.training.recording import build_recorder
from paceline.training.setup import build_meter, build_parts
from paceline.training.trainer import Progress, Trainer
from tests.training import runs

LOG_INTERVAL = 5
SHAPES = {
    "zero 1": (),
    "zero 3": ("parallel.zero=3", "parallel.accumulate_dtype=fp32"),
    "no clipping": ("optim.grad_clip=0",),
    "muon": ("optim.name=muon",),
    "recompute": ("parallel.recompute=selective", "model.dropout=0.1"),
    "experts": (
        "model.num_experts=4",
        "model.top_k=2",
        "model.moe.aux_loss_coef=0.01",
        "model.moe.bias_balance=true",
    ),
}


class RefuseWaiting(Hook):
    """Makes torch raise at any synchronisation, in all steps but the first ones and those that are logged."""

    def __init__(self) -> None:
        self.guarded = 0

    def on_step_start(self, start: StepStart) -> None:
        # the first steps allocate, compile kernels and start communicators
        guarded = start.step > 2 * LOG_INTERVAL and start.step % LOG_INTERVAL != 0
        self.guarded += guarded
        torch.cuda.set_sync_debug_mode("error" if guarded else "default")

    def on_step_end(self, end: StepEnd) -> None:
        torch.cuda.set_sync_debug_mode("default")


class NoSaver:
    def save(self, progress: Progress) -> None:
        """Nothing is kept."""


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_steps_that_are_not_logged_do_not_synchronise(name: str, tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    overrides = runs.tiny(
        tmp_path / "run",
        "synthetic",
        "cluster.device=cuda",
        "train.precision=bf16",
        "train.micro_batch_size=2",
        f"observe.log_interval={LOG_INTERVAL}",
        "checkpoint.interval=0",
        "checkpoint.save_last=false",
        "train.gc_interval=100",
        *SHAPES[name],
        steps=6 * LOG_INTERVAL,
    )
    recipe = resolve({}, overrides)
    config = recipe.config
    torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=120)
    )
    try:
        parts = build_parts(config, recipe.registry, ProcessInfo(), device)
        datasets = open_datasets(config, recipe.registry, train_samples=config.train.steps * 4)
        recorder, hook = build_recorder(parts), RefuseWaiting()
        assert recorder is not None
        recorder.on_start(
            RunStart(run_name="run", run_dir=tmp_path, start_step=0, total_steps=config.train.steps, device="cuda")
        )
        trainer = Trainer(
            config,
            step=parts.step,
            feed=Feed.open(datasets.train, config, parts.mesh, device, start_sample=0),
            meter=build_meter(parts),
            saver=NoSaver(),
            manager=CheckpointManager(
                tmp_path, config.checkpoint, ranks=Ranks.create(timedelta(seconds=config.cluster.timeout_seconds))
            ),
            hooks=Hooks([recorder, hook]),
            evaluator=None,
            progress=Progress(),
            device=device,
            phases=recorder.clock,
        )
        try:
            trainer.run(StopRequest())
        finally:
            torch.cuda.set_sync_debug_mode("default")
            trainer.feed.close()
            trainer.manager.close()
            recorder.on_end(RunEnd(step=config.train.steps))
        timed = read_rank(tmp_path, 0).column("device_forward_us")
        assert len(timed) == config.train.steps and (timed > 0).all()
        assert hook.guarded == 16 and trainer.last_reading is not None
        assert trainer.last_reading.record.loss is not None
    finally:
        dist.destroy_process_group()
