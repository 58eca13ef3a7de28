"""Variables of the GPUs and threads of a process, against the recipe and the machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from paceline.doctor.environment.situation import Judged, Rule, Situation, judged, switched_on


def _connections(environ: Mapping[str, str], situation: Situation) -> Iterator[Judged]:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    value = environ.get(name, "").strip()
    if situation.config is None:
        if value == "1":
            yield judged(
                name,
                "note",
                "env.connections",
                f"{name}=1 is right for Megatron-style tensor parallelism and wrong for FSDP",
                "One hardware queue keeps communication in the order of the program, which FSDP's prefetch needs not "
                "to be.",
                "Name the recipe: paceline doctor RECIPE.",
            )
        return
    parallel = situation.config.parallel
    if parallel.engine == "fsdp" and value == "1":
        yield judged(
            name,
            "warning",
            "env.connections",
            f"{name}=1 with parallel.zero = {parallel.zero} (FSDP)",
            "One hardware queue puts the gathers of the next layer behind the kernels of this one: nothing is "
            "prefetched. Megatron-LM refuses the pair for its FSDP.",
            f"unset {name} before the process starts; from Python it is too late once CUDA runs.",
            "gathers overlap with computation again",
        )
    elif parallel.engine != "fsdp" and parallel.tp > 1 and value != "1":
        blackwell = situation.card is not None and (situation.card.bf16 or 0) >= 2000
        if not blackwell:
            yield judged(
                name,
                "warning",
                "env.connections",
                f"{name} is {value or 'not set'} with parallel.tp = {parallel.tp}",
                "On GPUs before Blackwell, communication of tensor and sequence parallelism overlaps with products "
                "only if both are queued in the order of the program.",
                f"export {name}=1 before the process starts; from Python it is too late once CUDA runs.",
                "communication of tensor parallelism can overlap",
            )


def _visible(environ: Mapping[str, str], situation: Situation) -> Iterator[Judged]:
    name = "CUDA_VISIBLE_DEVICES"
    if name not in environ:
        return
    parts = [part.strip() for part in environ[name].split(",")]
    shown = f"{name}={environ[name]}"
    first_bad = next((index for index, part in enumerate(parts) if part.startswith("-") or part == "NoDevFiles"), None)
    usable = parts if first_bad is None else parts[:first_bad]
    if not any(usable):
        on_cpu = situation.config is not None and situation.config.cluster.device == "cpu"
        yield judged(
            name,
            "note" if on_cpu else "error",
            "env.no-visible-gpu",
            f"{shown or name + '= (empty)'} hides every GPU",
            "Programs see none and run on the CPU, or refuse to.",
            f"unset {name}, or list the GPUs: {name}=0,1.",
        )
        return
    doubled = sorted({part for part in usable if usable.count(part) > 1})
    if doubled:
        yield judged(
            name,
            "error",
            "env.gpu-twice",
            f"{shown} lists {', '.join(doubled)} twice",
            "CUDA then sees no GPU at all.",
            f"export {name}={','.join(dict.fromkeys(usable))}",
        )
    elif first_bad is not None:
        yield judged(
            name,
            "warning",
            "env.hidden-gpu",
            f"{shown}: what stands after {parts[first_bad]} is not seen",
            f"CUDA stops reading at the first invalid entry, so {len(usable)} GPUs are left.",
            f"export {name}={','.join(usable)}",
        )
    mig = [part for part in usable if part.startswith("MIG")]
    if len(mig) > 1:
        yield judged(
            name,
            "warning",
            "env.mig",
            f"{shown} lists {len(mig)} MIG slices, of which a process can use one",
            "CUDA uses the first MIG slice only, and slices cannot reach each other through NCCL.",
            "Train on whole GPUs (nvidia-smi -mig 0), or start one single-GPU run on each slice.",
        )
    yield from _enough(len(usable), shown, environ, situation)


def _enough(count: int, shown: str, environ: Mapping[str, str], situation: Situation) -> Iterator[Judged]:
    if situation.config is not None and situation.gpus_per_node and 1 < count < situation.gpus_per_node:
        yield judged(
            "CUDA_VISIBLE_DEVICES",
            "warning",
            "env.few-visible",
            f"{shown} shows {count} GPUs; the recipe means {situation.gpus_per_node} a node",
            "A process without a GPU of its own is refused.",
            f"--set cluster.gpus_per_node={count}, or list all GPUs.",
        )
    if count > 1 and environ.get("WORLD_SIZE", "").strip() == "1":
        yield judged(
            "WORLD_SIZE",
            "warning",
            "env.no-launcher",
            f"WORLD_SIZE=1 with {count} visible GPUs: not started by a launcher?",
            f"One process would use one of {count} GPUs, and batch arithmetic would count one rank.",
            f"paceline train RECIPE --nproc {count}, torchrun or srun; and unset WORLD_SIZE.",
        )


def _threads(environ: Mapping[str, str], situation: Situation) -> Iterator[Judged]:
    text = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    ranks = situation.gpus_per_node or 1
    if not text.isdecimal() or int(text) < 1 or not situation.cores or int(text) * ranks <= situation.cores:
        return
    yield judged(
        "OMP_NUM_THREADS",
        "warning",
        "env.threads",
        f"OMP_NUM_THREADS={text} for {ranks} processes on {situation.cores} cores",
        f"{int(text) * ranks} threads fight for {situation.cores} cores, and hold up the threads that launch kernels.",
        f"export OMP_NUM_THREADS={max(1, situation.cores // ranks)}",
    )


def _allocator(environ: Mapping[str, str], situation: Situation) -> Iterator[Judged]:
    old, new = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
    if old in environ and new in environ and environ[old] != environ[new]:
        yield judged(
            f"{old} {new}",
            "warning",
            "env.two-allocators",
            f"{new}={environ[new]} and {old}={environ[old]} contradict each other",
            f"{old} is an alias that is kept for older programs.",
            f"Keep {new} alone.",
        )
        return
    name = new if new in environ else old
    settings = _pairs(environ.get(name, ""))
    if settings.get("backend") == "cudaMallocAsync" and settings.get("expandable_segments", "").lower() == "true":
        yield judged(
            name,
            "warning",
            "env.allocator",
            f"{name}={environ[name]}: expandable segments belong to torch's own allocator",
            "With backend:cudaMallocAsync they have no effect.",
            f"export {name}=expandable_segments:True",
        )
    elif "max_split_size_mb" in settings and settings.get("expandable_segments", "").lower() != "true":
        yield judged(
            name,
            "note",
            "env.allocator",
            f"{name}={environ[name]}: max_split_size_mb is an older cure for fragmentation",
            "Expandable segments avoid fragmentation without a size that has to be guessed.",
            f"export {name}=expandable_segments:True",
        )


def _pairs(value: str) -> dict[str, str]:
    """``a:1,b:[2,3]`` as a mapping; entries without a colon are left out."""
    parts, depth, current = [], 0, ""
    for letter in value:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += letter
    return dict(part.strip().split(":", 1) for part in [*parts, current] if ":" in part)


def _compiler(environ: Mapping[str, str], situation: Situation) -> Iterator[Judged]:
    for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"):
        if switched_on(environ, name) and situation.config is not None:
            compiled = situation.config.parallel.compile
            yield judged(
                name,
                "warning" if compiled else "note",
                "env.no-compile",
                f"{name}=1 with parallel.compile = {str(compiled).lower()}",
                "The recipe asks for compiled blocks; nothing is compiled."
                if compiled
                else "Nothing is compiled, nor does the recipe ask for it.",
                f"unset {name}.",
                "norms, rotary embeddings and activations are fused again" if compiled else None,
            )
    if switched_on(environ, "TRITON_INTERPRET"):
        yield judged(
            "TRITON_INTERPRET",
            "error",
            "env.interpreter",
            "TRITON_INTERPRET=1 runs Triton's kernels in Python",
            "It is made for tests without a GPU; a step would take minutes.",
            "unset TRITON_INTERPRET.",
        )


PROCESSES: tuple[Rule, ...] = (_connections, _visible, _threads, _allocator, _compiler)
