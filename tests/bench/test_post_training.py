"""Both sides of the fine-tuning bench do the same work on the same rows; its page judges speed and memory together."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.config.check import check, refuse_errors
from paceline.config.load import load_recipe
from paceline.config.lora import LoraConfig
from paceline.config.run import RunConfig
from paceline.data.batch import Batch
from paceline.training.feed import open_datasets

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "bench"))

import post_training  # noqa: E402
import post_training_baseline as baseline  # noqa: E402
import post_training_data  # noqa: E402
import post_training_jobs  # noqa: E402
import post_training_report  # noqa: E402
import runner  # noqa: E402
from post_training_jobs import PARTS, TINY, Job, jobs_of  # noqa: E402

BOTH = pytest.mark.parametrize("one_gpu", [False, True])


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def config_of(job: Job) -> RunConfig:
    loaded = load_recipe(job.recipe, list(job.sets))
    refuse_errors(check(loaded.config, loaded.registry, job.processes))
    return loaded.config


# ---- jobs


@BOTH
def test_every_job_may_run_and_both_sides_do_the_same(one_gpu: bool) -> None:
    jobs = [job for part in PARTS for job in jobs_of(part, one_gpu=one_gpu)]
    assert len({job.key for job in jobs}) == len(jobs)
    works: dict[str, list[Job]] = {}
    for job in jobs:
        assert job.processes == 1 or not one_gpu
        if job.kind != "convert":
            works.setdefault(job.work, []).append(job)
            config_of(post_training_jobs.tiny(job))
    assert works.keys() == post_training_jobs.works(one_gpu=one_gpu).keys()
    for work, entries in works.items():
        assert {job.kind for job in entries} == {"train", "baseline"}, work
        first = config_of(entries[0])
        assert first.task.kind == "sft" and first.data.packing == "pack" and first.optim.name == "adamw"
        for job in entries:
            config = config_of(job)
            assert (config.model, config.data, config.run.seed) == (first.model, first.data, first.run.seed)
            same = ("seq_len", "micro_batch_size", "global_batch_size")
            assert [getattr(config.train, name) for name in same] == [getattr(first.train, name) for name in same]
            assert config.lora.model_copy(update={"base": "bf16"}) == first.lora
            sequences = config.train.global_batch_size // job.processes
            assert sequences == post_training_jobs.ACCUMULATION * config.train.micro_batch_size
    named = {(work, job.precision) for work, entries in works.items() for job in entries if job.kind == "train"}
    assert named >= {key for key in post_training_report.TARGETS if not (one_gpu and key[0] == "lora_2")}


# ---- data


def test_conversations_are_the_same_each_time_and_fill_rows(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    post_training_data.write(folder, vocab=512, seq_len=256, rows=16, whole=False)
    before = (folder / "rows.jsonl").read_bytes()
    (folder / "made.json").unlink()
    post_training_data.write(folder, vocab=512, seq_len=256, rows=16, whole=False)
    assert (folder / "rows.jsonl").read_bytes() == before
    sets = [item.replace(TINY.folder, str(folder)) for item in TINY.sets()]
    tiny = post_training_jobs.tiny(jobs_of("lora")[0])
    loaded = load_recipe(tiny.recipe, [*tiny.sets, *sets])
    rows = open_datasets(loaded.config, loaded.registry, train_samples=8).train
    samples = [rows[index] for index in range(8)]
    for sample in samples:
        assert sample.tokens.max() < 512 and len(sample.tokens) == 256
        assert sample.documents is not None and sample.positions is not None
        assert (sample.labels == -100).any(), "what the user says has no loss"
    assert sum(len(set(sample.documents.tolist())) for sample in samples if sample.documents is not None) > 8, "packed"
    post_training_data.write(folder, vocab=512, seq_len=256, rows=16, whole=True)
    whole = open_datasets(loaded.config, loaded.registry, train_samples=8).train[0]
    assert whole.documents is not None and set(whole.documents.tolist()) == {0}, "one conversation, to the last token"
    # an answer is seven tenths of a turn, and rows are nearly full
    assert 0.5 < sum((sample.labels != -100).sum() for sample in samples) / (8 * 256) < 0.75


def test_lengths_are_those_that_the_page_claims() -> None:
    rows = list(post_training_data.conversations(vocab=1000, seq_len=8192, rows=200, whole=False))
    lengths = torch.tensor([sum(len(turn["content"].split()) for turn in row["messages"]) for row in rows])
    assert 480 < lengths.float().median() < 600 and 780 < lengths.float().mean() < 1000
    whole = next(post_training_data.conversations(vocab=1000, seq_len=8192, rows=1, whole=True))
    assert sum(len(turn["content"].split()) for turn in whole["messages"]) == 8192 - post_training_data.MARKS


# ---- the baseline


def packed() -> Batch:
    """Two rows of three and of two documents; answers alone have labels."""
    generator = torch.Generator().manual_seed(0)
    documents = torch.tensor([[0] * 9 + [1] * 14 + [2] * 9, [0] * 20 + [1] * 12], dtype=torch.int32)
    labels = torch.randint(97, (2, 32), generator=generator)
    labels[:, ::3] = -100
    positions = torch.stack(
        [torch.cat([torch.arange(int((row == d).sum())) for d in row.unique()]) for row in documents]
    )
    tokens = torch.randint(97, (2, 32), generator=generator)
    return Batch(tokens=tokens, labels=labels, positions=positions, documents=documents)


def test_documents_of_a_row_do_not_see_each_other_in_the_baseline() -> None:
    """A packed row's loss is that of its documents, each alone."""
    transformers = pytest.importorskip("transformers")
    tiny = post_training_jobs.tiny(next(job for job in jobs_of("full") if job.kind == "baseline"))
    torch.manual_seed(0)
    shape = baseline.config_of(transformers, config_of(tiny).model)
    model = transformers.AutoModelForCausalLM.from_config(
        shape, dtype=torch.float32, attn_implementation="sdpa"
    ).train()
    batch = packed()
    assert batch.documents is not None
    labels = batch.num_tokens()
    alone = torch.zeros(())
    for row in range(2):
        one = Batch(
            tokens=batch.tokens[row : row + 1], labels=batch.labels[row : row + 1], documents=batch.documents[:1],
            positions=None if batch.positions is None else batch.positions[row : row + 1],
        )  # fmt: skip
        together = baseline.loss_of(model, one, labels)
        apart = torch.zeros(())
        for document in batch.documents[row].unique():
            inside = batch.documents[row] == document
            piece = Batch(tokens=one.tokens[:, inside], labels=one.labels[:, inside])
            apart += baseline.loss_of(model, piece, labels)
        torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-6)
        alone += apart
    assert alone > 0


