"""Better flags for a Megatron-LM command line: what it leaves off, and the layout that is predicted to be fastest."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace

from paceline.costs.profiles import MEGATRON, Profile
from paceline.costs.step import StepEstimate, predict
from paceline.costs.workload import Cluster, Workload
from paceline.planner.megatron import MegatronRun, padded_model
from paceline.planner.megatron_ramp_up import FLAG as RAMP_UP
from paceline.planner.megatron_ramp_up import RampUp
from paceline.planner.rank import Candidate, rank

Changes = dict[str, tuple[str, ...] | None]
"""By flag: its new values, or None to drop it."""


@dataclass(frozen=True, kw_only=True)
class Better:
    """Flags with changes, and what they are predicted to give."""

    flags: tuple[str, ...]
    """All flags of the command, as words."""
    changes: tuple[tuple[str, str, str], ...]
    """(flag, before, after); empty text = not given."""
    environment: dict[str, str]
    estimate: StepEstimate
    work: Workload

    def command(self) -> str:
        """One flag a line."""
        lines: list[str] = []
        for word in self.flags:
            if word.startswith("--"):
                lines.append(word)
            else:
                lines[-1] += f" {_quoted(word)}"
        return " \\\n".join(lines)


def _quoted(word: str) -> str:
    """For a shell. What it is to fill in stays as it is: a variable that nothing in the script sets."""
    if "$" not in word:
        return shlex.quote(word)
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("`", "\\`")
    return f'"{escaped}"'


def same_layout(run: MegatronRun, cluster: Cluster, profile: Profile = MEGATRON) -> Better:
    """The layout as it is, with what the flags leave off, and no more recomputed than it takes to fit."""
    whole = _better(run, cluster, {}, run.work, profile)
    if run.work.recompute != "full":
        return whole
    for mode in ("none", "selective"):
        work = replace(run.work, recompute=mode, recompute_modules=())
        less = _better(run, cluster, _recompute_flags(mode), work, profile)
        if less.estimate.fits and less.estimate.seconds < whole.estimate.seconds:
            return less
    return whole


def best_layout(run: MegatronRun, cluster: Cluster, profile: Profile = MEGATRON) -> Better | None:
    """The fastest layout that Megatron-LM can run and that fits, which may be the same; None if there is none."""
    if not run.layout.global_batch_size:
        return None
    same = same_layout(run, cluster, profile)
    for candidate in _candidates(run, cluster, profile):
        parallel, train = candidate.config.parallel, candidate.config.train
        layers = candidate.config.model.num_layers
        assert isinstance(parallel.recompute, str)
        changes: Changes = {
            "tensor-model-parallel-size": (str(parallel.tp),),
            "pipeline-model-parallel-size": (str(parallel.pp),),
            "context-parallel-size": (str(parallel.cp),) if parallel.cp > 1 else None,
            "micro-batch-size": (str(train.micro_batch_size),),
            "num-layers-per-virtual-pipeline-stage": (str(layers // parallel.stages),)
            if parallel.stages_per_rank > 1
            else None,
            "num-virtual-stages-per-pipeline-rank": None,
            "pipeline-model-parallel-layout": None,
            "decoder-first-pipeline-num-layers": None,
            "decoder-last-pipeline-num-layers": None,
            "sequence-parallel": () if parallel.tp > 1 else None,
            **_recompute_flags(parallel.recompute),
        }
        if run.config.model.is_moe:
            changes["expert-model-parallel-size"] = (str(parallel.ep),)
            changes["expert-tensor-parallel-size"] = (str(parallel.etp),)
        if run.layout.fsdp:
            changes |= {"use-torch-fsdp2": None, "use-megatron-fsdp": None, "data-parallel-sharding-strategy": None}
        work = replace(
            run.work,
            model=padded_model(run.config, run.flags, parallel.tp),
            tp=parallel.tp,
            pp=parallel.pp,
            cp=parallel.cp,
            ep=parallel.ep,
            etp=parallel.etp,
            zero=1,
            micro_batch_size=train.micro_batch_size,
            stages_per_rank=parallel.stages_per_rank,
            pipeline_layout=(),
            recompute=parallel.recompute,
            recompute_modules=(),
        )
        better = _better(run, cluster, changes, work, profile)
        if better.estimate.fits:
            keeps = same.estimate.fits and same.estimate.seconds <= better.estimate.seconds
            return same if keeps else better
    return same if same.estimate.fits else None


def _candidates(run: MegatronRun, cluster: Cluster, profile: Profile) -> Iterator[Candidate]:
    """Layouts of the recipe that Megatron's schedules and even stages admit, the fastest first."""
    parallel = run.config.parallel.model_copy(
        update={"etp": 1, "zero": 1, "fused_weight_gradients": True, "pipeline_layout": (), "compile": False}
    )
    train = run.config.train.model_copy(update={"loss_kernel": "plain"})
    config = run.config.model_copy(update={"parallel": parallel, "train": train})
    found = rank(config, cluster, profile=profile, only={"zero": 1}, offload=False)
    for candidate in found.fitting:
        chosen, layers = candidate.config.parallel, config.model.num_layers
        if chosen.pipeline_schedule not in ("1f1b", "interleaved_1f1b") or layers % chosen.stages:
            continue
        if chosen.stages_per_rank > 1 and candidate.estimate.micro_batches % chosen.pp:
            continue
        yield candidate


