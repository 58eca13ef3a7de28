"""Where documents begin in rows that lie one behind the other."""

from __future__ import annotations

import pytest
import torch

from paceline.data.boundaries import ROOMS, document_boundaries
from paceline.data.loader import collate
from paceline.data.sources import Sample


def test_first_tokens_through_all_rows() -> None:
    documents = torch.tensor([[0, 0, 1, 1, 1, 4], [2, 2, 2, 2, 2, 2]], dtype=torch.int32)
    found = document_boundaries(documents)
    assert found is not None and found.dtype == torch.int32 and found.shape == (ROOMS[0] + 1,)
    # a row begins a document also where the row before ends with the same number
    assert found.tolist() == [0, 2, 5, 6] + [12] * (ROOMS[0] - 3)
    same = torch.zeros(2, 4, dtype=torch.int32)
    found = document_boundaries(same)
    assert found is not None and found[:3].tolist() == [0, 4, 8]


@pytest.mark.parametrize(("documents", "room"), [(64, 64), (65, 128), (129, 256), (256, 256), (257, None)])
def test_few_sizes(documents: int, room: int | None) -> None:
    found = document_boundaries(torch.arange(documents).repeat_interleave(2)[None])
    if room is None:
        assert found is None
        return
    assert found is not None and len(found) == room + 1
    assert found[:documents].tolist() == list(range(0, 2 * documents, 2)) and set(found[documents:].tolist()) == {
        2 * documents
    }


def test_a_number_that_comes_again_has_no_boundaries() -> None:
    assert document_boundaries(torch.tensor([[0, 0, 1, 0]])) is None


def test_a_batch_has_them_where_it_has_documents() -> None:
    row = torch.tensor([3, 4, 5, 6])
    plain = Sample(tokens=row.numpy(), labels=row.numpy())
    assert collate([plain]).boundaries is None and "boundaries" not in collate([plain]).places
    numbered = plain._replace(documents=torch.tensor([0, 0, 1, 1], dtype=torch.int32).numpy())
    batch = collate([numbered, numbered])
    assert batch.boundaries is not None and batch.boundaries[:5].tolist() == [0, 2, 4, 6, 8]
    assert batch.places["boundaries"] is batch.boundaries and batch.to("meta").boundaries is not None