def plain_varlen(
    query: Tensor, key: Tensor, value: Tensor, begins: Tensor, ends: Tensor, most: int, of_keys: int, **options: Any
) -> Tensor:
    """What the kernel of PyTorch, which is CUDA's, computes: causal attention of each span, grouped heads."""
    assert begins is ends and most == of_keys == int((begins[1:] - begins[:-1]).max())
    assert options.get("window_size") == (-1, 0) or options.get("is_causal")
    pieces = []
    for begin, end in zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True):
        q, k, v = (each[begin:end].transpose(0, 1)[None] for each in (query, key, value))
        found = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=options["scale"], enable_gqa=True
        )
        pieces.append(found[0].transpose(0, 1))
    return torch.cat(pieces)


def test_attention_over_documents_is_that_of_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Transformers' own model, whose kernel on a GPU a plain one stands for here."""
    transformers = pytest.importorskip("transformers")
    tiny = post_training_jobs.tiny(next(job for job in jobs_of("full") if job.kind == "baseline"))
    shape, batch = baseline.config_of(transformers, config_of(tiny).model), packed()
    assert batch.documents is not None and shape.num_attention_heads != shape.num_key_value_heads
    starts, longest = baseline.spans(batch.documents)
    assert starts.tolist() == [0, 9, 23, 32, 52, 64] and starts.dtype == torch.int32 and longest == 20
    attention = baseline.DocumentAttention.known_to(transformers)
    calls: list[int] = []

    def counted(*arguments: Any, **options: Any) -> Tensor:
        calls.append(1)
        return plain_varlen(*arguments, **options)

    monkeypatch.setattr(attention, "_attend", counted)
    losses = {}
    for name in ("sdpa", baseline.VARLEN):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(shape, dtype=torch.float32, attn_implementation=name)
        attention.begin(batch.documents)
        losses[name] = baseline.loss_of(model.train(), batch, batch.num_tokens())
    torch.testing.assert_close(losses["sdpa"], losses[baseline.VARLEN], rtol=1e-5, atol=1e-6)
    assert len(calls) == shape.num_hidden_layers
    attention.begin(torch.zeros_like(batch.documents))  # a row is one document: SDPA's own kernels
    baseline.loss_of(model, Batch(tokens=batch.tokens, labels=batch.labels), batch.num_tokens())
    assert len(calls) == shape.num_hidden_layers


def test_adapters_without_peft_leave_all_else_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    torch.manual_seed(0)
    model = torch.nn.ModuleDict(
        {"q_proj": torch.nn.Linear(8, 6, bias=False), "lm_head": torch.nn.Linear(8, 9, bias=False)}
    )
    x = torch.randn(3, 8)
    before = model["q_proj"](x)
    model, version = baseline.add_adapters(model, LoraConfig(rank=2, alpha=4))
    assert version is None
    assert [name for name, each in model.named_parameters() if each.requires_grad] == [
        "q_proj.lora_A.weight",
        "q_proj.lora_B.weight",
    ]
    torch.testing.assert_close(model["q_proj"](x), before)  # type: ignore[index]
    torch.nn.init.ones_(model["q_proj"].lora_B.weight)  # type: ignore[index]
    added = x @ model["q_proj"].lora_A.weight.T @ torch.ones(2, 6) * 2  # type: ignore[index]
    torch.testing.assert_close(model["q_proj"](x), before + added)  # type: ignore[index]


