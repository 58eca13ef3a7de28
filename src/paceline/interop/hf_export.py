"""A Hugging Face folder out of a running training, from any layout.

Every rank writes its own pieces to their places in the files, so nothing is gathered and no rank holds a whole tensor.
All ranks must see one file system, as for checkpoints.
"""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

import torch

from paceline.checkpoint.files import sync_folder
from paceline.checkpoint.pieces import Box
from paceline.checkpoint.weights import ExportJob
from paceline.errors import CheckpointError
from paceline.interop.convert import BLOCK_BYTES
from paceline.interop.hf_links import model_shapes
from paceline.interop.hf_write import HubPlan, HubWriter, cast_dtypes, plan_hub
from paceline.interop.links import cut
from paceline.interop.sidecars import read_sidecars, read_template
from paceline.interop.turn_end import with_turn_end

_Piece = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Name, offsets, sizes."""


def export_hub(job: ExportJob) -> None:
    """Writes ``job.folder``. Collective.

    Raises:
        ConfigError: no family has words for the model.
        CheckpointError: it could not be written, on all ranks; nothing of it is left.
    """
    ranks = job.ranks
    template = ranks.from_first("reading the first config", lambda: read_template(job.files))
    plan = plan_hub(job.model, _dtypes(job), template=template)
    mine = set(ranks.exchange("planning an export", lambda: _pieces(job, plan), lambda found: _owners(found, plan)))
    temporary = job.folder.with_name(
        f"{job.folder.name}.tmp-{ranks.from_first('naming', lambda: uuid.uuid4().hex[:8])}"
    )
    writer = HubWriter(temporary, plan)

    def create() -> None:
        temporary.mkdir(parents=True)
        writer.create(with_turn_end(read_sidecars(job.files), job.files))

    try:
        ranks.from_first(f"making {temporary}", create)
        ranks.gather(f"writing {job.folder}", lambda: _write(job, writer, mine))
        ranks.from_first(f"completing {job.folder}", lambda: _publish(temporary, job.folder, writer))
    except BaseException:  # also Ctrl-C
        if ranks.is_first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _dtypes(job: ExportJob) -> dict[str, torch.dtype]:
    return cast_dtypes(dict.fromkeys(model_shapes(job.model), torch.float32), job.dtype)


def _pieces(job: ExportJob, plan: HubPlan) -> list[_Piece]:
    return [
        (name, piece.offsets, tuple(piece.tensor.shape))
        for name, value in job.values.items()
        for piece in value.pieces
        # multi-token prediction has no place in most families
        if name in plan.table.shapes and piece.saved and piece.tensor.numel()
    ]


def _owners(by_rank: list[list[_Piece]], plan: HubPlan) -> list[list[_Piece]]:
    """Each piece is written by the first rank that holds it; all together must be the model."""
    taken: set[_Piece] = set()
    shares: list[list[_Piece]] = []
    for pieces in by_rank:
        share = [piece for piece in dict.fromkeys(pieces) if piece not in taken]
        taken.update(share)
        shares.append(share)
    held: dict[str, int] = {}
    for name, _, sizes in taken:
        held[name] = held.get(name, 0) + torch.Size(sizes).numel()
    wrong = [name for name, shape in plan.table.shapes.items() if held.get(name, 0) != shape.numel()]
    if wrong:
        raise CheckpointError(f"the ranks do not hold each weight once: {', '.join(wrong[:5])}")
    return shares


def _write(job: ExportJob, writer: HubWriter, mine: set[_Piece]) -> None:
    if not writer.folder.is_dir():
        raise CheckpointError(
            f"rank {job.ranks.rank} does not see {writer.folder}, which rank 0 made",
            evidence="All nodes must write into one shared folder.",
            next_step="Set run.dir to a folder on a file system that every node mounts.",
        )
    try:
        for name, value in job.values.items():
            for piece in value.pieces:
                sizes = tuple(piece.tensor.shape)
                if (name, piece.offsets, sizes) in mine:
                    whole = Box(offsets=piece.offsets, sizes=sizes)
                    for box in cut(whole, job.dtype.itemsize, BLOCK_BYTES):
                        part = piece.tensor
                        for dim, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                            part = part.narrow(dim, start - piece.offsets[dim], size)
                        # converted where it is: half the bytes to copy from a GPU
                        dtype = part.dtype if name.endswith(".expert_bias") else job.dtype
                        writer.sink.write(name, box, part.to(dtype).cpu())
    finally:
        writer.files.close()


def _publish(temporary: Path, folder: Path, writer: HubWriter) -> None:
    writer.files.finish()
    temporary.rename(folder)
    sync_folder(folder.parent)
