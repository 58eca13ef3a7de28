"""Every layout that fits two GPUs, over NCCL and with the fast kernels, against one GPU.

With one GPU, both ranks share it.

The same checks run in float64 on gloo (`test_layouts.py`), where they are exact. Here the bounds are those of the
precision: what is looked for are races, wrong streams and kernels that differ, which gloo on CPUs does not have.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from paceline.config.load import resolve
from paceline.parallel.collectives import all_reduce
from paceline.runtime.process import ProcessInfo
from paceline.training.setup import Parts, build_parts
from tests.parity.layouts import error
from tests.training.steps import Job, config_of, full_gradients, global_batch, part

SHAPE = (
    "model.hidden_size=256",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.ffn_size=512",
    "model.num_layers=4",
    "model.vocab_size=1003",
    "model.max_seq_len=128",
    "train.loss_chunk_tokens=64",
    "optim.lr=1e-3",
    "optim.grad_clip=1.0",
    # a gradient that is zero but for rounding shall not become a step of the size of lr
    "optim.eps=1e-5",
)
EXPERTS = ("model.num_experts=4", "model.top_k=2", "model.moe.ffn_size=256", "model.moe.aux_loss_coef=0.01")
MODELS: dict[str, tuple[str, ...]] = {"dense": SHAPE, "tied": (*SHAPE, "model.tie_embeddings=true")}
MODELS["moe"] = (*SHAPE, *EXPERTS)
LAYOUTS = {
    "zero0": "zero=0",
    "zero1": "zero=1",
    "zero2": "zero=2",
    "zero3": "zero=3",
    "tp2": "tp=2",
    "pp2": "pp=2",
    "pp2 interleaved": "pp=2 pipeline_schedule=interleaved_1f1b stages_per_rank=2",
    "pp2 zero-bubble": "pp=2 pipeline_schedule=zero_bubble",
    "pp2 zbv": "pp=2 pipeline_schedule=zbv stages_per_rank=2",
    "cp2 ring": "cp=2",
    "cp2 ulysses": "cp=2 cp_method=ulysses",
    "ep2": "ep=2",
    "ep2 zero3": "ep=2 zero=3",
    "etp2": "etp=2",
    "tp2 ep2": "tp=2 ep=2",
    "cp2 zero3": "cp=2 zero=3",
    "pp2 zero3": "pp=2 zero=3",
    "cp2 ring, selective": "cp=2 recompute=selective",
    "tp2 full": "tp=2 recompute=full",
}
COMPILED = ("zero1", "zero3", "tp2", "pp2 interleaved", "cp2 ring", "cp2 ulysses")
OF_EXPERTS = ("ep2", "ep2 zero3", "etp2", "tp2 ep2")
WITH_TIES = ("pp2", "pp2 zbv", "tp2", "zero3")
STEPS = 4
"""Two more than those of a pipeline that go through the host."""
LENGTH = 128
EXACT = {"loss": 1e-5, "norm": 1e-4, "gradient": 1e-4}
"""fp32. Loss: absolute, in nats. Norm: relative. Gradient: relative, of every tensor in the first step."""
FLOOR = {"loss": 2e-3, "norm": 5e-3, "gradient": 2e-2}
"""bf16: a layout may be TIMES as far from the fp32 run on one GPU as the bf16 run on one GPU is, and this beside it."""
TIMES = 2.0


@dataclass
class Found:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)


def jobs_for(model: str) -> dict[str, str]:
    named = {"dense": LAYOUTS.keys() - set(OF_EXPERTS), "tied": WITH_TIES, "moe": {*OF_EXPERTS, "zero1", "cp2 ring"}}
    return {name: layout for name, layout in LAYOUTS.items() if name in named[model]}


def train(rank: int, world_size: int, device: torch.device, sets: Sequence[str]) -> Found:
    """A few steps, as `tests/training/steps.py` makes them on CPUs."""
    job = Job(sets=tuple(sets), micro=1, steps=STEPS, length=LENGTH)
    config = config_of(job)
    info = ProcessInfo(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size)
    parts = build_parts(config, resolve({}).registry, info, device)
    parts.step.train()
    found = Found()
    parts.step.on_backward_end = lambda number: found.gradients.update({} if number > 1 else _gradients(parts))
    for number in range(1, STEPS + 1):
        batch = global_batch(number, job.masks, LENGTH, config.model.vocab_size)
        batches = [each.to(device) for each in part(batch, job.micro, parts.mesh.dp_rank, parts.mesh.dp_size)]
        outcome = parts.step.run(number, batches)
        parts.engine.wait_for_weights()
        sums = torch.stack([outcome.loss_sum.double(), outcome.local_count.double()])
        all_reduce(sums, parts.mesh["world"], "test")
        found.losses.append(float(sums[0] / sums[1]))
        found.norms.append(float(outcome.grad_norm))
        assert bool(outcome.finite)
    return found


def _gradients(parts: Parts) -> dict[str, Tensor]:
    if parts.device.type == "cuda":
        torch.cuda.synchronize(parts.device)  # read by the host, from wherever they are
    return full_gradients(parts)


def _worker(rank: int, world_size: int, folder: str, kind: str, jobs: Mapping[str, Sequence[str]]) -> None:
    gpus = torch.cuda.device_count() if kind == "cuda" else 0
    device = torch.device(kind, rank % gpus) if gpus else torch.device(kind)
    if kind == "cuda":
        if world_size > gpus:
            # NCCL refuses two ranks on one GPU of one host: each is a host of its own, and they talk over sockets
            os.environ |= {"NCCL_HOSTID": f"paceline-{rank}", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = False
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        device_id=device if kind == "cuda" else None,
    )
    try:
        for number, (name, sets) in enumerate(jobs.items()):
            found = train(rank, world_size, device, sets)
            torch.save((name, found), Path(folder) / f"{number}.{rank}.pt")
    finally:
        dist.destroy_process_group()


def on_ranks(world_size: int, jobs: Mapping[str, Sequence[str]], kind: str = "cuda") -> dict[str, list[Found]]:
    """What each job found, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_worker, args=(world_size, folder, kind, jobs), nprocs=world_size)
        found: dict[str, list[Found]] = {}
        for number in range(len(jobs)):
            for rank in range(world_size):
                name, one = torch.load(Path(folder) / f"{number}.{rank}.pt", weights_only=False)
                found.setdefault(name, []).append(one)
        return found


