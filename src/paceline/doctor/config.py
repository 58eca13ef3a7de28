"""Is the recipe legal here, does it fit, is its layout a good one, is there room for what it writes? Torch-free."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config.check import check
from paceline.config.load import Recipe
from paceline.config.nearest import as_sets
from paceline.config.run import RunConfig
from paceline.costs.layers import count_parameters
from paceline.costs.profiles import Profile
from paceline.costs.step import SAFE_SHARE
from paceline.costs.workload import Cluster
from paceline.errors import ConfigError
from paceline.planner.rank import Candidate, estimate_config, rank
from paceline.planner.reasons import layout_text, reasons
from paceline.report import units
from paceline.report.finding import Finding

WORTH_TELLING = 0.03
"""A layout that is predicted to be faster by less is within the error of predictions (docs/accuracy.md)."""

STATE_BYTES = {"adamw": 12, "adamw8bit": 6, "muon": 8}
"""Of a checkpoint for each parameter: fp32 masters and the optimizer's moments."""

NETWORK_FILES = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "fuse.s3fs", "fuse.gcsfuse")
"""File systems that serve one client slowly; parallel ones (lustre, gpfs, weka, beegfs) are not among them."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    findings: tuple[Finding, ...]
    own: Candidate | None
    """The recipe's own layout, where it can be predicted."""


def judge_recipe(recipe: Recipe, cluster: Cluster | None, profile: Profile, *, is_preset: bool = False) -> Judgement:
    """Everything that `config.check` and the planner know about a recipe on these machines.

    Args:
        cluster: None where nobody said which; then the recipe alone is checked.
        is_preset: only the model is given, so there is no layout to judge.
    """
    config = recipe.config
    if cluster is None:
        # what has no effect on the fewest ranks may have one on more
        told = (finding for finding in _legal(recipe, _least_ranks(config)) if finding.severity != "note")
        return Judgement(findings=(*told, _no_cluster()), own=None)
    legal = () if is_preset else tuple(_legal(recipe, cluster.gpus))
    if any(finding.severity == "error" for finding in legal):
        return Judgement(findings=legal, own=None)
    own = None if is_preset else estimate_config(config, cluster, profile)
    findings = (*legal, *(_fits(own, cluster) if own else ()), *_better(own, config, cluster, profile))
    return Judgement(findings=findings, own=own)


def _least_ranks(config: RunConfig) -> int:
    parallel = config.parallel
    section = config.cluster
    asked = section.nodes * section.gpus_per_node
    return asked or parallel.model_ranks * parallel.dp_replicate * max(1, parallel.dp_shard)


def _legal(recipe: Recipe, world_size: int) -> Iterator[Finding]:
    try:
        yield from check(recipe.config, recipe.registry, world_size)
    except ConfigError as problem:
        yield Finding(
            id="recipe.refused",
            severity="error",
            subject=problem.subject,
            evidence=problem.evidence,
            next_step=problem.next_step,
        )


def _no_cluster() -> Finding:
    return Finding(
        id="recipe.no-cluster",
        severity="note",
        subject="whether the recipe fits and how fast it is, is not determined: no GPU is named",
        evidence="This machine has none that we know, and neither --gpu nor cluster.gpu says which.",
        next_step="paceline doctor RECIPE --gpus 8 --gpu H100-80.",
    )


def _fits(own: Candidate, cluster: Cluster) -> Iterator[Finding]:
    estimate, room = own.estimate, cluster.gpu.memory_bytes
    numbers = f"{units.gib(estimate.memory_bytes)} of {units.gib(room)} on the fullest card, by estimate"
    if not estimate.fits:
        yield Finding(
            id="recipe.memory",
            severity="error",
            subject=f"the recipe does not fit: {numbers}",
            evidence=f"On {cluster.name}, before CUDA's context and NCCL's buffers.",
            next_step="paceline plan lists layouts that fit; paceline plan RECIPE --explain-memory says what is large.",
        )
    elif estimate.tight:
        yield Finding(
            id="recipe.memory",
            severity="warning",
            subject=f"the recipe fits, but tightly: {numbers}",
            evidence=f"Estimates above {SAFE_SHARE:.0%} of a card have been seen to run out; fragmentation comes on "
            "top.",
            next_step="export PYTORCH_ALLOC_CONF=expandable_segments:True, or --set parallel.recompute=selective.",
        )
    else:
        yield Finding(
            id="recipe.memory",
            severity="note",
            subject=f"the recipe fits: {numbers}",
            evidence=f"On {cluster.name}: {units.rate(own.tokens_per_second, 'tokens')} predicted, "
            f"{units.duration(estimate.seconds)} a step"
            + (f", MFU {units.percent(estimate.mfu)}" if estimate.mfu else "")
            + ".",
            next_step="Nothing.",
        )


def judge_count(config: RunConfig, gpus: int) -> Iterator[Finding]:
    """Whether this node has the GPUs that the recipe means for one."""
    asked = config.cluster.gpus_per_node
    if config.cluster.nodes and gpus != asked:
        yield Finding(
            id="recipe.gpus",
            severity="warning",
            subject=f"this node has {gpus} GPUs, the recipe means {asked} (cluster.gpus_per_node)",
            evidence=f"cluster.nodes = {config.cluster.nodes} times {asked} ranks are what it is checked and planned "
            "for.",
            next_step=f"--set cluster.gpus_per_node={gpus}, or take other nodes.",
        )


