"""What the router sees of sequences that are cut: whole ones, in order, whatever the layout."""

from __future__ import annotations

from itertools import product

import torch

from distributed import run
from paceline.config.parallel import ParallelConfig
from paceline.parallel.expert.sequence import CutSequences
from paceline.parallel.mesh import ParallelMesh
from paceline.parallel.sequence import SequenceLayout
from tests.parallel.expert.layers import own_part

LAYOUTS = [{"cp": cp, "tp": 4 // cp, "cp_method": method} for cp, method in product((1, 2, 4), ("ring", "ulysses"))]


def test_whole_sequences_in_order_and_back() -> None:
    run(_check_gather, 4)


def _check_gather(rank: int, world_size: int) -> None:
    generator = torch.Generator().manual_seed(1)
    whole = torch.randint(5, (3, 16, 2), generator=generator)
    for fields in LAYOUTS:
        config = ParallelConfig(**fields)
        mesh = ParallelMesh(config, world_size=world_size, rank=rank, device_type="cpu")
        layout = SequenceLayout(config.cp, config.cp_method)
        view = CutSequences(mesh, layout)
        assert view.parts == 4
        own = own_part(whole, mesh, layout)
        for _ in range(2):  # the second time from what was kept
            assert torch.equal(view.gather(own), whole), fields
            assert torch.equal(view.local(whole), own), fields
        assert torch.equal(view.sum_over_parts(own.sum(1)), whole.sum(1))
        assert mesh.traffic.calls == {"cp_tp/router/all_gather": 2, "cp_tp/router/all_reduce": 1}