def differences(found: Found, expected: Found) -> dict[str, float]:
    """The largest of each kind; see `EXACT`."""
    assert found.gradients.keys() == expected.gradients.keys()
    return {
        "loss": max(abs(a - b) for a, b in zip(found.losses, expected.losses, strict=True)),
        "norm": max(abs(a / b - 1) for a, b in zip(found.norms, expected.norms, strict=True)),
        "gradient": max(error(found.gradients[name], value) for name, value in expected.gradients.items()),
    }


def compare(model: str, precision: str, layouts: Mapping[str, str], kind: str = "cuda") -> list[str]:
    """What is out of bounds. Prints the differences of each layout from one rank in fp32, of its worst rank."""

    def sets(layout: str, precision: str) -> tuple[str, ...]:
        return (*MODELS[model], f"train.precision={precision}", *(f"parallel.{item}" for item in layout.split()))

    alone = on_ranks(1, {each: sets("", each) for each in ("fp32", precision)}, kind)
    (truth,), (same,) = alone["fp32"], alone[precision]
    noise = differences(same, truth)
    bounds = EXACT if precision == "fp32" else {what: TIMES * noise[what] + FLOOR[what] for what in FLOOR}
    _show(f"{model} {precision} bounds", bounds)
    beyond = []
    for name, ranks in on_ranks(2, {name: sets(layout, precision) for name, layout in layouts.items()}, kind).items():
        each = [differences(one, truth) for one in ranks]
        worst = {what: max(one[what] for one in each) for what in bounds}
        _show(f"{model} {precision} {name}", worst)
        beyond += [
            f"{name}: {what} {value:.1e} > {bounds[what]:.1e}"
            for what, value in worst.items()
            if not value <= bounds[what]
        ]
    return beyond


def _show(name: str, numbers: Mapping[str, float]) -> None:
    print(f"{name:32}", " ".join(f"{what} {value:.1e}" for what, value in numbers.items()), flush=True)  # noqa: T201


def needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", list(MODELS))
def test_equals_one_gpu(model: str, precision: str) -> None:
    needs_cuda()
    assert not compare(model, precision, jobs_for(model))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name.startswith("pp2")])
def test_a_pipeline_in_processes_that_have_run_nothing(layout: str) -> None:
    """Kernels are loaded while its messages are on their way."""
    needs_cuda()
    assert not compare("dense", "bf16", {layout: LAYOUTS[layout]})


@pytest.mark.gpu
@pytest.mark.slow
def test_compiled_layouts() -> None:
    """In bf16, where compiled blocks round in other places."""
    needs_cuda()
    assert not compare("dense", "bf16", {name: f"{LAYOUTS[name]} compile=true" for name in COMPILED})
