"""Do the degrees fit the sizes? Each rule refuses a bad value with its reason and takes the good one beside it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paceline.report.finding import Finding

MOE = ("model.num_experts=4", "model.top_k=2")
BATCH = "train.global_batch_size=64"
CASE_76 = (
    "model.hidden_size=56",
    "model.num_heads=28",
    "model.num_kv_heads=4",
    "model.head_dim=2",
    "model.ffn_size=56",
)

RULES = [
    # id, ranks, company, bad, good, in the subject, in the reason, in the next step
    ("config.tp-heads", 12, (), "tp=3", "tp=2", "tp = 3 does not divide model.num_heads = 4", "whole heads", "tp = 2"),
    (
        "config.tp-kv-heads",
        12,
        ("model.num_heads=12", "model.num_kv_heads=4", "model.head_dim=16", "model.ffn_size=96", "train.seq_len=96"),
        "tp=3",
        "tp=4",
        "parallel.tp = 3 and model.num_kv_heads = 4",
        "tp = 12 each KV head is on 3 ranks; tp = 3, 6 divide the query heads only",
        "parallel.tp = 2",
    ),
    ("config.tp-width", 4, ("model.ffn_size=130",), "tp=4", "tp=2", "model.ffn_size = 130", "equal part", "tp = 2"),
    (
        "config.tp-width",
        4,
        (*MOE, "model.moe.ffn_size=64", "model.moe.num_shared_experts=3", "model.moe.shared_ffn_size=2"),
        "tp=4",
        "tp=2",
        "the shared experts = 6",
        "equal part",
        "tp = 2",
    ),
    ("config.tp-vocabulary", 4, ("model.vocab_size=3",), "tp=4", "tp=2", "vocab_size = 3", "rows", "tp = 2"),
    ("config.sequence-parts", 4, ("train.seq_len=1022",), "tp=4", "tp=2", "multiple of 4", "tp = 4", "1020 and 1024"),
    (
        "config.sequence-parts",
        4,
        ("train.seq_len=1020",),
        "cp=4",
        "cp=2",
        "multiple of 8",
        "2 * cp = 8",
        "1016 and 1024",
    ),
    (
        "config.sequence-parts",
        8,
        ("train.seq_len=1020", "parallel.cp_method=ulysses", "parallel.tp=2"),
        "cp=4",
        "cp=2",
        "parallel.cp = 4 and parallel.tp = 2",
        "tp = 2 equal parts",
        "1016 and 1024",
    ),
    (
        "config.ulysses-heads",
        8,
        ("parallel.cp_method=ulysses", "parallel.tp=2"),
        "cp=4",
        "cp=2",
        "the 2 heads of a rank",
        "num_heads = 4",
        "parallel.cp_method = 'ring'",
    ),
    ("config.ep-dense", 4, (), "ep=2", "ep=1", "ep = 2 without experts", "has none", "parallel.ep = 1"),
    ("config.etp-dense", 4, (), "etp=2", "etp=1", "etp = 2 without experts", "has none", "parallel.tp"),
    ("config.expert-ranks", 4, MOE, "ep=8", "ep=4", "= 8 does not divide the 4", "4 / pp 1", "1, 2, 4"),
    ("config.ep-experts", 12, MOE, "ep=3", "ep=2", "num_experts = 4", "whole experts", "1, 2, 4"),
    ("config.etp-width", 4, (*MOE, "model.moe.ffn_size=6"), "etp=4", "etp=2", "ffn_size = 6", "equal part", "1, 2 on"),
]


@pytest.mark.parametrize(("id_", "ranks", "company", "bad", "good", "subject", "reason", "step"), RULES)
def test_a_bad_degree_is_refused_and_its_good_neighbour_is_not(
    findings: Callable[..., list[Finding]],
    id_: str,
    ranks: int,
    company: tuple[str, ...],
    bad: str,
    good: str,
    subject: str,
    reason: str,
    step: str,
) -> None:
    batch = "train.global_batch_size=48"
    found = [finding for finding in findings(ranks, batch, *company, f"parallel.{bad}") if finding.id == id_]
    assert len(found) == 1 and found[0].severity == "error"
    assert subject in found[0].subject and reason in found[0].evidence and step in found[0].next_step
    assert [f for f in findings(ranks, batch, *company, f"parallel.{good}") if f.severity == "error"] == []


def test_28_heads_over_8_ranks(findings: Callable[..., list[Finding]]) -> None:
    """Case 76 of the collection of public problems."""
    (refused,) = findings(64, BATCH, *CASE_76, "parallel.tp=8")
    assert "28" in refused.subject
    assert "tp = 1, 2, 4 give each rank whole KV heads (model.num_kv_heads = 4)" in refused.evidence
    assert "with tp = 28 each KV head is on 7 ranks" in refused.evidence
    assert "tp = 7, 14 divide the query heads only and are refused" in refused.evidence
    assert "parallel.pp" in refused.next_step and "dp_shard" in refused.next_step
    assert "--set parallel.tp=4;" in refused.next_step
    assert [f.id for f in findings(7, "train.global_batch_size=7", "train.seq_len=56", *CASE_76, "parallel.tp=7")] == [
        "config.tp-kv-heads"
    ]


@pytest.mark.parametrize("tp", [1, 2, 4, 28])
def test_28_heads_over_what_fits(findings: Callable[..., list[Finding]], tp: int) -> None:
    local = ("train.seq_len=56", "cluster.gpus_per_node=64")
    assert findings(28, "train.global_batch_size=28", *CASE_76, *local, f"parallel.tp={tp}") == []


def test_latent_attention_has_no_key_value_heads_to_share(findings: Callable[..., list[Finding]]) -> None:
    assert findings(4, "model.preset=tiny_deepseek", "train.seq_len=64", "parallel.tp=4") == []


def test_a_vocabulary_need_not_divide(findings: Callable[..., list[Finding]]) -> None:
    assert findings(4, "model.vocab_size=101", "parallel.tp=4") == []


def test_experts_fold_over_all_ranks_of_a_stage(findings: Callable[..., list[Finding]]) -> None:
    spread = ("parallel.tp=2", "parallel.cp=2", "parallel.pp=2")
    assert findings(8, *MOE, *spread, "parallel.ep=4") == []
    assert findings(8, *MOE, *spread, "parallel.ep=2", "parallel.etp=2") == []


def test_the_nearest_batch_sizes_are_of_the_data_parallel_ranks(findings: Callable[..., list[Finding]]) -> None:
    (refused,) = findings(8, "parallel.tp=2", "train.global_batch_size=6")
    assert "x 4 data-parallel ranks" in refused.subject and "4 and 8" in refused.next_step
