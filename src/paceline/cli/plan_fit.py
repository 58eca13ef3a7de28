"""`paceline plan fit`: how many GPUs does a training run take, in the four steps of a buyer."""

from __future__ import annotations

import json
from collections.abc import Sequence

import typer
from rich.text import Text

from paceline.config.run import RunConfig
from paceline.costs.adapters import count_learned
from paceline.costs.layers import count_parameters
from paceline.costs.step import SAFE_SHARE
from paceline.costs.workload import Cluster
from paceline.errors import ConfigError
from paceline.planner.calibration import calibration_note
from paceline.planner.machines import find_gpu, make_cluster
from paceline.planner.rank import Candidate
from paceline.planner.reasons import layout_text
from paceline.planner.request import calibrated, count_of, load
from paceline.planner.sizing import Sizing, size
from paceline.report import units
from paceline.report.console import make_console, print_table
from paceline.report.table import Table, table


def show_fit(
    model: str,
    *,
    gpu: str,
    tokens: str,
    days: float,
    batch_tokens: str,
    overrides: Sequence[str],
    calibration: str,
    nodes_of: int,
    interconnect: str,
    reserve: float,
    price: float,
    as_json: bool,
) -> None:
    """Finds the fewest GPUs and prints the four steps.

    Raises:
        ConfigError: a number makes no sense, or no number of GPUs that was tried is enough.
    """
    recipe, is_preset, _ = load(model, overrides, None)
    config = recipe.config
    train = config.train
    if is_preset and not any(text.startswith("train.global_batch_size") for text in overrides):
        whole = _whole(count_of(batch_tokens, "--batch-tokens") / train.seq_len)
        config = config.model_copy(update={"train": train.model_copy(update={"global_batch_size": whole})})
    if not 0 <= reserve < 1:
        raise ConfigError(f"--reserve {reserve} is no share of the time", next_step="Give 0.05 for five percent.")
    card = find_gpu(gpu)
    measured = calibration or config.cluster.calibration
    per_node = nodes_of or 8

    def machines(count: int) -> Cluster:
        return make_cluster(card, count, gpus_per_node=min(per_node, count), interconnect=interconnect)[0]

    sized = size(
        config,
        machines,
        tokens=count_of(tokens, "--tokens"),
        days=days,
        reserve=reserve,
        gpus_per_node=per_node,
        profile=calibrated("paceline", measured),
    )
    if as_json:
        typer.echo(json.dumps(_as_dict(sized, price), indent=1))
        return
    if sized.chosen is None:
        fitting = [found for _, found in sized.tried if found is not None]
        raise ConfigError(
            f"no number of {card.name} that was tried trains {units.count(sized.tokens)} tokens in {days:g} days",
            evidence="Tried "
            + ", ".join(str(count) for count, _ in sized.tried)
            + " GPUs; "
            + (f"the fastest takes {_days(min(map(sized.days_of, fitting)))} days." if fitting else "nothing fits."),
            next_step="Give more days, a larger batch (--batch-tokens), or larger cards.",
        )
    _, network = make_cluster(card, sized.chosen.gpus, gpus_per_node=per_node, interconnect=interconnect)
    console = make_console()
    print_table(console, _steps(config, sized, sized.chosen, network, price))
    if measured:
        console.print(Text(calibration_note(measured, "paceline")), soft_wrap=True)
    console.print()
    print_table(console, _counts(sized))
    console.print()
    console.print(Text(f"Layout: {layout_text(sized.chosen.config)}."), soft_wrap=True)
    command = f"paceline plan {model} --gpus {sized.chosen.gpus} --gpu '{gpu}'"
    command += f" --set train.global_batch_size={sized.chosen.config.train.global_batch_size}"
    console.print(Text(f"More about it: {command}"), soft_wrap=True)


def _whole(sequences: float) -> int:
    """A number of sequences that many degrees of data parallelism divide: 4M tokens are not 977 of 4096, but 1024."""
    unit = 128 if sequences >= 512 else 8 if sequences >= 32 else 1
    return max(1, round(sequences / unit)) * unit


def _days(days: float) -> str:
    return f"{days:,.0f}" if days >= 1000 else f"{days:.1f}" if days >= 100 else f"{days:.2f}"


