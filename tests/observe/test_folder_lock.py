from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.errors import RunFolderError
from paceline.observe.folder_lock import STALE_SECONDS, FolderLock

HOLD = """
import sys, time
from pathlib import Path
from paceline.observe.folder_lock import FolderLock
FolderLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
time.sleep(60)
"""


def test_a_living_owner_keeps_others_out_and_a_killed_one_does_not(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    try:
        with pytest.raises(RunFolderError) as caught:
            FolderLock(path).acquire()
        assert f"Process {holder.pid}" in caught.value.evidence and "run.dir" in caught.value.next_step
    finally:
        holder.kill()
    # not reaped yet: a zombie has ended all the same
    time.sleep(0.2)
    lock = FolderLock(path)
    lock.acquire()
    lock.release()
    holder.wait()
    assert not path.exists()


def test_a_second_run_in_the_same_process_is_kept_out(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path / "lock.json")
    lock.acquire()
    with pytest.raises(RunFolderError):
        FolderLock(tmp_path / "lock.json").acquire()
    lock.release()
    lock.release()


def test_a_process_id_given_to_another_process_counts_as_dead(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    lock = FolderLock(path)
    lock.acquire()
    owner = json.loads(path.read_text())
    lock.release()
    path.write_text(json.dumps(owner | {"process_started": owner["process_started"] - 3600}))
    again = FolderLock(path)
    again.acquire()
    again.release()


def test_an_owner_on_another_host_is_judged_by_age(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    path.write_text(json.dumps({"pid": 1, "host": "elsewhere", "process_started": 0.0, "since": "then"}))
    lock = FolderLock(path)
    with pytest.raises(RunFolderError, match="elsewhere"):
        lock.acquire()
    long_ago = time.time() - STALE_SECONDS - 1
    os.utime(path, (long_ago, long_ago))
    lock.acquire()
    lock.release()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_a_lock_that_a_crash_cut_off_is_nobodys(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lock.json"
    path.write_text(text)
    lock = FolderLock(path)
    lock.acquire()
    lock.release()
