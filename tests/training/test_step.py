"""An optimizer step is the same however its batch is cut: into micro-batches, over ranks, by masks, by engine."""

from __future__ import annotations

import pytest
import torch

from distributed import run as on_ranks
from tests.training.steps import Job, Log, run_jobs

MOE = ("model.num_experts=4", "model.top_k=2", "model.moe.ffn_size=16", "model.init_std=0.2")
MICRO = {"none": (1, 4), "uneven": (1, 2, 4), "half": (1, 4)}
"""masks -> micro-batch sizes that are compared"""


def jobs() -> dict[str, Job]:
    """Everything that is compared, run in one go for each number of ranks: building worker groups costs more."""
    found: dict[str, Job] = {}
    for masks in MICRO:
        for micro in MICRO[masks]:
            found[f"{masks} micro {micro}"] = Job(micro=micro, masks=masks)
    found["all masked"] = Job(masks="all", sets=("optim.weight_decay=0.0",))
    for zero in (0, 1, 2, 3):
        for micro in (1, 4):
            found[f"zero {zero} micro {micro}"] = Job(micro=micro, sets=(f"parallel.zero={zero}",))
    aux = (*MOE, "model.moe.aux_loss_coef=1.0", "model.moe.z_loss_coef=0.1")
    for micro in (1, 4):
        found[f"router micro {micro}"] = Job(micro=micro, sets=aux, task="router")
        found[f"router zero 3 micro {micro}"] = Job(micro=micro, sets=(*aux, "parallel.zero=3"), task="router")
        found[f"bias micro {micro}"] = Job(micro=micro, sets=(*MOE, "model.moe.bias_balance=true"))
        found[f"mtp micro {micro}"] = Job(micro=micro, sets=("model.mtp_layers=1",), steps=3)
        found[f"tied micro {micro}"] = Job(micro=micro, sets=("model.tie_embeddings=true",))
        found[f"tied zero 3 micro {micro}"] = Job(micro=micro, sets=("model.tie_embeddings=true", "parallel.zero=3"))
    return found


@pytest.fixture(scope="module")
def logs() -> dict[tuple[int, str], list[Log]]:
    """(ranks, name) -> what each rank saw."""
    wanted = jobs()
    found = {}
    for ranks in (1, 2):
        fitting = {name: job for name, job in wanted.items() if job.micro * ranks <= 8}
        by_rank = on_ranks(run_jobs, ranks, list(fitting.values()))
        for index, name in enumerate(fitting):
            found[ranks, name] = [own[index] for own in by_rank]
    return found


def assert_same(first: Log, second: Log, *, weights: bool = True) -> None:
    assert first.losses == pytest.approx(second.losses, abs=1e-5)
    assert first.norms == pytest.approx(second.norms, rel=1e-4, abs=1e-6)
    assert first.gradients.keys() == second.gradients.keys()
    for name, gradient in first.gradients.items():
        torch.testing.assert_close(gradient, second.gradients[name], atol=1e-6, rtol=1e-4, msg=name)
    # AdamW divides a gradient by its own size: where it is nearly zero, rounding decides the sign of the step
    for name, weight in first.weights.items() if weights else ():
        near = (weight - second.weights[name]).abs() < 1e-4
        assert near.float().mean() > 0.98, name


