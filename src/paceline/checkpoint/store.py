"""How is a checkpoint written and read?

    step_00000100/
        .metadata, __<rank>_0.distcp    the tensors, in the format of torch.distributed.checkpoint
        rng_<rank>.safetensors          random states, one file a rank
        state.json, recipe.toml         the rest, readable
        manifest.json                   written last: sizes and checksums of all of the above

The folder is made under a temporary name and renamed when it is complete and flushed.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as safetensors_bytes
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

from paceline.checkpoint import manifest as manifests
from paceline.checkpoint.files import ChecksumWriter, FileEntry, replace_file, sync_folder, write_file
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.pieces import ShardedValue
from paceline.checkpoint.planner import BlockKey, PieceLoadPlanner, PieceSavePlanner, block_key, unfilled
from paceline.checkpoint.ranks import Ranks
from paceline.checkpoint.staging import HostBuffers, Staged
from paceline.checkpoint.state import TrainState
from paceline.errors import CheckpointError

LATEST = "latest"
"""A file beside the checkpoints that names the last complete one. For people and scripts: loading looks at folders."""


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What one rank puts into a checkpoint. ``values`` and ``rng`` are its own; ``state`` and ``recipe`` are rank 0's.

    Keys of ``values``: ``model/<name>`` for master weights and buffers, ``optim/<name>/<state>`` for the optimizer,
    ``fp8/<layers>`` for what scales of earlier steps are made of.
    """

    values: Mapping[str, ShardedValue]
    state: TrainState
    recipe: str = ""
    rng: Mapping[str, Tensor] = field(default_factory=dict)


class CheckpointWriter:
    """Writes checkpoints one after another, in a background thread if asked.

    All methods are collective over ``ranks``. An error in the background is raised by the next call.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._buffers = HostBuffers()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None
        self._making_room: Future[None] | None = None
        self._plan: _GlobalPlan | None = None

    def prepare(self, values: Mapping[str, ShardedValue]) -> None:
        """Plans who writes what and takes the host memory for it, the latter in the background.

        A first save of these values then waits for neither.
        """
        _, mine = self._planned(values)
        self._making_room = self._thread.submit(self._buffers.make_room, mine)

    def save(
        self,
        folder: Path,
        contents: Contents,
        *,
        background: bool = False,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Writes ``contents`` as ``folder`` (``.../step_00000100``); what was there before is replaced at the end.

        In the background, returns when this rank's part has been copied to the host (on a GPU: when the copies are
        queued). ``then`` runs on rank 0 once the checkpoint is complete, in the same thread as the writing; all ranks
        must give one, or none.

        Raises:
            CheckpointError: this save failed, or the one before it did in the background. Nothing of the failed one
                remains; earlier checkpoints are untouched.
        """
        self.wait()
        planner, mine = self._planned(contents.values)
        # the small files are made now: the training step goes on to change what they say
        small = _small_files(contents, self._ranks)
        self._wait_for_room()
        staged = self._buffers.copy(mine) if background else Staged(blocks=mine, wait=lambda: None)
        assert self._plan is not None
        job = _Job(folder=folder, step=contents.state.step, plan=self._plan, planner=planner, small=small, then=then)
        if background:
            self._running = self._thread.submit(self._write, job, staged)
        else:
            self._write(job, staged)

    @property
    def is_writing(self) -> bool:
        return self._running is not None and not self._running.done()

    def wait(self) -> None:
        """Waits for the save in the background. Raises its CheckpointError, once, on every rank."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """Waits for the save in the background and ends the thread. Errors as in ``wait``."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def _wait_for_room(self) -> None:
        making, self._making_room = self._making_room, None
        if making is not None:
            making.exception()  # what went wrong there goes wrong again in the copy, which says so

    def _planned(self, values: Mapping[str, ShardedValue]) -> tuple[PieceSavePlanner, dict[BlockKey, Tensor]]:
        """The blocks of ``values`` that this rank writes; the plan of all ranks is `_plan`."""
        planner = PieceSavePlanner()
        planner.set_up_planner(dict(values), is_coordinator=self._ranks.is_first)
        plan = self._plan_for(planner)
        return planner, {block_key(item): planner.blocks[block_key(item)] for item in plan.mine.items}

    def _plan_for(self, planner: PieceSavePlanner) -> _GlobalPlan:
        """Who writes which block. Made once, and again only when some rank's pieces have changed."""
        local = planner.create_local_plan()
        changed = self._plan is None or self._plan.local.items != local.items
        if any(self._ranks.gather("comparing plans", lambda: changed)):
            metadata: Metadata | None = None

            def central(plans: list[SavePlan]) -> list[SavePlan]:
                nonlocal metadata
                final, metadata = planner.create_global_plan(plans)
                if missing := unfilled(metadata):
                    raise ValueError(f"no rank holds all of {', '.join(missing[:5])} (of {len(missing)} such tensors)")
                # names the files of each rank; the path plays no part in it
                return ChecksumWriter(Path()).prepare_global_plan(final)

            mine = self._ranks.exchange("planning who writes what", lambda: local, central)
            self._plan = _GlobalPlan(local=local, mine=mine, metadata=metadata)
        assert self._plan is not None
        return self._plan

    def _write(self, job: _Job, staged: Staged) -> None:
        staged.wait()
        job.planner.blocks = staged.blocks
        doing = f"writing {job.folder}"
        temporary = Path(self._ranks.from_first(doing, lambda: str(_make_temporary(job.folder))))
        try:
            self._ranks.exchange(
                doing,
                lambda: _write_local(temporary, job, self._ranks),
                lambda results: _publish(temporary, job, results, self._ranks),
            )
        except CheckpointError:
            if self._ranks.is_first:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        if job.then is not None:
            self._ranks.from_first("cleaning up after " + doing, job.then)


