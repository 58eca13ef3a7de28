"""Writes docs/reference/layouts.md from the rules of `paceline.config.check`. Run it through scripts/docs.

Every pair of options is put to the check on a small mixture-of-experts recipe: the table cannot say anything else than
`paceline train` does.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from paceline.config.check import check
from paceline.config.exclusions import EXCLUSIONS
from paceline.config.load import merge, parse_override, resolve
from paceline.config.schedules import SCHEDULES
from paceline.errors import ConfigError

TARGET = Path(__file__).parent / "reference" / "layouts.md"
WORLD_SIZE = 32
BASE = {
    "model": {"preset": "tiny_moe", "num_layers": 8, "num_heads": 8, "num_kv_heads": 4, "num_experts": 8},
    "train": {"global_batch_size": 256, "seq_len": 256},
}

HEAD = """\
# Which options go together

<!-- Written by docs/make_layout_reference.py from the rules of src/paceline/config. Change those, then run
     scripts/docs. -->

Every combination of options either trains with the numbers of one process, or is refused before any process starts,
with the reason and the nearest layouts that work. `paceline train RECIPE --dry-run --nproc N` asks without starting
anything. How to choose: [parallelism.md](../parallelism.md).

## Pairs of options

Made by asking: each pair is put into a small mixture-of-experts recipe on {ranks} ranks and checked. `yes` = it trains,
a number = it is refused for the reason below, `or` = two values of one field. Degrees are 2.

"""

SIZES = """
## Sizes that must fit

