"""A run writes its record: on every rank, every step, at least eight dimensions, and without waiting for the
device."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.observe.hooks import Hook, HookError, StepEnd
from paceline.observe.phases import PHASES
from paceline.observe.telemetry.columns import DIMENSIONS
from paceline.observe.telemetry.record import FOLDER, ranks_of, read_rank
from paceline.training.feed import Feed
from tests.distributed import run as run_ranks
from tests.training import runs

OFF_GPU = {"GPU compute", "GPU memory", "GPU power and heat"}


def test_two_ranks_join_eight_dimensions_on_the_step(tmp_path: Path) -> None:
    data = runs.write_dataset(tmp_path / "data")
    folder = tmp_path / "run"
    run_ranks(runs.run, 2, runs.tiny(folder, data, "train.eval_interval=4", "train.gc_interval=2", steps=60))
    assert ranks_of(folder) == [0, 1]
    records = [read_rank(folder, rank) for rank in (0, 1)]
    for record in records:
        assert record.column("step").tolist() == list(range(1, 61)) and set(record.column("steps")) == {1}
        host = sum(record.column(f"host_{phase}_us") for phase in PHASES)
        assert np.abs(host - record.column("wall_us")).max() <= len(PHASES)  # each is rounded down
        assert (record.column("host_forward_us") > 0).all() and (record.column("host_backward_us") > 0).all()
        assert record.column("host_checkpoint_us")[2] > record.column("host_checkpoint_us")[1]
        assert record.column("gc_runs")[[1, 3]].min() >= 1
        assert (record.column("wait_dp_us") > 0).all() and (record.column("sent_dp_kb") > 0).all()
        known = {name for name, own in DIMENSIONS.items() if any(not np.isnan(record.column(x)[-1]) for x in own)}
        assert known >= set(DIMENSIONS) - OFF_GPU and len(known) >= 8
    assert records[1].facts["place"]["dp"] == 1 and records[0].facts["world_size"] == 2
    assert records[0].facts["degrees"]["dp"] == 2 and records[0].facts["stages"] == [[0, 1]]


def test_a_pipeline_says_when_it_waits_for_the_other_stage(tmp_path: Path) -> None:
    data = runs.write_dataset(tmp_path / "data")
    folder = tmp_path / "run"
    run_ranks(runs.run, 2, runs.tiny(folder, data, "parallel.pp=2", steps=6))
    for rank in (0, 1):
        record = read_rank(folder, rank)
        assert (record.column("host_pipeline_us")[1:] > 0).all()
        assert record.facts["stages"] == [[rank, rank]]


def test_hooks_hear_of_the_end_also_where_the_loader_fails_to_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Feed) -> None:
        raise OSError("the loader does not close")

    monkeypatch.setattr(Feed, "close", broken)
    folder = tmp_path / "run"
    with pytest.raises(OSError, match="does not close"):
        runs.alone(runs.tiny(folder, runs.write_dataset(tmp_path / "data"), "data.num_workers=0", steps=2))
    # the recorder writes what it still has when it hears of the end
    assert read_rank(folder, 0).column("step").tolist() == [1, 2]


class Synchronized(Hook):
    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, end: StepEnd) -> None:
        self.steps += 1


def test_recording_adds_no_synchronisation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = runs.write_dataset(tmp_path / "data")
    calls: dict[str, list[str]] = {"true": [], "false": []}
    now = ""
    for owner, name in ((torch.cuda, "synchronize"), (torch.cuda.Stream, "synchronize"), (torch.Tensor, "item")):
        real = getattr(owner, name)

        def counted(*args: object, real: object = real, name: str = name) -> object:
            calls[now].append(name)
            return real(*args) if name == "item" else None  # type: ignore[operator]

        monkeypatch.setattr(owner, name, counted)
    for now in calls:
        folder = tmp_path / now
        runs.alone(runs.tiny(folder, data, f"observe.record={now}", steps=6))
        assert (folder / FOLDER).exists() == (now == "true")
    assert calls["true"] == calls["false"]


def test_the_page_shows_a_running_run(tmp_path: Path) -> None:
    from paceline.config.load import resolve
    from paceline.runtime.process import ProcessInfo
    from paceline.runtime.signals import StopRequest
    from paceline.training.run import run_in_group

    pages: list[str] = []

    class Scrape(Hook):
        def on_step_end(self, end: StepEnd) -> None:
            if end.step == 5:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                    pages.append(answer.read().decode())

    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    data = runs.write_dataset(tmp_path / "data")
    recipe = resolve({}, runs.tiny(tmp_path / "run", data, f"observe.prometheus_port={port}", steps=6))
    recipe.registry.hook(lambda config: Scrape())
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        run_in_group(recipe, ProcessInfo(), torch.device("cpu"), StopRequest())
    finally:
        torch.distributed.destroy_process_group()
    (page,) = pages
    assert "paceline_step{" in page and "paceline_loss{" in page and "paceline_phase_forward_seconds{" in page


def test_a_step_that_an_error_cut_off_is_not_in_the_record(tmp_path: Path) -> None:
    plugin = tmp_path / "fail.py"
    plugin.write_text(
        "from paceline.observe.hooks import Hook\n"
        "class Fail(Hook):\n"
        "    def on_backward_end(self, end):\n"
        "        assert end.step < 4\n"
        "def register(registry):\n"
        "    registry.hook(lambda config: Fail())\n"
    )
    folder = tmp_path / "run"
    with pytest.raises(HookError):
        runs.alone(runs.tiny(folder, runs.write_dataset(tmp_path / "data"), f"run.plugins={plugin}", steps=6))
    assert read_rank(folder, 0).column("step").tolist() == [1, 2, 3]


def test_gradients_travel_once_a_step_whatever_the_accumulation(tmp_path: Path) -> None:
    """huggingface/transformers#7742, huggingface/accelerate#192: not at every micro-step."""
    data = runs.write_dataset(tmp_path / "data")
    sent = {}
    for batch in (2, 16):
        folder = tmp_path / str(batch)
        run_ranks(runs.run, 2, runs.tiny(folder, data, f"train.global_batch_size={batch}", steps=4))
        record = read_rank(folder, 0)
        assert record.facts["micro_batches"] == batch // 2
        sent[batch] = record.column("sent_dp_kb").tolist()
    assert sent[2] == sent[16] and min(sent[2]) > 0