def _better(own: Candidate | None, config: RunConfig, cluster: Cluster, profile: Profile) -> Iterator[Finding]:
    ranking = rank(config, cluster, profile=profile)
    if not ranking.fitting:
        yield Finding(
            id="recipe.nothing-fits",
            severity="error",
            subject=f"no layout of this model fits {cluster.name}",
            evidence=f"{ranking.predicted} layouts were predicted, with recomputation and offload too.",
            next_step="; ".join(found.next_step for found in reasons(ranking, cluster, profile).helps[:2])
            or "More or larger GPUs, or a smaller model.",
        )
        return
    best = ranking.fitting[0]
    if own is None:
        yield Finding(
            id="recipe.first-layout",
            severity="note",
            subject=f"the best layout by prediction: {layout_text(best.config)}",
            evidence=f"{units.rate(best.tokens_per_second, 'tokens')} on {cluster.name}, "
            f"{units.gib(best.estimate.memory_bytes)} a card.",
            next_step="paceline plan says why, and --write makes a recipe of it.",
        )
        return
    gain = best.tokens_per_second / own.tokens_per_second - 1
    if gain > WORTH_TELLING or not own.estimate.fits:
        yield Finding(
            id="recipe.better-layout",
            severity="warning" if gain > 0.1 or not own.estimate.fits else "note",
            subject=f"another layout is predicted to be better: {layout_text(best.config, than=own.config)}",
            evidence=f"{units.rate(best.tokens_per_second, 'tokens')} against "
            f"{units.rate(own.tokens_per_second, 'tokens')} "
            f"of the recipe's own, and {units.gib(best.estimate.memory_bytes)} a card against "
            f"{units.gib(own.estimate.memory_bytes)}.",
            next_step=as_sets(config, _changes(config, best.config)),
            gain=f"{gain:+.0%} tokens/s, predicted" if own.estimate.fits else "fits",
        )
    else:
        yield Finding(
            id="recipe.layout",
            severity="note",
            subject="the recipe's layout is as good as the best that was found",
            evidence=f"The best of {ranking.predicted} predicted layouts is faster by {max(0.0, gain):.1%}.",
            next_step="Nothing; paceline plan compares them.",
        )


def _changes(config: RunConfig, best: RunConfig) -> dict[str, Any]:
    """Fields of layout and batch in which the best differs."""
    changes = {}
    for section in ("parallel", "train"):
        before, after = getattr(config, section), getattr(best, section)
        for name in type(before).model_fields:
            if getattr(before, name) != getattr(after, name):
                changes[f"{section}.{name}"] = getattr(after, name)
    return changes


# ---- files


def judge_files(config: RunConfig, *, mounts: Path = Path("/proc/mounts")) -> list[Finding]:
    """Whether the datasets are there, and whether the run folder has room for checkpoints."""
    return [*_datasets(config, mounts), *_room(config)]


def _datasets(config: RunConfig, mounts: Path) -> Iterator[Finding]:
    if config.data.is_synthetic:
        return
    sources = config.data.train if isinstance(config.data.train, tuple) else ()
    prefixes = [source.path for source in sources] or [str(config.data.train)]
    for prefix in prefixes:
        if ":" in prefix:  # a plugin's scheme
            continue
        missing = [suffix for suffix in (".bin", ".idx") if not Path(prefix + suffix).is_file()]
        if missing:
            yield Finding(
                id="recipe.dataset",
                severity="error",
                subject=f"data.train = {prefix!r}: {prefix}{missing[0]} is not there",
                evidence="A dataset is named without .bin and .idx; paths are relative to where the run is started.",
                next_step="Look at the path and at mounts of the container; paceline data build makes one.",
            )
            continue
        kind = file_system(Path(prefix + ".bin"), mounts)
        if kind in NETWORK_FILES:
            yield Finding(
                id="recipe.data-path",
                severity="warning",
                subject=f"{prefix}.bin lies on {kind}",
                evidence="Every rank reads at random places; such file systems serve that slowly, and all nodes at "
                "once.",
                next_step="Copy it to local NVMe or a parallel file system; paceline doctor RECIPE --measure reads it.",
            )


def file_system(path: Path, mounts: Path) -> str:
    """The kind of file system that holds `path`; empty where it is not known."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    where = str(path.absolute())
    best, kind = "", ""
    for line in lines:
        words = line.split()
        if len(words) < 3:
            continue
        point = words[1].replace("\\040", " ")
        if (where + "/").startswith(point.rstrip("/") + "/") and len(point) >= len(best):
            best, kind = point, words[2]
    return kind


def _room(config: RunConfig) -> Iterator[Finding]:
    folder = Path(config.run.folder)
    existing = next((parent for parent in (folder, *folder.absolute().parents) if parent.is_dir()), None)
    if existing is None:
        return
    try:
        found = os.statvfs(existing)
    except OSError:
        return
    free = found.f_bavail * found.f_frsize
    each = count_parameters(config.model).total * STATE_BYTES.get(config.optim.name, 12)
    # the new one is written before the oldest goes
    needed = each * (config.checkpoint.keep + 1)
    if free < needed:
        yield Finding(
            id="recipe.disk",
            severity="error" if free < each else "warning",
            subject=f"{units.size(free)} are free for {folder}, checkpoints take {units.size(needed)}",
            evidence=f"{units.size(each)} each ({STATE_BYTES.get(config.optim.name, 12)} bytes a parameter), "
            f"checkpoint.keep = {config.checkpoint.keep} and the one that is being written.",
            next_step="--set run.dir=PATH on a larger disk, or --set checkpoint.keep=1.",
        )
    if not os.access(existing, os.W_OK):
        yield Finding(
            id="recipe.run-folder",
            severity="error",
            subject=f"{existing} cannot be written, and {folder} is to lie there",
            evidence="The run would fail at its start.",
            next_step="--set run.dir=PATH.",
        )
