"""A crash, a damaged file or a full folder never costs more than the newest checkpoint, and what happened is named."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from distributed import run
from paceline.checkpoint import store
from paceline.checkpoint.locate import find_checkpoint, newest_whole, step_folders
from paceline.checkpoint.manager import CheckpointManager, to_remove
from paceline.checkpoint.pieces import ShardedValue
from paceline.checkpoint.ranks import Ranks
from paceline.checkpoint.staging import HostBuffers
from paceline.checkpoint.state import TrainState
from paceline.checkpoint.store import Contents
from paceline.config.checkpoint import CheckpointConfig
from paceline.errors import CheckpointError
from paceline.report.finding import Finding


def contents(step: int, numel: int = 1000) -> Contents:
    value = ShardedValue.from_full(torch.full((numel,), float(step)))
    return Contents(values={"model/a": value}, state=TrainState(step=step), recipe="")


def loaded_step(manager: CheckpointManager, numel: int = 1000) -> float | None:
    checkpoint = manager.latest()
    if checkpoint is None:
        return None
    into = torch.zeros(numel)
    manager.load(checkpoint, {"model/a": ShardedValue.from_full(into)})
    assert into.eq(into[0]).all() and checkpoint.step == into[0]
    return into[0].item()


def make(folder: Path, findings: list[Finding] | None = None, **settings: object) -> CheckpointManager:
    report = None if findings is None else findings.append
    return CheckpointManager(folder, CheckpointConfig(**{"keep": 3, **settings}), report=report)


def steps(folder: Path) -> list[int]:
    return [step for step, _ in step_folders(folder)]


def data_file(folder: Path) -> Path:
    return next(folder.glob("*.distcp"))


def truncate(folder: Path) -> str:
    with data_file(folder).open("r+b") as stream:
        stream.truncate(500)
    return "__0_0.distcp has 500 bytes instead of"


def flip_a_byte(folder: Path) -> str:
    data = bytearray(data_file(folder).read_bytes())
    data[len(data) // 2] ^= 1
    data_file(folder).write_bytes(data)
    return "__0_0.distcp has checksum"


def remove_a_file(folder: Path) -> str:
    data_file(folder).unlink()
    return "__0_0.distcp is missing"


def remove_the_manifest(folder: Path) -> str:
    (folder / "manifest.json").unlink()
    return "manifest.json is missing"


def half_a_manifest(folder: Path) -> str:
    (folder / "manifest.json").write_text('{"files": {')
    return "manifest.json is not a manifest"


def damage_the_state(folder: Path) -> str:
    text = (folder / "state.json").read_text()
    (folder / "state.json").write_text(text.replace('"step": 3', '"step": 4'))
    return "state.json has checksum"


DAMAGES = [truncate, flip_a_byte, remove_a_file, remove_the_manifest, half_a_manifest, damage_the_state]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path, damage):
    findings: list[Finding] = []
    manager = make(tmp_path, findings)
    for step in (1, 2, 3):
        manager.save(contents(step))
    manager.wait()
    expected = damage(tmp_path / "step_00000003")
    assert loaded_step(manager) == 2
    [finding] = findings
    assert "step_00000003 is damaged" in finding.subject and expected in finding.evidence
    # the run goes on and writes step 3 again, over the damaged one
    manager.save(contents(3), wait=True)
    assert loaded_step(make(tmp_path)) == 3


def test_if_none_is_whole_the_run_does_not_start_from_scratch(tmp_path):
    manager = make(tmp_path)
    for step in (1, 2):
        manager.save(contents(step), wait=True)
        flip_a_byte(tmp_path / f"step_{step:08d}")
    with pytest.raises(CheckpointError, match="None of the 2 checkpoints") as caught:
        manager.latest()
    assert "step_00000001: __0_0.distcp has checksum" in str(caught.value)


def test_an_empty_folder_and_never(tmp_path):
    assert make(tmp_path / "none").latest() is None
    manager = make(tmp_path)
    manager.save(contents(1), wait=True)
    assert make(tmp_path, resume="never").latest() is None


def fallback_worker(rank: int, world_size: int, folder: str) -> tuple[int, int]:
    findings: list[Finding] = []
    manager = CheckpointManager(Path(folder), CheckpointConfig(), ranks=Ranks.create(), report=findings.append)
    checkpoint = manager.latest()
    assert checkpoint is not None
    return checkpoint.step, len(findings)


def test_all_ranks_agree_on_the_one_before(tmp_path):
    manager = make(tmp_path)
    for step in (1, 2):
        manager.save(contents(step), wait=True)
    flip_a_byte(tmp_path / "step_00000002")
    assert run(fallback_worker, 3, str(tmp_path)) == [(1, 1), (1, 0), (1, 0)]


def test_retention(tmp_path):
    manager = make(tmp_path, keep=2, keep_every=4)
    for step in range(1, 11):
        manager.save(contents(step))
    manager.close()
    assert steps(tmp_path) == [4, 8, 9, 10]
    assert (tmp_path / "latest").read_text() == "step_00000010\n"


def test_retention_never_removes_the_only_whole_one(tmp_path):
    manager = make(tmp_path, keep=1)
    manager.save(contents(1), wait=True)
    shutil.copytree(tmp_path / "step_00000001", tmp_path / "step_00000002")
    truncate(tmp_path / "step_00000002")
    assert to_remove(tmp_path, keep=1, keep_every=0) == []
    manager.save(contents(3), wait=True)
    assert steps(tmp_path) == [3]


def test_due_and_a_repeated_step(tmp_path):
    manager = make(tmp_path, interval=5)
    assert [step for step in range(1, 16) if manager.due(step)] == [5, 10, 15]
    assert not make(tmp_path).due(5)
    manager.save(contents(5))
    manager.save(contents(5), wait=True)
    saved = manager.completed()
    assert saved is not None and saved.step == 5 and saved.folder == tmp_path / "step_00000005"
    assert manager.completed() is None


def test_training_goes_on_while_the_checkpoint_is_written(tmp_path, monkeypatch):
    started, go_on = threading.Event(), threading.Event()
    write = store._write_local

    def slow_write(*args):
        started.set()
        assert go_on.wait(30)
        return write(*args)

    monkeypatch.setattr(store, "_write_local", slow_write)
    manager = make(tmp_path)
    weights = torch.full((1000,), 1.0)
    manager.save(Contents(values={"model/a": ShardedValue.from_full(weights)}, state=TrainState(step=1)))
    assert started.wait(30)
    weights.fill_(2.0)
    assert manager.completed() is None and steps(tmp_path) == []
    go_on.set()
    manager.wait()
    assert loaded_step(manager) == 1


def test_the_first_save_finds_its_memory_taken(tmp_path, monkeypatch):
    taken = []
    make_room = HostBuffers._make_room

    def counted(buffers, blocks, **how):
        before = buffers.num_bytes
        make_room(buffers, blocks, **how)
        taken.append(buffers.num_bytes - before)

    monkeypatch.setattr(HostBuffers, "_make_room", counted)
    manager, weights = make(tmp_path, interval=1), torch.full((1000,), 1.0)
    values = {"model/a": ShardedValue.from_full(weights)}
    manager.prepare(values)
    manager.save(Contents(values=values, state=TrainState(step=1)))
    manager.close()
    assert taken[0] >= 4000 and taken[1:] == [0] and loaded_step(manager) == 1
    taken.clear()
    make(tmp_path, interval=0).prepare(values)
    make(tmp_path, interval=1, async_save=False).prepare(values)
    assert not taken


def test_memory_that_is_not_there_is_the_first_save_s_error(tmp_path, monkeypatch):
    def none_left(*args, **how):
        raise MemoryError("none left")

    manager, values = make(tmp_path, interval=1), {"model/a": ShardedValue.from_full(torch.ones(10))}
    monkeypatch.setattr(HostBuffers, "_make_room", none_left)
    manager.prepare(values)
    with pytest.raises(MemoryError, match="none left"):
        manager.save(Contents(values=values, state=TrainState(step=1)))


def test_an_error_in_the_background_is_raised_by_the_next_call_once(tmp_path, monkeypatch):
    def no_space(*args):
        raise OSError(28, "No space left on device")

    manager = make(tmp_path)
    manager.save(contents(1), wait=True)
    with monkeypatch.context() as patch:
        patch.setattr(store, "_write_local", no_space)
        manager.save(contents(2))
        with pytest.raises(CheckpointError, match=r"Writing .*step_00000002 failed") as caught:
            manager.save(contents(3))
    assert "No space left on device" in str(caught.value) and "Free space" in str(caught.value)
    assert manager.completed() is None
    manager.save(contents(2))
    manager.close()
    assert steps(tmp_path) == [1, 2] and loaded_step(make(tmp_path)) == 2


ENDLESS_SAVING = """
import sys, torch
from pathlib import Path
from paceline.checkpoint.manager import CheckpointManager
from paceline.checkpoint.pieces import ShardedValue
from paceline.checkpoint.state import TrainState
from paceline.checkpoint.store import Contents
from paceline.config.checkpoint import CheckpointConfig

