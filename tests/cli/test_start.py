"""What is said before processes start, and after one was cut off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.cli import start as room
from paceline.config.load import resolve
from paceline.config.run import RunConfig
from paceline.errors import ConfigError
from paceline.runtime.host import HostMemory
from paceline.runtime.launcher import ProcessInfo

GIB = 2**30
LLAMA = ("model.preset=llama3_8b", "train.seq_len=1024", "cluster.device=cpu")


def _start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, total: int, available: int, *overrides: str) -> int:
    """Exit code of a start in this process, with a body that says 7."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("")
    monkeypatch.setattr(room, "process_info", ProcessInfo)
    monkeypatch.setattr(room, "keep_compiled", lambda: None)
    monkeypatch.setattr(room, "host_memory", lambda: HostMemory(total=total * GIB, available=available * GIB))
    return room.start([], str(recipe), overrides, None, lambda loaded, info: 7)


def test_a_model_larger_than_the_host_is_refused_before_it_allocates(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    with pytest.raises(ConfigError, match="1 process of this run needs about") as error:
        _start(monkeypatch, tmp_path, 64, 60, *LLAMA)
    assert "this host has 64.00 GiB" in error.value.subject
    assert "--set cluster.check_host_memory=false" in error.value.next_step
    assert _start(monkeypatch, tmp_path, 64, 60, *LLAMA, "cluster.check_host_memory=false") == 7
    assert "warning: 1 process of this run needs about" in capsys.readouterr().err


def test_a_host_that_would_be_nearly_full_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    assert _start(monkeypatch, tmp_path, 1024, 150, *LLAMA) == 7
    told = capsys.readouterr().err
    assert "150.00 GiB are free" in told and "SIGKILL" in told
    assert _start(monkeypatch, tmp_path, 1024, 1000, *LLAMA) == 7
    assert not capsys.readouterr().err


def test_all_processes_of_the_host_count_and_on_gpus_only_what_is_offloaded() -> None:
    memory = HostMemory(total=100 * GIB, available=90 * GIB)

    def findings(processes: int, *overrides: str, on_cpu: bool = True) -> list[str]:
        config = resolve({}, ["model.preset=llama3_1b", "train.seq_len=1024", *overrides]).config
        return [found.id for found in room.host_findings(config, 8, processes, on_cpu=on_cpu, memory=memory)]

    assert findings(1) == []
    with pytest.raises(ConfigError, match="2000 processes of this run need"):
        findings(2000, "model.preset=tiny_llama", "train.seq_len=64")
    with pytest.raises(ConfigError, match="8 processes of this run need"):
        findings(8)
    assert findings(8, on_cpu=False) == []
    with pytest.raises(ConfigError, match="GiB of host memory") as error:
        findings(8, "parallel.offload=optimizer", "parallel.zero=0", on_cpu=False)
    assert "parallel.offload = 'optimizer'" in error.value.evidence


def test_what_the_same_command_does_after_a_kill_is_what_it_will_do(tmp_path: Path, capsys: Any) -> None:
    def told(**checkpoint: Any) -> str:
        config = RunConfig.model_validate({"run": {"dir": str(tmp_path)}, "checkpoint": checkpoint})
        room._tell_signal(128 + 9, room._what_then(config))
        return str(capsys.readouterr().err)

    assert "There is no checkpoint yet: the same command starts from the beginning" in told()
    (tmp_path / "checkpoints" / "step_00000020").mkdir(parents=True)
    assert "goes on from step 20" in told() and "no checkpoint" not in told()
    assert "With checkpoint.resume = 'auto'" in told(resume="never")


def test_a_card_that_nobody_knows_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.gpu = 'nix' is not in the table") as error:
        _start(monkeypatch, tmp_path, 1024, 1000, *LLAMA, "cluster.gpu=nix")
    assert "H100 SXM" in error.value.evidence
