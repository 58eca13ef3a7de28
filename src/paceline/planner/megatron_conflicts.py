"""Flags of a Megatron-LM command line that contradict each other, the sizes, or the ranks: found before a rank starts.

Each is an error with the values and the value to set; Megatron stops at the first of them, with an assertion, after
every process has started, or takes no notice. Those that it takes no notice of are warnings here.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.config.asked import divisors, error, listed
from paceline.config.schedules import even_layout
from paceline.planner.megatron import MegatronRun
from paceline.planner.megatron_contradictions import contradictions
from paceline.planner.megatron_flags import PASSIVE
from paceline.planner.megatron_ramp_up import RampUp
from paceline.report.finding import Finding


def conflicts(run: MegatronRun) -> list[Finding]:
    """Errors first, then what is silently without effect."""
    found = [*_bare(run), *_ranks(run), *_sizes(run), *_batch(run), *_pipeline(run), *_switches(run), *_ignored(run)]
    return sorted(found, key=lambda finding: finding.severity != "error")


def _bare(run: MegatronRun) -> Iterator[Finding]:
    for name in run.flags.bare:
        if name not in PASSIVE:
            yield error(
                "megatron.value",
                f"--{name} stands without a value",
                "The next word is a flag, or there is none; it was taken as not given.",
                f"Give --{name} its value, or drop it.",
            )


def _ranks(run: MegatronRun) -> Iterator[Finding]:
    layout, gpus = run.layout, run.gpus
    product = layout.tp * layout.pp * layout.cp
    if gpus % product:
        above = -(-gpus // product) * product
        yield error(
            "megatron.ranks",
            f"{gpus} GPUs ({run.gpus_reason}) are no multiple of tp {layout.tp} x pp {layout.pp} x cp {layout.cp} = "
            f"{product}",
            "One copy of the model takes that many ranks.",
            f"Plan for --gpus {above}"
            + (f" or {gpus // product * product}" if gpus > product else "")
            + ", or lower --pipeline-model-parallel-size or --tensor-model-parallel-size.",
        )
        return
    experts, stage = layout.ep * layout.etp, gpus // layout.pp
    if stage % experts:
        yield error(
            "megatron.expert-ranks",
            f"expert parallel {layout.ep} x expert tensor parallel {layout.etp} = {experts} does not divide the "
            f"{stage} ranks of a pipeline stage",
            "Without --expert-tensor-parallel-size it is the tensor parallel size."
            if not run.flags.on("expert-tensor-parallel-size")
            else "Experts are spread over all ranks of a stage.",
            f"Their product may be {listed(divisors(stage))}; set --expert-tensor-parallel-size 1 or another "
            "--expert-model-parallel-size.",
        )


def _sizes(run: MegatronRun) -> Iterator[Finding]:
    layout, model, flags = run.layout, run.config.model, run.flags
    if model.num_heads % layout.tp:
        groups = model.kv_heads if model.attention == "gqa" else 1
        fit = [tp for tp in divisors(model.num_heads) if groups % tp == 0 or tp % groups == 0]
        yield error(
            "megatron.heads",
            f"--tensor-model-parallel-size {layout.tp} does not divide --num-attention-heads {model.num_heads}",
            "Each rank computes whole heads.",
            f"Set --tensor-model-parallel-size to one of {listed(fit)}; pipeline and data parallelism take the rest.",
        )
    elif model.attention == "gqa" and model.kv_heads % layout.tp and layout.tp % model.kv_heads:
        yield error(
            "megatron.query-groups",
            f"neither of --tensor-model-parallel-size {layout.tp} and --num-query-groups {model.kv_heads} divides the "
            "other",
            "Each rank needs whole groups, or each group a whole run of ranks.",
            f"Set --tensor-model-parallel-size to one of {listed(divisors(model.kv_heads))}.",
        )
    if not flags.on("kv-channels") and not flags.on("multi-latent-attention") and model.hidden_size % model.num_heads:
        yield error(
            "megatron.head-width",
            f"--hidden-size {model.hidden_size} is no multiple of --num-attention-heads {model.num_heads}",
            "A head is hidden / heads wide unless --kv-channels says otherwise.",
            "Give --kv-channels, or another number of heads.",
        )
    longest = flags.integer("max-position-embeddings", layout.seq_len)
    if layout.seq_len > longest:
        yield error(
            "megatron.positions",
            f"--seq-length {layout.seq_len} is longer than --max-position-embeddings {longest}",
            "Megatron asserts that positions reach as far as the sequence.",
            f"Set --max-position-embeddings {layout.seq_len}.",
        )
    if model.is_moe and model.num_experts % layout.ep:
        yield error(
            "megatron.experts",
            f"--expert-model-parallel-size {layout.ep} does not divide --num-experts {model.num_experts}",
            "Each rank holds whole experts.",
            f"It may be {listed(divisors(model.num_experts))}.",
        )
    if not model.is_moe and flags.integer("expert-model-parallel-size", 1) > 1:
        yield error(
            "megatron.experts",
            f"--expert-model-parallel-size {flags.text('expert-model-parallel-size')} without --num-experts",
            "There are no experts to spread.",
            "Leave it out, or give --num-experts.",
        )
    unit = layout.cp * 2 if layout.cp > 1 else 1
    if layout.seq_len % (unit * (layout.tp if flags.on("sequence-parallel") else 1)):
        yield error(
            "megatron.sequence",
            f"--seq-length {layout.seq_len} cannot be cut over cp {layout.cp} and tp {layout.tp}",
            "Context parallelism gives each rank two of 2 x cp pieces; sequence parallelism cuts these over tp.",
            f"Take a multiple of {unit * layout.tp}.",
        )


def _batch(run: MegatronRun) -> Iterator[Finding]:
    layout, whole = run.layout, run.layout.global_batch_size
    if not whole or run.gpus % (layout.tp * layout.pp * layout.cp):
        return
    portion = layout.micro_batch_size * run.dp
    if whole % portion:
        below = whole // portion * portion
        sizes = [str(value) for value in (below, below + portion) if value]
        yield error(
            "megatron.batch",
            f"--global-batch-size {whole} is no multiple of micro-batch {layout.micro_batch_size} x data parallel "
            f"{run.dp} = {portion}",
            f"Data parallel is {run.gpus} GPUs / (tp {layout.tp} x pp {layout.pp} x cp {layout.cp}).",
            f"The nearest global batch sizes are {' and '.join(sizes)}.",
        )
        return
    yield from _ramp_up(run, portion)


def _ramp_up(run: MegatronRun, portion: int) -> Iterator[Finding]:
    found, whole = RampUp.of(run.flags), run.layout.global_batch_size
    portion *= run.layout.pp if run.layout.stages_per_rank > 1 else 1
    if found is None or found.fits(portion, whole):
        return
    times = f" x pp {run.layout.pp}" if run.layout.stages_per_rank > 1 else ""
    better = found.made_to_fit(portion, whole)
    yield error(
        "megatron.ramp-up",
        f"--rampup-batch-size {found.start} {found.increment} cannot be dealt out on its way to --global-batch-size "
        f"{whole}",
        f"Start and increment must be multiples of micro-batch {run.layout.micro_batch_size} x data parallel {run.dp}"
        f"{times} = {portion}, and the increment must divide what lies between start and the global batch.",
        f"Set --rampup-batch-size {' '.join(better.values)}." if better else "Drop --rampup-batch-size.",
    )


def _pipeline(run: MegatronRun) -> Iterator[Finding]:
    layout, flags, layers = run.layout, run.flags, run.config.model.num_layers
    virtual = [
        name
        for name in ("num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank")
        if flags.on(name)
    ]
    if virtual and layout.pp == 1:
        yield error(
            "megatron.interleaving",
            f"--{virtual[0]} {flags.text(virtual[0])} with --pipeline-model-parallel-size 1",
            "One rank that holds all layers has nothing to interleave; Megatron asserts.",
            f"Leave --{virtual[0]} out, or set --pipeline-model-parallel-size.",
        )
    if len(virtual) == 2:
        yield error(
            "megatron.interleaving",
            f"--{virtual[0]} and --{virtual[1]} are both given",
            "They say the same in two ways.",
            f"Keep --{virtual[1]} {layout.stages_per_rank}.",
        )
    if layout.pp == 1:
        return
    uneven = bool(layout.pipeline_layout)
    if uneven and sum(layout.pipeline_layout) != layers:
        yield error(
            "megatron.stages",
            f"the pipeline's layout places {sum(layout.pipeline_layout)} layers, --num-layers is {layers}",
            f"It was read as {list(layout.pipeline_layout)}.",
            "Make them agree.",
        )
    if layers % layout.pp and not uneven and not flags.on("deepspeed"):  # which cuts by parameters
        stages = even_layout(layers, layout.pp) if layers >= layout.pp else []
        ways = [str(pp) for pp in divisors(layers) if run.gpus % (pp * layout.tp * layout.cp) == 0]
        flag = f"--pipeline-model-parallel-layout 'E{'|'.join('t' * count for count in stages)}L'" if stages else ""
        yield error(
            "megatron.stages",
            f"--num-layers {layers} is no multiple of --pipeline-model-parallel-size {layout.pp}",
            "Megatron gives each stage equally many layers unless a layout is given.",
            f"Set --pipeline-model-parallel-size to {' or '.join(ways)}"
            + (f", or give the stages {stages} with {flag}." if flag else "."),
        )
    elif virtual and not uneven:
        of_stage = flags.integer("num-layers-per-virtual-pipeline-stage", 0)
        each = layers // layout.pp
        if (of_stage and each % of_stage) or (not of_stage and each % layout.stages_per_rank):
            yield error(
                "megatron.interleaving",
                f"{each} layers of a pipeline rank cannot be cut by --{virtual[0]} {flags.text(virtual[0])}",
                f"{layers} layers over pp {layout.pp}.",
                f"Layers of a virtual stage may be {listed(divisors(each))}.",
            )
        elif run.micro_batches % layout.pp and layout.stages_per_rank > 1 and run.layout.global_batch_size:
            group = flags.on("microbatch-group-size-per-virtual-pipeline-stage")
            if not group:
                portion = layout.micro_batch_size * run.dp * layout.pp
                yield error(
                    "megatron.interleaving",
                    f"{run.micro_batches} micro-batches are no multiple of pp {layout.pp}, which interleaving needs",
                    "Megatron's interleaved schedule runs micro-batches in groups of the pipeline's size.",
                    f"Take a global batch that is a multiple of {portion}, or drop --{virtual[0]}.",
                )


def _switches(run: MegatronRun) -> Iterator[Finding]:
    flags, layout = run.flags, run.layout
    yield from contradictions(flags)
    if flags.on("use-torch-fsdp2") and layout.pp > 1:
        yield error(
            "megatron.contradiction",
            f"--use-torch-fsdp2 with --pipeline-model-parallel-size {layout.pp}",
            "Megatron's FSDP2 has no pipeline.",
            "Set --pipeline-model-parallel-size 1, or use --use-distributed-optimizer.",
        )
    yield from _attention(run)


def _attention(run: MegatronRun) -> Iterator[Finding]:
    flags, environment = run.flags, run.launch.environment
    backend = flags.text("attention-backend")
    wanted = {"flash": "NVTE_FLASH_ATTN", "fused": "NVTE_FUSED_ATTN", "unfused": "NVTE_UNFUSED_ATTN"}
    for kind, variable in wanted.items():
        value = environment.get(variable)
        if backend and value is not None and backend != "auto" and (value == "1") != (backend == kind):
            yield error(
                "megatron.contradiction",
                f"--attention-backend {backend} with {variable}={value}",
                "Megatron sets these variables from --attention-backend and asserts that they agree.",
                f"Drop {variable}.",
            )
    if flags.on("use-flash-attn") and backend in ("unfused", "local"):
        yield error(
            "megatron.contradiction",
            f"--use-flash-attn with --attention-backend {backend}",
            "One asks for the fused kernel, the other forbids it.",
            "Keep --attention-backend flash.",
        )


def _ignored(run: MegatronRun) -> Iterator[Finding]:
    """What Megatron takes no notice of, without a word."""
    flags, layout = run.flags, run.layout
    if flags.on("num-query-groups") and not flags.on("group-query-attention"):
        yield Finding(
            id="megatron.ignored",
            severity="warning",
            subject=f"--num-query-groups {flags.text('num-query-groups')} without --group-query-attention has no "
            "effect",
            evidence=f"The model gets {run.config.model.num_heads} KV heads: a larger model than meant.",
            next_step="Add --group-query-attention.",
        )
    if flags.on("sequence-parallel") and layout.tp == 1:
        yield Finding(
            id="megatron.ignored",
            severity="note",
            subject="--sequence-parallel with --tensor-model-parallel-size 1 has no effect",
            evidence="Megatron switches it off.",
            next_step="Leave it out, or keep it for the day tp grows.",
        )
    for name in flags.repeated:
        yield Finding(
            id="megatron.repeated",
            severity="warning",
            subject=f"--{name} is given more than once",
            evidence=f"The last one counts: {' '.join(flags.given[name]) or 'on'}.",
            next_step="Keep one.",
        )