manager = CheckpointManager(Path(sys.argv[1]), CheckpointConfig(keep=1))
for step in range(1, 100_000):
    value = ShardedValue.from_full(torch.full((2_000_000,), float(step)))
    manager.save(Contents(values={"model/a": value}, state=TrainState(step=step)))
    print(step, flush=True)
"""


@pytest.mark.parametrize("delay_seconds", [0.0, 0.03, 0.07])
def test_kill_in_the_middle_of_a_save(tmp_path, delay_seconds):
    child = subprocess.Popen([sys.executable, "-c", ENDLESS_SAVING, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for _ in range(3):
        reached = int(child.stdout.readline())
    time.sleep(delay_seconds)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    # the save before the one that was running had ended when the running one began
    found = loaded_step(make(tmp_path), numel=2_000_000)
    assert found is not None and found >= reached - 1
    assert not list(tmp_path.glob("*.tmp*"))


def test_a_checkpoint_moved_aside_for_its_successor_comes_back(tmp_path):
    manager = make(tmp_path)
    manager.save(contents(1), wait=True)
    (tmp_path / "step_00000001").rename(tmp_path / "step_00000001.tmp-0a0a0a0a-old")
    (tmp_path / "step_00000002.tmp-12345678").mkdir()
    findings: list[Finding] = []
    assert loaded_step(make(tmp_path, findings)) == 1
    assert [finding.id for finding in findings] == ["checkpoint.unfinished"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000001"]


def test_find_checkpoint_by_run_folder_or_by_its_own(tmp_path):
    manager = make(tmp_path / "checkpoints")
    manager.save(contents(1), wait=True)
    manager.save(contents(2), wait=True)
    assert find_checkpoint(tmp_path).step == 2
    assert find_checkpoint(tmp_path / "checkpoints").step == 2
    assert find_checkpoint(tmp_path / "checkpoints" / "step_00000001").step == 1
    with pytest.raises(CheckpointError, match="There is no checkpoint in"):
        find_checkpoint(tmp_path / "elsewhere")
    assert newest_whole(tmp_path / "elsewhere") is None
