"""Is the recipe legal here, does it fit, is its layout a good one, is there room for what it writes? Torch-free."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.config.check import check
from paceline.config.load import Recipe
from paceline.config.run import RunConfig
from paceline.costs.adapters import count_learned
from paceline.costs.profiles import Profile
from paceline.costs.workload import Cluster
from paceline.doctor.fit import judge_fit
from paceline.doctor.layout import judge_layout
from paceline.errors import ConfigError
from paceline.planner.rank import Candidate, estimate_config
from paceline.report import units
from paceline.report.finding import Finding

STATE_BYTES = {"adamw": 12, "adamw8bit": 6, "muon": 8}
"""Of a checkpoint for each parameter: fp32 masters and the optimizer's moments."""

NETWORK_FILES = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "fuse.s3fs", "fuse.gcsfuse")
"""File systems that serve one client slowly; parallel ones (lustre, gpfs, weka, beegfs) are not among them."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    findings: tuple[Finding, ...]
    own: Candidate | None
    """The recipe's own layout, where it can be predicted."""
    legal: bool = True
    """Whether the recipe's own checks found no error."""


def judge_recipe(
    recipe: Recipe,
    cluster: Cluster | None,
    profile: Profile,
    *,
    is_preset: bool = False,
    gpus: int | None = None,
    environ: Mapping[str, str] | None = None,
    on_links: Callable[[RunConfig], Iterable[Finding]] = lambda config: (),
) -> Judgement:
    """Everything that `config.check` and the planner know about a recipe on these machines.

    Args:
        cluster: None where nobody said which; then the recipe alone is checked.
        is_preset: only the model is given, so there is no layout to judge.
        gpus: how many there are, where that is known without a cluster.
        environ: variables of the run; what is set there already is not advised.
        on_links: what a layout meets on the links of a node; a layout that is advised tells of it.
    """
    config = recipe.config
    if cluster is None:
        # what has no effect on the fewest ranks may have one on more
        told = [found for found in _legal(recipe, gpus or least_ranks(config)) if gpus or found.severity != "note"]
        refused = any(found.severity == "error" for found in told)
        return Judgement(findings=(*told, _no_cluster(gpus)), own=None, legal=not refused)
    legal = () if is_preset else tuple(_legal(recipe, cluster.gpus))
    if any(finding.severity == "error" for finding in legal):
        return Judgement(findings=legal, own=None, legal=False)
    own = None if is_preset else estimate_config(config, cluster, profile)

    def warned(other: RunConfig) -> list[Finding]:
        found = [*_legal(replace(recipe, config=other), cluster.gpus), *on_links(other)]
        return [finding for finding in found if finding.severity != "note"]

    fits = judge_fit(own, cluster, profile, environ or {}) if own else ()
    return Judgement(findings=(*legal, *fits, *judge_layout(own, config, cluster, profile, warned)), own=own)


def least_ranks(config: RunConfig) -> int:
    """Those that the recipe means, else the fewest that its degrees allow."""
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


def _no_cluster(gpus: int | None) -> Finding:
    return Finding(
        id="recipe.no-cluster",
        severity="note",
        subject="whether the recipe fits GPUs and how fast it is there, is not determined: no GPU is named",
        evidence=f"There are {gpus} GPUs; which, neither --gpu nor cluster.gpu nor --smi says."
        if gpus
        else "This machine has none that we know, and neither --gpu nor cluster.gpu says which.",
        next_step=f"paceline doctor RECIPE --gpus {gpus or 8} --gpu H100-80.",
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


# ---- files


def judge_files(config: RunConfig, *, mounts: Path = Path("/proc/mounts")) -> list[Finding]:
    """Whether the datasets are there, and whether the run folder has room for checkpoints."""
    return [*_datasets(config, mounts), *_room(config)]


def _datasets(config: RunConfig, mounts: Path) -> Iterator[Finding]:
    if config.data.is_synthetic:
        return
    sources = config.data.train if isinstance(config.data.train, tuple) else ()
    prefixes = [source.path for source in sources] or [str(config.data.train)]
    of_rows = config.data.reads_rows(config.task.kind)
    for prefix in prefixes:
        if ":" in prefix:  # a plugin's scheme
            continue
        if of_rows:
            yield from _rows(prefix)
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


def _rows(path: str) -> Iterator[Finding]:
    """Rows are read once, before the first step: it only matters that they are there."""
    file = path.partition("#")[0]
    if not Path(file).exists():
        yield Finding(
            id="recipe.dataset",
            severity="error",
            subject=f"data.train = {path!r}: {file} is not there",
            evidence="Rows are a file or a folder; paths are relative to where the run is started.",
            next_step="Look at the path and at mounts of the container; names of a hub are not looked up.",
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
    each = count_learned(config) * STATE_BYTES.get(config.optim.name, 12)
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
