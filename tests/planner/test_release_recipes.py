"""Rows of Megatron Bridge's own tables get what the release's recipe of that layout says."""

from __future__ import annotations

from paceline.planner.published import PublishedRun, read_run
from paceline.planner.release_recipes import with_release
from paceline.planner.run_tables import COLUMNS

_ROW = dict.fromkeys(COLUMNS, "") | {
    "id": "mine", "source": "NVIDIA-NeMo/Megatron-Bridge performance-summary.md [26.08 NeMo Container / Pre-Training]",
    "model": "DeepSeekV3", "layers": "61", "hidden": "7168", "heads": "128", "ffn": "2048", "vocab": "129280",
    "experts": "256", "topk": "8", "seq": "4096", "gpu": "GB200", "n_gpus": "256", "precision": "mxfp8", "tp": "1",
    "pp": "4", "vpp": "4", "cp": "1", "ep": "64", "mbs": "1", "gbs": "4096", "tokens_per_s_per_gpu": "4500",
    "notes": "precision as printed: MXFP8",
}  # fmt: skip


def test_what_a_table_does_not_print() -> None:
    found = read_run(_ROW)
    assert isinstance(found, PublishedRun), found
    work = found.workload
    assert (work.recompute, work.recompute_modules) == ("selective", ("mla_up_proj",))
    assert work.dispatcher_permutes and work.expert_epilogues and work.fp8_head and not work.fp8_attention


def test_what_a_row_says_itself_holds() -> None:
    assert with_release(_ROW | {"recompute": "full"})["recompute"] == "full"
    known = with_release(_ROW)
    assert with_release(known)["notes"] == known["notes"], "words are not added twice"


def test_other_layouts_and_releases_are_left_as_they_are() -> None:
    for change in ({"mbs": "2"}, {"source": "Megatron Bridge [25.01 NeMo Container]"}, {"source": "Megatron Bridge"}):
        assert with_release(_ROW | change) == _ROW | change
