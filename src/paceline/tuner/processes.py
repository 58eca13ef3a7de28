"""How does a trial run? `paceline bench train` in a process group of its own, watched, and ended as a whole."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from paceline.config.load import dump_recipe
from paceline.config.run import RunConfig
from paceline.runtime.environment import environment
from paceline.tuner.advice import findings_of
from paceline.tuner.failure import reason_of
from paceline.tuner.journal import Journal
from paceline.tuner.trial import Ended, Measurement

GRACE_SECONDS = 10.0
"""Between asking a trial to stop and killing it."""
_POLL_SECONDS, _LOOK_SECONDS = 0.1, 1.0
_GEMM_SECONDS = 0.05
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Runner(Protocol):
    """Runs one recipe and says what came of it: the seam between the search and the machine."""

    def run(self, number: int, config: RunConfig, *, limit_seconds: float) -> Ended:
        """Returns when the trial has ended, and all its processes with it."""


@dataclass(frozen=True, kw_only=True)
class ProcessRunner:
    """Trials on this machine."""

    journal: Journal
    ranks: int
    warm_up: int
    steps: int

    def run(self, number: int, config: RunConfig, *, limit_seconds: float) -> Ended:
        folder = self.journal.trial_folder(number)
        shutil.rmtree(folder, ignore_errors=True)  # of a call that was cut off in this trial
        folder.mkdir(parents=True)
        recipe = folder / "recipe.toml"
        recipe.write_text(dump_recipe(_for_a_trial(config, self.warm_up + self.steps)), encoding="utf-8")
        code, seconds = self._watched(self._command(folder, recipe), folder / "log", limit_seconds)
        measured = _measurement(folder / "line.jsonl")
        if measured is not None:  # also of one that did not end well: it has all that it was started for
            return Ended(seconds=seconds, measured=measured, findings=findings_of(folder / "run"))
        reason = reason_of(code, folder / "log", seconds=seconds)
        return Ended(seconds=seconds, failure=reason.kind, reason=reason.text)

    def _command(self, folder: Path, recipe: Path) -> list[str]:
        command = [sys.executable, "-m", "paceline", "bench", "train", str(recipe), "--json"]
        command += [f"--warm-up={self.warm_up}", f"--steps={self.steps}", f"--gemm-seconds={_GEMM_SECONDS}"]
        command += [f"--out={folder / 'line.jsonl'}", f"--keep={folder / 'run'}"]
        return [*command, *([f"--nproc={self.ranks}"] if self.ranks > 1 else [])]

    def _watched(self, command: Sequence[str], log: Path, limit_seconds: float) -> tuple[int | None, float]:
        """(exit code, None where it was stopped at its limit; seconds)"""
        began = time.monotonic()
        inherited = {name: value for name, value in environment().items() if name not in _LAUNCHER}
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env={**inherited, "PYTHONUNBUFFERED": "1"}, start_new_session=True,
            )  # fmt: skip
        family, code = Family(process.pid), None
        try:
            self.journal.begin(family.known_again)
            while (code := process.poll()) is None and time.monotonic() - began < limit_seconds:
                family.look()
                time.sleep(_POLL_SECONDS)
        finally:
            family.end()
            process.wait()
            self.journal.end()
        return code, time.monotonic() - began


def _for_a_trial(config: RunConfig, steps: int) -> RunConfig:
    """Only the first and the last step are logged: no other waits for the device."""
    observe = config.observe.model_copy(
        update={"log_interval": steps, "record": True, "capture_at": (), "prometheus_port": 0}
    )
    return config.model_copy(update={"observe": observe})


def _measurement(path: Path) -> Measurement | None:
    try:
        line = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
        return Measurement(
            seconds_by_step=tuple(line["seconds_by_step"]),
            peak_bytes=line["peak_memory_gib"] * 2.0**30,
            logged=tuple(line["logged"]),
            devices=line["devices"],
            versions=line["versions"],
        )
    except (OSError, IndexError, LookupError, TypeError, ValueError):
        return None


# ---- processes


class Family:
    """A process and all that it has started, which may be in groups of their own, as torch's launcher puts them."""

    def __init__(self, leader: int) -> None:
        self.leader = leader
        self._members: dict[int, psutil.Process] = {}
        self._looked = -math.inf
        with contextlib.suppress(psutil.Error):
            self._members[leader] = psutil.Process(leader)

    @property
    def known_again(self) -> dict[str, Any]:
        """What tells the leader from another process that is given its id later."""
        leader = self._members.get(self.leader)
        return {"pid": self.leader, "process_started": leader.create_time() if leader is not None else 0.0}

    def look(self) -> None:
        """Takes note of who is there, about once a second: whoever loses its parent is found no more."""
        if time.monotonic() - self._looked >= _LOOK_SECONDS:
            self._looked = time.monotonic()
            self._note()

    def end(self) -> None:
        """Ends all of them: asked first, killed after `GRACE_SECONDS`."""
        self._note()
        for process in self._alive():
            with contextlib.suppress(psutil.Error):
                process.terminate()
        _, left = psutil.wait_procs(self._alive(), timeout=GRACE_SECONDS)
        self._note()
        for process in {*left, *self._alive()}:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(self._alive(), timeout=GRACE_SECONDS)

    def _note(self) -> None:
        for process in list(self._members.values()):
            with contextlib.suppress(psutil.Error):
                for child in process.children(recursive=True):
                    self._members.setdefault(child.pid, child)

    def _alive(self) -> list[psutil.Process]:
        found = []
        for process in self._members.values():
            with contextlib.suppress(psutil.Error):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


def end_left_over(left: Mapping[str, Any]) -> bool:
    """Ends the trial of a call that was killed, if it still runs. True if there was one."""
    try:
        pid, started = int(left["pid"]), float(left["process_started"])
        if not started or abs(psutil.Process(pid).create_time() - started) > 1.0:
            return False
    except (LookupError, TypeError, ValueError, psutil.NoSuchProcess):
        return False
    Family(pid).end()
    return True