# ---- the page


def record(tokens: float, gib: float) -> dict[str, Any]:
    figures = dict.fromkeys(post_training_report.FIGURES, 1.0)
    return figures | {"tokens_per_second_per_gpu": tokens, "peak_memory_gib": gib}


def entry(kind: str, found: object, work: str, **more: Any) -> dict[str, Any]:
    return {
        "title": kind,
        "kind": kind,
        "processes": 1,
        "work": work,
        "precision": "bf16",
        "layers": 0,
        kind: found,
    } | more


def test_speed_and_memory_are_judged_together_against_the_best_baseline() -> None:
    used = {"used": {"transformers": "5.17.0", "peft": None}}
    entries = {
        "lora/lora_bf16": entry("train", record(1400, 50), "lora"),
        "lora/lora_fp8": entry("train", record(1650, 40), "lora", precision="fp8"),
        "lora/lora_lean": entry("train", record(1390, 59.5), "lora", title="lean"),
        "lora/lora_theirs_none": entry("baseline", record(1000, 59) | used, "lora"),
        "lora/lora_theirs_full": entry("baseline", record(700, 20) | used, "lora"),
        "full/full_theirs_none": {
            **entry("baseline", {}, "full"), "baseline": None, "ran_out": {"said": "CUDA out of memory"},
        },
        "moe/moe_full_bf16": {"title": "x", "failed": ["exit code 1", "boom"]},
        "convert/16gb": {
            "title": "x", "kind": "convert",
            "convert": {
                "gb": 16.0, "disk_gb_per_second": 2.0, "same_bits": True,
                **{f"{name}_gb_per_second": 1.5 for name in post_training_report.CONVERSIONS},
                **{f"{name}_share_of_disk": 0.75 for name in post_training_report.CONVERSIONS},
                **{f"{name}_peak_rss_gib": 4.5 - index for index, name in enumerate(post_training_report.CONVERSIONS)},
            },
        },
    }  # fmt: skip
    text = "\n".join(post_training_report.page({"entries": entries}, one_gpu=False))
    assert "1.40 x of 1.35 x, no more memory: met" in text
    assert "1.65 x of 1.7 x, no more memory: **missed**" in text
    assert "1.39 x of 1.35 x, 0.5 GiB more: **missed**" in text
    assert "Baseline: transformers 5.17.0, peft not installed." in text
    assert "| baseline (`full/full_theirs_none`) | ran out of memory |" in text
    assert "| hf to paceline | 1.50 | 0.75 | 4.50 | **missed** |" in text and "| 3.50 | met |" in text
    assert "`moe/moe_full_bf16`: exit code 1; boom" in text and "moe/moe_lora_bf16" in text
    assert "full/full_theirs_none" not in text.split("Not measured yet")[1].splitlines()[0]


def test_running_out_of_memory_is_a_finding_and_other_ends_are_not(tmp_path: Path) -> None:
    job = next(job for job in jobs_of("full") if job.kind == "baseline")
    (tmp_path / "log").write_text("...\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n")
    assert "CUDA out of memory" in post_training.found_in(job, tmp_path)[0]["ran_out"]["said"]
    (tmp_path / "log").write_text("ConfigError: no\n")
    with pytest.raises(OSError):
        post_training.found_in(job, tmp_path)


@pytest.mark.slow
def test_both_sides_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    line = ["post_training.py", "lora", "--only", "lora_bf16", "lora_theirs_full", "--tiny"]
    monkeypatch.setattr(sys, "argv", [*line, "--results", str(tmp_path), "--work", str(tmp_path / "work")])
    monkeypatch.setattr(runner, "machine", lambda: ({"devices": "test", "versions": {"torch": "0"}}, 0))
    post_training.make_data(sys.argv)
    runner.main(post_training.bench_of(one_gpu=True), "")
    entries = json.loads((tmp_path / "post_training_one_gpu.json").read_text())["entries"]
    assert {key: each.get("failed") for key, each in entries.items()} == dict.fromkeys(entries) and len(entries) == 2
    ours, theirs = entries["lora/lora_bf16"]["train"], entries["lora/lora_theirs_full"]["baseline"]
    assert ours["loss"] == pytest.approx(theirs["loss"], abs=0.1)  # random weights: log of the vocabulary
    assert theirs["used"]["liger"] is None and theirs["recompute"] == "full"
