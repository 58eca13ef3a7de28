"""A task that fits neither model nor data is refused by name, before anything starts."""

from __future__ import annotations

import pytest

from paceline.config.adapters import adapter_notes
from paceline.config.check import check, refuse_errors
from paceline.config.load import resolve
from paceline.config.task import TASK_KINDS
from paceline.errors import ConfigError

SMALL = ("model.preset=tiny_llama", "data.train=rows.jsonl", "train.seq_len=64")


def findings(*sets: str) -> dict[str, str]:
    """Id -> subject, evidence and next step."""
    resolved = resolve({}, [*SMALL, *sets])
    return {
        found.id: f"{found.subject}\n{found.evidence}\n{found.next_step}"
        for found in check(resolved.config, resolved.registry, 1)
        if found.severity == "error" or found.id == "config.idle-option"
    }


@pytest.mark.parametrize("kind", TASK_KINDS)
def test_every_kind_is_known(kind: str) -> None:
    assert findings(f"task.kind={kind}", *(("model.head=score",) if kind == "reward" else ())) == {}


@pytest.mark.parametrize(
    ("sets", "id_", "says"),
    [
        (("task.kind=reward",), "config.task-score", "model.head = 'score'"),
        (("task.kind=dpo", "model.head=score"), "config.task-score", "task.kind = 'reward'"),
        (
            ("task.kind=reward", "model.head=score", "observe.sample_prompts=Hello"),
            "config.task-score",
            "observe.sample_prompts",
        ),
        (
            ("task.kind=dpo", "task.precompute_reference=true", "task.reference=there"),
            "config.task-reference",
            "model.init_from",
        ),
        (("task.kind=kto", "task.reference=none"), "config.task-reference", "Leave task.reference out"),
        (("task.kind=orpo", "data.train=synthetic"), "config.task-data", "pairs of answers"),
        (("task.kind=kto", "data.train=synthetic"), "config.task-data", "judged answers"),
        (("task.kind=dpo", "model.mtp_layers=1"), "config.task-mtp", "model.mtp_layers = 0"),
        (("task.kind=ppo",), "config.not-yet", "pretrain, sft, dpo, orpo, kto, reward"),
    ],
)
def test_what_does_not_fit_is_refused(sets: tuple[str, ...], id_: str, says: str) -> None:
    found = findings(*sets)
    assert says in found[id_], found
    resolved = resolve({}, [*SMALL, *sets])
    with pytest.raises(ConfigError):
        refuse_errors(check(resolved.config, resolved.registry, 1))


@pytest.mark.parametrize(
    "sets",
    [
        ("task.beta=0.2",),
        ("task.kind=sft", "task.dpo_loss=ipo"),
        ("task.kind=dpo", "task.dpo_loss=ipo", "task.label_smoothing=0.1"),
        ("task.kind=orpo", "task.reference=somewhere"),
        ("task.kind=dpo", "task.reference=none", "task.precompute_reference=true"),
        ("task.kind=dpo", "task.orpo_nll=answer"),
        ("task.kind=dpo", "task.desirable_weight=2"),
        ("task.kind=dpo", "task.center_rewards=0.1"),
    ],
)
def test_what_changes_nothing_is_said(sets: tuple[str, ...]) -> None:
    assert sets[-1].partition("=")[0] in findings(*sets)["config.idle-option"]


def test_numbers_have_bounds() -> None:
    for wrong in ("task.beta=0", "task.label_smoothing=0.5", "task.neftune_alpha=-1", "task.dpo_loss=kto_pair"):
        with pytest.raises(ConfigError, match="task"):
            resolve({}, [*SMALL, wrong])


@pytest.mark.parametrize(
    ("sets", "is_told"),
    [
        (("task.kind=dpo", "lora.init_adapter=there"), True),
        (("task.kind=kto", "lora.init_adapter=there"), True),
        (("task.kind=dpo",), False),
        (("task.kind=orpo", "lora.init_adapter=there"), False),
        (("task.kind=dpo", "lora.init_adapter=there", "task.reference=other"), False),
    ],
)
def test_a_reference_without_the_adapter_that_a_run_begins_with_is_told(sets: tuple[str, ...], is_told: bool) -> None:
    resolved = resolve({}, [*SMALL, "lora.rank=4", "model.init_from=base", *sets])
    found = {finding.id: finding.severity for finding in adapter_notes(resolved.config)}
    assert found == ({"config.lora-reference": "note"} if is_told else {})