def _recompute_flags(mode: str) -> Changes:
    none: Changes = {
        "recompute-granularity": None,
        "recompute-method": None,
        "recompute-num-layers": None,
        "recompute-activations": None,
        "checkpoint-activations": None,
        "distribute-saved-activations": None,
    }
    if mode == "selective":
        return none | {"recompute-granularity": ("selective",)}
    if mode == "full":
        return none | {
            "recompute-granularity": ("full",),
            "recompute-method": ("uniform",),
            "recompute-num-layers": ("1",),
        }
    return none


def _left_off(run: MegatronRun, work: Workload, *, fsdp: bool) -> Changes:
    """Switches that cost nothing but to be given."""
    flags, changes = run.flags, Changes()
    if run.layout.precision == "fp32":
        changes["bf16"] = ()
    if not fsdp and not flags.on("deepspeed"):
        changes |= {"use-distributed-optimizer": (), "overlap-grad-reduce": (), "overlap-param-gather": ()}
    if work.tp > 1:
        changes["sequence-parallel"] = ()
    if not run.work.fused_attention:
        changes["attention-backend"] = ("flash",)
    changes |= {"cross-entropy-loss-fusion": (), "log-throughput": ()}
    if run.gpus >= 64:
        changes["manual-gc"] = ()
    if run.config.model.is_moe:
        changes |= {"moe-grouped-gemm": (), "moe-permute-fusion": ()}
        if flags.text("moe-token-dispatcher-type", "allgather") == "allgather":
            changes["moe-token-dispatcher-type"] = ("alltoall",)
        if work.etp == 1 or not flags.on("expert-tensor-parallel-size"):
            changes["expert-tensor-parallel-size"] = ("1",)
    if flags.on("num-query-groups") and not flags.on("group-query-attention"):
        changes["group-query-attention"] = ()
    return {name: value for name, value in changes.items() if flags.given.get(name) != value}


def _ramp_up(run: MegatronRun, work: Workload, cluster: Cluster) -> Changes:
    """The ramp-up of the batch with steps that the layout can deal out; dropped where there are none."""
    before = RampUp.of(run.flags)
    if before is None or not run.layout.global_batch_size:
        return {}
    portion = work.micro_batch_size * work.dp(cluster.gpus) * (work.pp if work.stages_per_rank > 1 else 1)
    after = before.made_to_fit(portion, run.layout.global_batch_size)
    if after == before:
        return {}
    return {RAMP_UP: None if after is None else after.values}


def _better(run: MegatronRun, cluster: Cluster, layout: Changes, work: Workload, profile: Profile) -> Better:
    fsdp = run.layout.fsdp and "use-torch-fsdp2" not in layout
    changes = _left_off(run, work, fsdp=fsdp) | layout | _ramp_up(run, work, cluster)
    given = dict(run.flags.given)
    told = []
    for name, value in changes.items():
        before = given.get(name)
        if before is None and value == ("1",) and _is_default_one(name, work):
            continue
        if value is None:
            given.pop(name, None)
        else:
            given[name] = value
        if before != value:
            told.append((f"--{name}", _shown(before), "dropped" if value is None else _shown(value)))
    for unknown in run.flags.unknown:
        given[unknown.name] = unknown.values
    words = tuple(word for name, values in given.items() for word in (f"--{name}", *values))
    work = replace(
        work,
        precision="bf16" if work.precision == "fp32" else work.precision,
        zero=max(1, work.zero),
        sequence_parallel=True,
        fused_attention=True,
        etp=1 if "expert-tensor-parallel-size" in changes else work.etp,
    )
    if work.why_not(cluster.gpus):
        work = replace(work, etp=run.work.etp)
    blackwell = cluster.gpu.name.startswith(("B", "GB"))
    connections = {} if fsdp or blackwell or work.tp * work.cp == 1 else {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return Better(
        flags=words,
        changes=tuple(told),
        environment=connections | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        estimate=predict(work, cluster, profile),
        work=work,
    )


def _is_default_one(name: str, work: Workload) -> bool:
    """Whether Megatron takes 1 where the flag is not given; of experts' tensor parallelism it takes tp."""
    return name.endswith("-parallel-size") and (name != "expert-tensor-parallel-size" or work.tp == 1)


def _shown(values: tuple[str, ...] | None) -> str:
    return "" if values is None else " ".join(values) or "on"
