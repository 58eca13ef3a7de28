"""Writes a checkpoint whose tensors come block by block from elsewhere, so that no tensor is ever whole in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from paceline.checkpoint import manifest as manifests
from paceline.checkpoint.files import ChecksumWriter, FileEntry, sync_folder, write_file
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.pieces import Box, ShardedValue
from paceline.checkpoint.planner import PieceSavePlanner, block_key
from paceline.checkpoint.state import TrainState

Read = Callable[[str, Box], Tensor]
"""Gives the numbers of a part of a named tensor, in the dtype that was announced. Called from several threads."""


def write_streamed(
    folder: Path,
    tensors: Mapping[str, tuple[torch.Size, torch.dtype]],
    read: Read,
    *,
    state: TrainState,
    recipe: str,
    files: Mapping[str, bytes],
    threads: int = 1,
) -> None:
    """Fills the existing, empty ``folder`` with a whole checkpoint of one process; giving it its name is the caller's.

    Args:
        tensors: name (``model/<name>``) -> shape and dtype.
        files: further files, by their path in the folder.

    Raises:
        CheckpointError: from ``read``, as it is.
        OSError: the disk is full, or cannot be written.
    """
    values = {
        name: ShardedValue.from_full(torch.empty(shape, dtype=dtype, device="meta"))
        for name, (shape, dtype) in tensors.items()
    }
    entries = write_tensors(folder, values, read, threads=threads)
    small = {**files, "state.json": state.to_json().encode(), "recipe.toml": recipe.encode()}
    for name, data in small.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        entries[name] = write_file(folder / name, data)
    manifest = Manifest(step=state.step, world_size=state.world_size, files=entries)
    write_file(folder / manifests.NAME, manifest.to_json().encode())
    sync_folder(folder)


def write_tensors(
    folder: Path, values: Mapping[str, ShardedValue], read: Read, *, threads: int = 1
) -> dict[str, FileEntry]:
    """Writes DCP's files of ``values``, whose pieces have no memory: ``read`` gives it. Sizes and checksums by name.

    Each thread writes a file of its own, as ranks do, of tensors that follow each other.
    """
    planner = _ReadingPlanner(read)
    planner.set_up_planner(dict(values), is_coordinator=True)
    plans, metadata = planner.create_global_plan(_shares(planner.create_local_plan(), threads))
    plans = ChecksumWriter(folder).prepare_global_plan(plans)
    writers = [ChecksumWriter(folder) for _ in plans]

    def write(writer: ChecksumWriter, plan: SavePlan) -> list[WriteResult]:
        writer.set_up_storage_writer(True)
        try:
            return writer.write_data(plan, planner).wait()
        except (OSError, RuntimeError) as error:
            # torch.save stumbles over a disk's error later, with one that says nothing of a disk
            raise writer.failure or error from error

    with ThreadPoolExecutor(max_workers=len(plans)) as pool:
        jobs = [pool.submit(write, writer, plan) for writer, plan in zip(writers, plans, strict=True)]
        for job in as_completed(jobs):
            if job.exception() is not None:
                planner.stop()
    # the first error is the reason of the others
    failures = [error for job in jobs if (error := job.exception()) is not None]
    if failures:
        raise next((error for error in failures if not isinstance(error, _StoppedError)), failures[0])
    results = [job.result() for job in jobs]
    writers[0].finish(metadata, results)
    return {name: entry for writer in writers for name, entry in writer.entries.items()}


def _shares(plan: SavePlan, count: int) -> list[SavePlan]:
    """The items in their order, cut into ``count`` runs of about as many bytes."""
    sizes = [item.tensor_data.chunk.sizes.numel() for item in plan.items if item.tensor_data is not None]
    limit = sum(sizes) / count
    shares: list[list[WriteItem]] = [[] for _ in range(count)]
    before = 0
    for item, size in zip(plan.items, sizes, strict=True):
        shares[min(count - 1, int(before / limit))].append(item)
        before += size
    return [SavePlan(share) for share in shares if share]


class _StoppedError(Exception):
    """What a thread ends with when another one has failed."""


class _ReadingPlanner(PieceSavePlanner):
    """Reads each block when the writer asks for it."""

    def __init__(self, read: Read) -> None:
        super().__init__()
        self._read = read
        self._stopped = False

    def stop(self) -> None:
        """Another thread has failed: there is no use in going on."""
        self._stopped = True

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        name, offsets = block_key(write_item)
        block = self.blocks[name, offsets]
        if self._stopped:
            raise _StoppedError
        value = self._read(name, Box(offsets=offsets, sizes=tuple(block.shape)))
        assert value.dtype == block.dtype, f"{name}: {value.dtype} instead of {block.dtype}"
        return value.contiguous()
