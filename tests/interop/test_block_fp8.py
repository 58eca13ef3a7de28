"""Weights in fp8 with a scale for each block, as DeepSeek-V3 is released."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.interop.convert import Options, convert
from paceline.interop.links import blocks
from paceline.interop.sources import open_source
from tests.interop import hub_folders as hub

BLOCK = (24, 20)
QUANTIZED = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": list(BLOCK),
}


def quantize(value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(fp8, scales, what they stand for), block by block."""
    rows, columns = (-(-size // block) for size, block in zip(value.shape, BLOCK, strict=True))
    fp8, scales = torch.empty_like(value, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    meant = torch.empty_like(value, dtype=torch.bfloat16)
    for i in range(rows):
        for j in range(columns):
            place = (slice(i * BLOCK[0], (i + 1) * BLOCK[0]), slice(j * BLOCK[1], (j + 1) * BLOCK[1]))
            scales[i, j] = value[place].abs().max() / 448
            fp8[place] = (value[place] / scales[i, j]).to(torch.float8_e4m3fn)
            meant[place] = (fp8[place].float() * scales[i, j]).bfloat16()
    return fp8, scales, meant


@pytest.fixture
def folder(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """The folder, and the bf16 tensors that it stands for."""
    source = hub.save("deepseek_v3", tmp_path / "fp8", torch.bfloat16)
    stored: dict[str, Tensor] = {}
    meant = hub.tensors(source)
    for name, value in hub.tensors(source).items():
        if value.dim() == 2 and ("proj" in name or "kv_" in name) and "layers" in name:
            stored[name], stored[f"{name}_scale_inv"], meant[name] = quantize(value.float())
    assert len(stored) > 40
    hub.change_tensors(source, **stored)
    hub.change_config(source, quantization_config=QUANTIZED)
    return source, meant


def test_they_are_read_as_bf16(folder: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    source, meant = folder
    opened = open_source(source)
    assert any("fp8" in note for note in opened.notes)
    convert(opened, tmp_path / "ours", Options(to="paceline"))
    convert(open_source(tmp_path / "ours"), tmp_path / "back", Options(to="hf"))
    assert hub.same(hub.tensors(tmp_path / "back"), meant)
    assert "quantization_config" not in json.loads((tmp_path / "back/config.json").read_text())


def test_any_box_has_the_right_scales(folder: tuple[Path, dict[str, Tensor]]) -> None:
    weights = open_source(folder[0]).weights
    for name, shape in weights.shapes().items():
        whole = weights.read(name)
        for box in blocks(shape, 2, 2 * 7 * 11):
            part = whole
            for dim, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                part = part.narrow(dim, start, size)
            assert torch.equal(weights.read(name, box), part)


def test_what_does_not_fit_is_named(folder: tuple[Path, dict[str, Tensor]]) -> None:
    source = folder[0]
    name = "model.layers.0.mlp.up_proj.weight"
    scale = hub.tensors(source)[f"{name}_scale_inv"]
    for given, message in ((None, "has no scale"), (scale[:1], r"_scale_inv is \[1, 4\], \[4, 4\] is needed")):
        hub.change_tensors(source, **{f"{name}_scale_inv": given})
        with pytest.raises(CheckpointError, match=message):
            open_source(source)
    hub.change_config(source, quantization_config=QUANTIZED | {"weight_block_size": None})
    with pytest.raises(CheckpointError, match=r"are quantized \(fp8\)"):
        open_source(source)