@dataclass(frozen=True, kw_only=True)
class _GlobalPlan:
    local: SavePlan
    mine: SavePlan
    metadata: Metadata | None
    """Of all ranks' blocks; on rank 0 only."""


@dataclass(frozen=True, kw_only=True)
class _Job:
    folder: Path
    step: int
    plan: _GlobalPlan
    planner: PieceSavePlanner
    small: dict[str, bytes]
    then: Callable[[], None] | None


@dataclass(frozen=True, kw_only=True)
class _Written:
    results: list[Any]
    entries: dict[str, FileEntry]


def _small_files(contents: Contents, ranks: Ranks) -> dict[str, bytes]:
    files = {}
    if contents.rng:
        files[_rng_name(ranks.rank)] = safetensors_bytes({name: t.cpu() for name, t in contents.rng.items()})
    if ranks.is_first:
        files["state.json"] = contents.state.to_json().encode()
        files["recipe.toml"] = contents.recipe.encode()
    return files


def _rng_name(rank: int) -> str:
    return f"rng_{rank:05d}.safetensors"


def _make_temporary(folder: Path) -> Path:
    temporary = folder.with_name(f"{folder.name}.tmp-{uuid.uuid4().hex[:8]}")
    temporary.mkdir(parents=True)
    return temporary


def _write_local(temporary: Path, job: _Job, ranks: Ranks) -> _Written:
    """Writes this rank's files. The writer is DCP's; the plan was agreed on before, so nothing is exchanged here."""
    if not temporary.is_dir():
        raise CheckpointError(
            f"Rank {ranks.rank} does not see {temporary}, which rank 0 made.",
            evidence="All nodes must write checkpoints into one shared folder.",
            next_step="Set run.dir to a folder on a file system that every node mounts.",
        )
    writer = ChecksumWriter(temporary)
    writer.set_up_storage_writer(ranks.is_first)
    try:
        results = writer.write_data(job.plan.mine, job.planner).wait()
    except (OSError, RuntimeError) as error:
        if writer.failure is not None:
            raise writer.failure from error
        raise
    entries = dict(writer.entries)
    for name, data in job.small.items():
        entries[name] = write_file(temporary / name, data)
    return _Written(results=results, entries=entries)


def _publish(temporary: Path, job: _Job, written: list[_Written], ranks: Ranks) -> list[None]:
    """On rank 0, when every rank's files are on the disk: metadata, manifest, rename."""
    assert job.plan.metadata is not None
    writer = ChecksumWriter(temporary)
    writer.set_up_storage_writer(True)
    writer.finish(job.plan.metadata, [one.results for one in written])
    files = dict(writer.entries)
    for one in written:
        files.update(one.entries)
    manifest = Manifest(step=job.step, world_size=ranks.world_size, files=files)
    write_file(temporary / manifests.NAME, manifest.to_json().encode())
    sync_folder(temporary)
    _rename_over(temporary, job.folder)
    replace_file(job.folder.with_name(LATEST), f"{job.folder.name}\n".encode())
    return [None] * ranks.world_size


