"""Faults of other converters, which must not be ours: what their users reported, as tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.checkpoint.weights import fill
from paceline.generate.load import empty_model
from paceline.interop.compare import plain_model
from paceline.interop.sources import open_source
from tests.interop import hub_folders as hub
from tests.models.hf_reference import VOCAB, Family

CPU = torch.device("cpu")
FAR = torch.tensor([0, 1, 2, 10, 11, 500, 999, 1000, 4000, 4001, 7999, 8000])
"""Positions with gaps: a rotary base or factor that is lost shows only far from a token."""


def far_llama(factor: float) -> Family:
    rope = hub.LLAMA3 | {"factor": factor, "original_max_position_embeddings": 8192}
    family = hub.VARIANTS["llama3"]
    return replace(family, hf=family.hf | {"rope_parameters": rope, "max_position_embeddings": 16384})


def logits_of_both(family: Family, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    theirs = family.reference().float().eval()
    theirs.save_pretrained(folder)
    ours = plain_model(open_source(folder), torch.float32)
    tokens = torch.randint(2, VOCAB, (2, len(FAR)), generator=torch.Generator().manual_seed(3))
    positions = FAR.expand(2, -1)
    with torch.no_grad():
        # with a mask, so that Transformers does not take the gaps for the ends of packed documents
        expected = theirs(input_ids=tokens, position_ids=positions, attention_mask=torch.ones_like(tokens)).logits
        return ours(tokens, positions=positions).logits, expected


def test_rope_scaling_holds_eight_thousand_tokens_away(tmp_path: Path) -> None:
    """NVIDIA/Megatron-LM#6305: a factor of 32 was read as 8."""
    found = {}
    for factor in (8.0, 32.0):
        ours, theirs = logits_of_both(far_llama(factor), tmp_path / str(factor))
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        found[factor] = ours
        model = plain_model(open_source(tmp_path / str(factor)), torch.float32)
        assert model.rope is not None
        found[-factor] = model.rope.inv_freq(CPU)
    assert not torch.allclose(found[-8.0], found[-32.0])
    assert (found[8.0] - found[32.0])[:, -1].abs().max() > 1e-3  # the test would see it


@pytest.mark.parametrize("name", hub.VARIANTS)
def test_every_number_of_a_model_is_written(name: str, tmp_path: Path) -> None:
    """NVIDIA/Megatron-LM#5844: experts stayed at random, unsaid."""
    opened = open_source(hub.save(name, tmp_path / "hf"))
    model, into = empty_model(opened.model, device=CPU, dtype=torch.float32)
    for value in into.values():
        for piece in value.pieces:
            piece.tensor.fill_(float("nan"))
    assert any(parameter.isnan().any() for parameter in model.parameters())
    fill(opened.weights, into)
    left = [key for key, value in model.state_dict().items() if value.isnan().any()]
    assert left == []