| option | rule |
| --- | --- |
| any layout | `tp * pp * cp * dp_replicate * dp_shard` is the number of ranks; `dp_shard = 0` takes what is left |
| any layout | `train.global_batch_size` is a multiple of `train.micro_batch_size * dp_replicate * dp_shard` |
| `parallel.tp` | divides `model.num_heads` |
| `parallel.tp` | divides `model.num_kv_heads`, or is a multiple of it: then each KV head is on several ranks |
| `parallel.tp` | divides the width of dense MLPs and of shared experts, and the tokens of a sequence on a rank |
| `parallel.tp` | is at most `model.vocab_size`, which it need not divide |
| `parallel.cp` by `ring` | `train.seq_len` is a multiple of `2 * cp`, and of `cp * tp` |
| `parallel.cp` by `ulysses` | `train.seq_len` is a multiple of `cp * tp`; cp divides `num_heads / tp` |
| `parallel.pp` | `pp * stages_per_rank` is at most `model.num_layers`, which it need not divide |
| `parallel.pipeline_layout` | `pp * stages_per_rank` numbers of at least 1, their sum is `model.num_layers` |
| `parallel.ep`, `parallel.etp` | `ep * etp` divides the ranks of a stage, `tp * cp * dp_replicate * dp_shard` |
| `parallel.ep` | divides `model.num_experts` |
| `parallel.etp` | divides the width of an expert |
| `cluster.nodes` | if given, times `cluster.gpus_per_node` it is the number of ranks |
"""


class Choice(NamedTuple):
    """A row and column of the table."""

    name: str
    sets: tuple[str, ...]
    company: tuple[str, ...] = ()
    """What the option needs, unless the other one of the pair says otherwise."""


CHOICES = (
    Choice(name="tp", sets=("parallel.tp=2",)),
    Choice(name="cp ring", sets=("parallel.cp=2", "parallel.cp_method=ring")),
    Choice(name="cp ulysses", sets=("parallel.cp=2", "parallel.cp_method=ulysses")),
    *(
        Choice(
            name=f"pp {schedule}",
            sets=(
                "parallel.pp=2",
                f"parallel.pipeline_schedule={schedule}",
                f"parallel.stages_per_rank={rule.min_stages_per_rank}",
            ),
        )
        for schedule, rule in SCHEDULES.items()
    ),
    Choice(name="ep", sets=("parallel.ep=2",)),
    Choice(name="etp", sets=("parallel.etp=2",)),
    *(Choice(name=f"zero {zero}", sets=(f"parallel.zero={zero}",)) for zero in range(4)),
    Choice(name="offload optimizer", sets=("parallel.offload=optimizer",)),
    Choice(name="offload parameters", sets=("parallel.offload=parameters",), company=("parallel.zero=3",)),
    Choice(name="bf16 sums", sets=("parallel.accumulate_dtype=bf16",)),
    Choice(name="compile", sets=("parallel.compile=true",)),
    Choice(name="fused weight gradients", sets=("parallel.fused_weight_gradients=true",)),
    Choice(name="experts plain", sets=("parallel.expert_kernels=plain",)),
    Choice(name="experts grouped", sets=("parallel.expert_kernels=grouped",)),
    Choice(
        name="experts all_gather",
        sets=("parallel.expert_dispatch=all_gather",),
        company=("parallel.ep=2", "parallel.expert_kernels=grouped"),
    ),
    Choice(name="fp8", sets=("train.precision=fp8",)),
    Choice(
        name="fp8 experts",
        sets=("train.fp8_experts=true",),
        company=("train.precision=fp8", "parallel.expert_kernels=grouped"),
    ),
    Choice(name="fp8 uncached", sets=("train.fp8_weight_cache=false",), company=("train.precision=fp8",)),
    Choice(name="fp8 weights only", sets=("train.fp8_weights_only=true",), company=("train.precision=fp8",)),
    Choice(name="bf16", sets=("train.precision=bf16",)),
    Choice(name="lora", sets=("lora.rank=4",)),
    Choice(name="dora", sets=("lora.dora=true",), company=("lora.rank=4",)),
    Choice(name="lora, fp8 base", sets=("lora.base=fp8",), company=("lora.rank=4", "train.precision=fp8")),
    Choice(name="lora, nf4 base", sets=("lora.base=nf4",), company=("lora.rank=4",)),
    Choice(name="recompute selective", sets=("parallel.recompute=selective",)),
    Choice(name="recompute full", sets=("parallel.recompute=full",)),
    Choice(name="muon", sets=("optim.name=muon",)),
    Choice(name="adamw8bit", sets=("optim.name=adamw8bit",)),
    Choice(name="multi-token prediction", sets=("model.mtp_layers=1",)),
    Choice(name="dropout", sets=("model.dropout=0.1",)),
    Choice(name="attention dropout", sets=("model.attention_dropout=0.1",)),
    Choice(name="tied embeddings", sets=("model.tie_embeddings=true",)),
    Choice(name="expert capacity", sets=("model.moe.capacity_factor=1.25",)),
    Choice(name="shared experts", sets=("model.moe.num_shared_experts=1",)),
)


def text_of_page() -> str:
    """The whole page."""
    reasons: list[str] = []
    rows = [_row(position, reasons) for position in range(len(CHOICES))]
    # the last column would only hold the option beside itself
    names = " | ".join(_upright(choice.name) for choice in CHOICES[:-1])
    table = [f"| | {names} |", "| --- |" + " :-: |" * (len(CHOICES) - 1), *rows[1:]]
    notes = [f"{number}. {reason}" for number, reason in enumerate(reasons, start=1)]
    return "\n".join(
        [HEAD.format(ranks=WORLD_SIZE) + "\n".join(table), "", "Refused:", "", *notes, SIZES, _schedules()]
    )


def _upright(name: str) -> str:
    return name.replace(" ", "<br>")


def _row(position: int, reasons: list[str]) -> str:
    first = CHOICES[position]
    cells = []
    for other in CHOICES[: len(CHOICES) - 1]:
        cells.append(_verdict(other, first, reasons) if CHOICES.index(other) < position else "")
    return f"| **{first.name}** | " + " | ".join(cells) + " |"


def _verdict(first: Choice, second: Choice, reasons: list[str]) -> str:
    if _contradict(first, second):
        return "or"
    reason = refusal(first, second)
    if reason is None:
        return "yes"
    if reason not in reasons:
        reasons.append(reason)
    return str(reasons.index(reason) + 1)


def _contradict(first: Choice, second: Choice) -> bool:
    values = dict(text.split("=", 1) for text in first.sets)
    return any(values.get(key, value) != value for key, value in (text.split("=", 1) for text in second.sets))


def refusal(*choices: Choice) -> str | None:
    """Why the check refuses a recipe with these options; None where it does not."""
    tables: dict[str, Any] = dict(BASE)
    for text in [text for choice in choices for text in choice.company]:
        tables = merge(tables, parse_override(text))
    try:
        recipe = resolve(tables, [text for choice in choices for text in choice.sets])
        findings = check(recipe.config, recipe.registry, WORLD_SIZE)
    except ConfigError as error:
        return re.sub(r" \(it is .*?\)", "", f"{error.subject}. {error.evidence}")
    errors = [finding for finding in findings if finding.severity == "error"]
    if not errors:
        return None
    known = {row.id: row for row in EXCLUSIONS}
    if errors[0].id in known:
        row = known[errors[0].id]
        first, second = (option.name for option in row.options)
        return f"{first} with {second}: {row.because}"
    return f"{errors[0].subject}. {errors[0].evidence}"


def _schedules() -> str:
    lines = [
        "## Pipeline schedules",
        "",
        "Every schedule takes any number of micro-batches; with fewer than there are stages some ranks idle.",
        "",
        "| `parallel.pipeline_schedule` | `parallel.stages_per_rank` | why |",
        "| --- | --- | --- |",
    ]
    for name, rule in SCHEDULES.items():
        least, most = rule.min_stages_per_rank, rule.max_stages_per_rank
        count = str(least) if least == most else f"{least} or more"
        lines.append(f"| `{name}` | {count} | {rule.because} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    TARGET.write_text(text_of_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