@pytest.mark.parametrize("masks", MICRO)
def test_masked_labels_count_once_over_micro_batches_and_ranks(
    masks: str, logs: dict[tuple[int, str], list[Log]]
) -> None:
    reference = logs[1, f"{masks} micro 4"][0]
    assert reference.losses[0] is not None and max(g.abs().max() for g in reference.gradients.values()) > 1e-3
    for ranks in (1, 2):
        for micro in MICRO[masks]:
            for log in logs[ranks, f"{masks} micro {micro}"]:
                assert_same(log, reference)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_without_any_label_does_nothing(ranks: int, logs: dict[tuple[int, str], list[Log]]) -> None:
    for log in logs[ranks, "all masked"]:
        assert log.losses == [None, None]
        assert log.norms == [0.0, 0.0] and log.finite == [True, True]
        assert all(bool((gradient == 0).all()) for gradient in log.gradients.values())
        assert all(bool(torch.isfinite(weight).all()) for weight in log.weights.values())


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_gradients_are_reduced_once_a_step(zero: int, logs: dict[tuple[int, str], list[Log]]) -> None:
    """Case 13: as many collectives with eight (four) micro-batches as with two (one), for every engine."""
    few, many = (logs[2, f"zero {zero} micro {micro}"][0] for micro in (4, 1))
    assert few.traffic == many.traffic
    names = {name for name in few.traffic[1] if "grad" in name}
    if zero <= 1:  # FSDP2 talks by itself; tests/parallel/test_fsdp.py counts those
        assert names and sum(few.traffic[1][name][0] for name in names) == 1, few.traffic[1]
    assert_same(few, many)
    assert_same(few, logs[1, "uneven micro 2"][0])


@pytest.mark.parametrize("engine", ["", "zero 3 "])
def test_router_losses_do_not_depend_on_the_layout(engine: str, logs: dict[tuple[int, str], list[Log]]) -> None:
    """Case 70: coefficient 1, no main loss: the router's gradient is the same to 1e-5 and is there."""
    reference = logs[1, "router micro 4"][0]
    routers = [name for name in reference.gradients if "router" in name]
    assert routers
    for ranks in (1, 2):
        for micro in (1, 4):
            for log in logs[ranks, f"router {engine}micro {micro}"]:
                assert log.aux_losses == pytest.approx(reference.aux_losses, abs=1e-5)
                for name in routers:
                    assert reference.gradients[name].abs().max() > 1e-3
                    torch.testing.assert_close(
                        log.gradients[name], reference.gradients[name], atol=1e-5, rtol=0, msg=name
                    )


def test_selection_biases_move_by_the_load_of_the_whole_batch(logs: dict[tuple[int, str], list[Log]]) -> None:
    reference = logs[1, "bias micro 4"][0]
    biases = [name for name in reference.weights if name.endswith("expert_bias")]
    assert len(biases) == 2
    for name in biases:
        moved = reference.weights[name]
        assert moved.abs().max() == pytest.approx(0.002) and moved.min() < 0 < moved.max()
        for ranks in (1, 2):
            for micro in (1, 4):
                for log in logs[ranks, f"bias micro {micro}"]:
                    assert torch.equal(log.weights[name], moved), (ranks, micro)


@pytest.mark.parametrize("kind", ["mtp", "tied", "tied zero 3"])
def test_other_shapes_train_alike_on_every_layout(kind: str, logs: dict[tuple[int, str], list[Log]]) -> None:
    reference = logs[1, f"{kind.removesuffix(' zero 3')} micro 4"][0]
    for ranks in (1, 2):
        for micro in (1, 4):
            for log in logs[ranks, f"{kind} micro {micro}"]:
                assert_same(log, reference)


def _lessons(rank: int, world_size: int, sets: tuple[tuple[str, ...], ...]) -> list[list[float | None]]:
    return [log.losses for log in run_jobs(rank, world_size, [Job(sets=more, steps=4) for more in sets])]


@pytest.mark.parametrize("dropout", ["0.0", "0.2"])
def test_recomputation_changes_no_bit(dropout: str) -> None:
    """Case 72, last part: dropout is drawn again alike when a block is computed again."""
    sets = tuple(
        (*shape, f"model.dropout={dropout}", f"parallel.recompute={mode}")
        for shape in ((), MOE)
        for mode in ("none", "selective", "full", '["full", "selective"]')
    )
    losses = on_ranks(_lessons, 1, sets)[0]
    assert losses[0] != losses[4]
    for index, found in enumerate(losses):
        assert found == losses[index // 4 * 4], sets[index]