def _rename_over(temporary: Path, folder: Path) -> None:
    """Gives the complete folder its name. A folder cannot be replaced atomically: an old one steps aside first."""
    old = folder.with_name(f"{folder.name}.tmp-{uuid.uuid4().hex[:8]}-old")
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint folder whose manifest was read and whose files have the right sizes."""

    folder: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    def state(self) -> TrainState:
        file = self.folder / "state.json"
        return TrainState.from_json(file.read_text(), source=str(file))

    def recipe(self) -> str:
        """The resolved recipe of the run, as TOML."""
        return (self.folder / "recipe.toml").read_text()

    def rng(self, rank: int, world_size: int) -> dict[str, Tensor] | None:
        """This rank's random states; None if another number of ranks wrote them (see ``state.restore_rng``)."""
        file = self.folder / _rng_name(rank)
        if world_size != self.manifest.world_size or not file.exists():
            return None
        try:
            return load_file(file)
        except SafetensorError as error:
            raise CheckpointError(f"{file} cannot be read.", evidence=str(error), next_step=_TRY_ANOTHER) from error

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Name -> global shape and dtype (``.size``, ``.properties.dtype``) of all that ``load_into`` can read."""
        saved = self.metadata().state_dict_metadata
        return {name: entry for name, entry in saved.items() if isinstance(entry, TensorStorageMetadata)}

    def metadata(self) -> Metadata:
        return FileSystemReader(self.folder).read_metadata()


_TRY_ANOTHER = "Use another checkpoint of the run: the folders beside it hold earlier ones."


def open_checkpoint(folder: Path) -> Checkpoint:
    """Opens one checkpoint folder. Sizes are checked, contents are not (``locate.newest_whole`` does both).

    Raises:
        CheckpointError: it is absent, half-written or damaged.
    """
    if not folder.is_dir():
        raise CheckpointError(f"There is no checkpoint folder {folder}.", next_step="Look at the path.")
    manifest = manifests.read_manifest(folder)
    problems = [manifest] if isinstance(manifest, str) else manifests.size_problems(folder, manifest)
    if isinstance(manifest, str) or problems:
        raise CheckpointError(
            f"The checkpoint {folder} is damaged or half-written.",
            evidence="; ".join(problems[:5]) + ("." if len(problems) <= 5 else f"; and {len(problems) - 5} more."),
            next_step=_TRY_ANOTHER,
        )
    return Checkpoint(folder=folder, manifest=manifest)


def load_into(
    checkpoint: Checkpoint, into: Mapping[str, ShardedValue], *, ranks: Ranks | None = None, ignore: Sequence[str] = ()
) -> None:
    """Fills the pieces of ``into`` in place, whatever pieces were saved. Collective over ``ranks``.

    Values are converted to the dtype of the pieces. Every rank names what it holds; together they must name everything
    that was saved, except names that begin with one of ``ignore`` (``("optim/",)`` to read weights only).

    Raises:
        CheckpointError: on every rank, with all missing and unexpected names and all differing shapes; or a file could
            not be read. In the first case nothing has been written into ``into``.
    """
    ranks = ranks or Ranks()
    reading = f"reading {checkpoint.folder}"
    metadata = ranks.from_first(reading, checkpoint.metadata)
    _check_names(checkpoint, metadata, into, ranks, ignore)

    def read() -> None:
        reader = FileSystemReader(checkpoint.folder)
        reader.set_up_storage_reader(metadata, ranks.is_first)
        planner = PieceLoadPlanner()
        planner.set_up_planner(dict(into), metadata, ranks.is_first)
        reader.read_data(planner.create_local_plan(), planner).wait()

    ranks.gather(reading, read)


def _check_names(
    checkpoint: Checkpoint,
    metadata: Metadata,
    into: Mapping[str, ShardedValue],
    ranks: Ranks,
    ignore: Sequence[str],
) -> None:
    saved = metadata.state_dict_metadata

    def local() -> dict[str, str]:
        """Name -> what is wrong with it here; empty if nothing."""
        found = {}
        for name, value in into.items():
            entry = saved.get(name)
            if not isinstance(entry, TensorStorageMetadata):
                found[name] = f"missing: {name} {list(value.global_shape)}"
            elif entry.size != value.global_shape:
                found[name] = f"shape: {name} is {list(entry.size)} there and {list(value.global_shape)} here"
            else:
                found[name] = ""
        return found

    def central(by_rank: list[dict[str, str]]) -> list[None]:
        wanted = {name: problem for found in by_rank for name, problem in found.items()}
        problems = [problem for problem in wanted.values() if problem]
        problems += [
            f"unexpected: {name} {list(getattr(entry, 'size', ()))}"
            for name, entry in saved.items()
            if name not in wanted and not name.startswith(tuple(ignore))
        ]
        if problems:
            raise CheckpointError(
                f"The checkpoint {checkpoint.folder} does not fit this run: {len(problems)} differences.",
                evidence="\n  ".join(problems),
                next_step="Use the recipe.toml that is saved in the checkpoint, or start from its weights only.",
            )
        return [None] * ranks.world_size

    ranks.exchange(f"comparing names with {checkpoint.folder}", local, central)
