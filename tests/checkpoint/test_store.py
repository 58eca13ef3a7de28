"""What any ranks saved in any pieces is read by any others, byte for byte; or the error names what differs."""

from __future__ import annotations

import resource
import signal
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from distributed import run
from paceline.checkpoint import planner
from paceline.checkpoint.pieces import Piece, ShardedValue
from paceline.checkpoint.ranks import Ranks
from paceline.checkpoint.state import TrainState
from paceline.checkpoint.store import CheckpointWriter, Contents, load_into, open_checkpoint
from paceline.errors import CheckpointError

SHAPES = {
    "model/embed": (1003, 7),
    "model/scale": (),
    "model/bias": (3,),
    "model/conv": (5, 4, 3),
    "optim/embed/exp_avg": (1003, 7),
}


def full_values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    values = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    values["model/load"] = torch.arange(6, dtype=torch.int64)
    values["model/half"] = torch.randn(33, generator=generator).bfloat16()
    values["model/nothing"] = torch.empty(0, 4)
    return values


def flat_pieces(rank: int, world_size: int, values: dict[str, torch.Tensor]) -> dict[str, ShardedValue]:
    """As a flat engine holds them: an equal range of the flattened tensor, the last ranks less or nothing."""
    pieces = {}
    for name, tensor in values.items():
        size = -(-tensor.numel() // world_size)
        start, end = min(rank * size, tensor.numel()), min((rank + 1) * size, tensor.numel())
        pieces[name] = ShardedValue.from_flat_range(tensor.flatten()[start:end].clone(), tensor.shape, start)
    return pieces


def row_pieces(rank: int, world_size: int, values: dict[str, torch.Tensor]) -> dict[str, ShardedValue]:
    """As FSDP2 holds them: rows by ``torch.chunk``; scalars are everywhere."""
    pieces = {}
    for name, tensor in values.items():
        if tensor.dim() == 0:
            pieces[name] = ShardedValue.from_full(tensor.clone())
            continue
        size = -(-tensor.shape[0] // world_size)
        start = min(rank * size, tensor.shape[0])
        part = tensor[start : start + size].clone()
        offsets = (start,) + (0,) * (tensor.dim() - 1)
        held = (Piece(offsets=offsets, tensor=part),) if part.numel() else ()
        pieces[name] = ShardedValue(global_shape=tensor.shape, dtype=tensor.dtype, pieces=held)
    return pieces


def full_pieces(rank: int, world_size: int, values: dict[str, torch.Tensor]) -> dict[str, ShardedValue]:
    return {name: ShardedValue.from_full(tensor.clone()) for name, tensor in values.items()}


LAYOUTS = {"flat": flat_pieces, "rows": row_pieces, "full": full_pieces}


def zeroed(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in values.items()}


def save_worker(rank: int, world_size: int, folder: str, layout: str, background: bool) -> int:
    writer = CheckpointWriter(Ranks.create())
    values = LAYOUTS[layout](rank, world_size, full_values())
    rng = {"torch_cpu": torch.full((4,), rank)}
    contents = Contents(values=values, state=TrainState(step=7, tokens=99), recipe="[run]\n", rng=rng)
    writer.save(Path(folder), contents, background=background)
    for value in values.values():
        for piece in value.pieces:
            # the next update must not leak into what is being written
            piece.tensor.zero_() if background else None
    writer.close()
    return sum(file.stat().st_size for file in Path(folder).glob(f"__{rank}_*"))


def load_worker(rank: int, world_size: int, folder: str, layout: str) -> int:
    values = full_values()
    into = LAYOUTS[layout](rank, world_size, zeroed(values))
    expected = LAYOUTS[layout](rank, world_size, values)
    checkpoint = open_checkpoint(Path(folder))
    load_into(checkpoint, into, ranks=Ranks.create())
    for name, value in into.items():
        for got, want in zip(value.pieces, expected[name].pieces, strict=True):
            assert torch.equal(got.tensor, want.tensor), name
    rng = checkpoint.rng(rank, world_size)
    if world_size == checkpoint.manifest.world_size:
        assert rng is not None and rng["torch_cpu"].tolist() == [rank] * 4
    else:
        assert rng is None
    return sum(value.num_local_bytes for value in into.values())


def save_here(folder: Path, values: dict[str, ShardedValue], step: int = 7) -> None:
    CheckpointWriter(Ranks()).save(folder, Contents(values=values, state=TrainState(step=step)))


@pytest.mark.parametrize("background", [False, True])
def test_one_process_without_a_process_group(tmp_path, background):
    folder = tmp_path / "step_00000007"
    save_worker(0, 1, str(folder), "full", background)
    load_worker(0, 1, str(folder), "full")
    checkpoint = open_checkpoint(folder)
    assert (checkpoint.step, checkpoint.state().tokens, checkpoint.recipe()) == (7, 99, "[run]\n")
    assert (tmp_path / "latest").read_text() == "step_00000007\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000007"]


@pytest.mark.parametrize(
    ("save_layout", "save_ranks", "load_layout", "load_ranks"),
    [("flat", 4, "rows", 2), ("rows", 4, "flat", 4), ("rows", 2, "flat", 4), ("full", 4, "rows", 4)],
)
def test_any_pieces_to_any_pieces(tmp_path, save_layout, save_ranks, load_layout, load_ranks):
    folder = str(tmp_path / "step_00000007")
    sizes = run(save_worker, save_ranks, folder, save_layout, True)
    run(load_worker, load_ranks, folder, load_layout)
    load_worker(0, 1, folder, "full")
    if save_layout == "full":
        # every rank holds everything, and it is written once all the same: 2 float tensors of 28 kB and little else
        assert sum(sizes) < 2 * 1003 * 7 * 4 + 40_000


def test_torch_reads_it_with_its_own_tool(tmp_path):
    folder = tmp_path / "step_00000007"
    save_here(folder, flat_pieces(0, 1, full_values()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(folder, tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt")
    for name, tensor in full_values().items():
        assert torch.equal(found[name], tensor), name


def test_large_pieces_are_cut_into_blocks_alike_on_every_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(planner, "BLOCK_BYTES", 1000)
    folder = tmp_path / "step_00000007"
    save_here(folder, full_pieces(0, 1, full_values()))
    saved = open_checkpoint(folder).tensors()["model/embed"]
    assert len(saved.chunks) == -(-1003 // (1000 // 28))
    into = full_pieces(0, 1, zeroed(full_values()))
    load_into(open_checkpoint(folder), into)
    assert torch.equal(into["model/embed"].pieces[0].tensor, full_values()["model/embed"])


def test_all_differences_are_listed_and_nothing_is_written(tmp_path):
    folder = tmp_path / "step_00000007"
    save_here(folder, full_pieces(0, 1, full_values()))
    into = full_pieces(0, 1, zeroed(full_values()))
    del into["model/bias"], into["model/conv"]
    into["model/new"] = ShardedValue.from_full(torch.zeros(2))
    into["model/embed"] = ShardedValue.from_full(torch.zeros(1003, 8))
    with pytest.raises(CheckpointError) as caught:
        load_into(open_checkpoint(folder), into)
    text = str(caught.value)
    for part in ("4 differences", "missing: model/new [2]", "unexpected: model/bias [3]", "unexpected: model/conv"):
        assert part in text
    assert "shape: model/embed is [1003, 7] there and [1003, 8] here" in text
    assert not into["model/scale"].pieces[0].tensor.any()


def test_weights_only(tmp_path):
    folder = tmp_path / "step_00000007"
    save_here(folder, full_pieces(0, 1, full_values()))
    into = full_pieces(0, 1, zeroed({n: t for n, t in full_values().items() if n.startswith("model/")}))
    load_into(open_checkpoint(folder), into, ignore=("optim/",))
    assert torch.equal(into["model/embed"].pieces[0].tensor, full_values()["model/embed"])


def test_dtypes_are_converted_to_those_of_the_pieces(tmp_path):
    folder = tmp_path / "step_00000007"
    values = {"model/a": torch.randn(5)}
    save_here(folder, full_pieces(0, 1, values))
    half = torch.zeros(5, dtype=torch.bfloat16)
    load_into(open_checkpoint(folder), {"model/a": ShardedValue.from_full(half)})
    assert torch.equal(half, values["model/a"].bfloat16())


def test_a_part_that_no_rank_holds_is_refused(tmp_path):
    value = ShardedValue.from_flat_range(torch.ones(5), (2, 3), 0)
    with pytest.raises(CheckpointError, match="no rank holds all of model/a"):
        save_here(tmp_path / "step_00000001", {"model/a": value})
    assert list(tmp_path.iterdir()) == []


def test_the_same_step_is_replaced(tmp_path):
    folder = tmp_path / "step_00000007"
    for number in (1.0, 2.0):
        save_here(folder, {"model/a": ShardedValue.from_full(torch.full((3,), number))})
    into = torch.zeros(3)
    load_into(open_checkpoint(folder), {"model/a": ShardedValue.from_full(into)})
    assert into.tolist() == [2.0] * 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000007"]


def test_a_second_save_waits_and_host_memory_is_reused(tmp_path):
    writer = CheckpointWriter(Ranks())
    tensor = torch.zeros(1000)
    addresses = set()
    for step in range(1, 5):
        tensor.fill_(step)
        contents = Contents(values={"model/a": ShardedValue.from_full(tensor)}, state=TrainState(step=step))
        writer.save(tmp_path / f"step_{step:08d}", contents, background=True)
        addresses.add(writer._buffers._slabs[0].data_ptr())
    writer.close()
    assert len(addresses) == 1
    for step in range(1, 5):
        into = torch.zeros(1000)
        load_into(open_checkpoint(tmp_path / f"step_{step:08d}"), {"model/a": ShardedValue.from_full(into)})
        assert into.eq(step).all()


def changing_pieces_worker(rank: int, world_size: int, folder: str) -> None:
    """One rank's pieces change between two saves: everyone must plan anew."""
    ranks = Ranks.create()
    writer = CheckpointWriter(ranks)
    for step, layout in enumerate(("flat", "flat", "rows", "full"), start=1):
        values = LAYOUTS[layout](rank, world_size, full_values())
        if layout == "rows" and rank == 0:
            extra = ShardedValue.from_full(torch.tensor([1.0, 2.0]))
            values["model/of_one_rank"] = extra
        path = Path(folder) / f"step_{step:08d}"
        writer.save(path, Contents(values=values, state=TrainState(step=step)), background=True)
        writer.wait()
        into = LAYOUTS["rows"](rank, world_size, zeroed(full_values()))
        if rank == 1 and layout == "rows":
            into["model/of_one_rank"] = ShardedValue.from_full(torch.zeros(2))
        load_into(open_checkpoint(path), into, ranks=ranks)
        expected = LAYOUTS["rows"](rank, world_size, full_values())
        for name, value in expected.items():
            for got, want in zip(into[name].pieces, value.pieces, strict=True):
                assert torch.equal(got.tensor, want.tensor), (step, name)
        if rank == 1 and layout == "rows":
            assert into["model/of_one_rank"].pieces[0].tensor.tolist() == [1.0, 2.0]
    writer.close()


def test_pieces_may_change_between_saves_and_ranks_may_hold_different_names(tmp_path):
    run(changing_pieces_worker, 3, str(tmp_path))


def full_disk_worker(rank: int, world_size: int, folder: str, background: bool) -> str:
    """A file size limit on one rank stands for a full disk: write() fails in the middle of a tensor."""
    writer = CheckpointWriter(Ranks.create())
    tensor = torch.arange(400_000, dtype=torch.float32)
    size = -(-tensor.numel() // world_size)
    part = tensor[rank * size : (rank + 1) * size].clone()
    value = ShardedValue.from_flat_range(part, tensor.shape, rank * size)

    def contents(step: int) -> Contents:
        return Contents(values={"model/a": value}, state=TrainState(step=step))

    writer.save(Path(folder) / "step_00000001", contents(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        if rank == world_size - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        writer.save(Path(folder) / "step_00000002", contents(2), background=background)
        writer.wait()
        text = "nothing was raised"
    except CheckpointError as error:
        text = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert torch.equal(part, tensor[rank * size : (rank + 1) * size])
    writer.save(Path(folder) / "step_00000003", contents(3), background=background)
    writer.close()
    return text


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_full_disk_is_an_error_on_every_rank_and_leaves_nothing(tmp_path, world_size, background):
    for text in run(full_disk_worker, world_size, str(tmp_path), background):
        assert "Writing " in text and "step_00000002 failed." in text
        assert f"rank {world_size - 1}: " in text
        assert "Free space on the disk" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000001", "step_00000003"]


def test_an_unwritable_folder_is_named(tmp_path):
    (tmp_path / "checkpoints").write_text("a file in the way")
    with pytest.raises(CheckpointError, match="step_00000001"):
        save_here(
            tmp_path / "checkpoints" / "step_00000001", {"model/a": ShardedValue.from_full(torch.ones(1))}, step=1
        )


def test_pieces_that_others_save_are_loaded_only(tmp_path):
    folder = tmp_path / "step_00000007"
    own = ShardedValue.from_full(torch.arange(6.0))
    copy = torch.full((4,), -1.0)
    pieces = (*own.pieces, Piece(offsets=(1,), tensor=copy, saved=False))
    value = ShardedValue(global_shape=torch.Size([6]), dtype=torch.float32, pieces=pieces)
    save_here(folder, {"model/w": value})
    load_into(open_checkpoint(folder), {"model/w": value})
    assert copy.tolist() == [1.0, 2.0, 3.0, 4.0]