def _steps(config: RunConfig, sized: Sizing, chosen: Candidate, network: str, price: float) -> Table:
    count, train = count_parameters(config.model), chosen.config.train
    estimate = chosen.estimate
    peak = estimate.tflops_per_gpu / estimate.mfu if estimate.mfu else 0.0
    days = sized.days_of(chosen)
    hours = days * 24 * chosen.gpus
    active = f", {units.count(count.active)} active" if config.model.is_moe else ""
    total = sized.flops_per_token * sized.tokens
    rows = [
        (
            "1  what is trained",
            f"{units.count(count.total)} parameters{active}",
            f"{units.count(sized.tokens)} tokens in {sized.days:g} days; batch {train.global_batch_size} x "
            f"{train.seq_len} = {units.count(train.global_batch_size * train.seq_len)} tokens; {train.precision}",
        ),
        (
            "2  a token",
            f"{units.count(sized.flops_per_token)} FLOPs",
            "forward and backward, causal attention, recomputation not counted",
        ),
        (
            "3  all tokens",
            f"{total:.3g} FLOPs",
            f"in {1 - sized.reserve:.0%} of the time ({sized.reserve:.0%} kept for failures, restarts, evaluation): "
            f"{units.count(sized.needed_tokens_per_second)} tokens/s are needed",
        ),
        (
            "4  what a GPU does",
            f"{estimate.tflops_per_gpu:.0f} TFLOP/s",
            (f"MFU {units.percent(estimate.mfu)} of {peak:.0f}, predicted for " if estimate.mfu else "predicted for ")
            + "the best layout on so many GPUs",
        ),
        ("network", *network.split("; ", 1)),
        (
            "GPUs",
            f"{chosen.gpus:,}",
            f"{_days(days)} days, {units.count(chosen.tokens_per_second)} tokens/s, {hours:,.0f} GPU-hours"
            + (f", ${hours * price:,.0f} at ${price:g}" if price else ""),
        ),
        ("memory", f"{estimate.memory_gib:.1f} GiB", f"of the fullest card; {layout_text(chosen.config)}"),
        ("checkpoint", units.size(_checkpoint_bytes(config)), "weights, masters and moments, once"),
    ]
    return table(("step", "", ""), rows)


def _checkpoint_bytes(config: RunConfig) -> float:
    """fp32 masters and two moments of what learns; what the model computes with is made from the masters, and weights
    that are frozen are not in it."""
    return 12.0 * count_learned(config)


def _counts(sized: Sizing) -> Table:
    rows = []
    for count, found in sized.tried:
        if found is None:
            rows.append((f"{count:,}", "nothing fits", "no", "", "", "", "", ""))
            continue
        days, estimate = sized.days_of(found), found.estimate
        rows.append(
            (
                f"{count:,}",
                _days(days),
                "yes" if days <= sized.days else "no",
                "" if estimate.mfu is None else units.percent(estimate.mfu),
                f"{days * 24 * count:,.0f}",
                f"{estimate.memory_gib:.1f}" + (" !" if estimate.tight else ""),
                f"{found.config.train.global_batch_size:,}",
                layout_text(found.config),
            )
        )
    batches = {found.config.train.global_batch_size for _, found in sized.tried if found}
    tight = any(found.estimate.tight for _, found in sized.tried if found)
    convention = next((found.estimate.convention for _, found in sized.tried if found), "")
    return table(
        (">GPUs", ">days", "enough", ">MFU", ">GPU-hours", ">peak GiB", ">batch", "layout"),
        rows,
        title="Numbers of GPUs that were tried",
        notes=(
            f"MFU: {convention}.",
            *(
                ("Batches differ, in sequences: where that asked for can only be cut into slow layouts, the nearest.",)
                if len(batches) > 1
                else ()
            ),
            *((f"! tight: above {SAFE_SHARE:.0%} of what the driver leaves.",) if tight else ()),
            "Numbers of nodes that divide badly (a prime factor above 13) were not tried.",
        ),
    )


def _as_dict(sized: Sizing, price: float) -> dict[str, object]:
    def one(found: Candidate | None) -> dict[str, object] | None:
        if found is None:
            return None
        days = sized.days_of(found)
        return {
            **found.as_dict(),
            "days": days,
            "gpu_hours": days * 24 * found.gpus,
            "dollars": days * 24 * found.gpus * price if price else None,
        }

    return {
        "tokens": sized.tokens,
        "days": sized.days,
        "reserve": sized.reserve,
        "flops_per_token": sized.flops_per_token,
        "flops": sized.flops_per_token * sized.tokens,
        "needed_tokens_per_second": sized.needed_tokens_per_second,
        "chosen": one(sized.chosen),
        "tried": [{"gpus": count, "best": one(found)} for count, found in sized.tried],
    }
