"""Fixed-seed loss curves of tiny models: a refactor must not move them.

    python tests/golden/curves.py --update     write them anew, after a change of the mathematics that is meant

On one machine a curve is bit-identical from run to run. Between CPUs it is not (other vector units sum in another
order): with the vector units switched off (ATEN_CPU_CAPABILITY=default) losses moved by 2e-6, four units in their last
place. So the stored numbers are compared to 1e-5.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

STORED = Path(__file__).parent / "curves.json"

if __name__ == "__main__":
    sys.path[:0] = [str(STORED.parent.parent), str(STORED.parent.parent.parent)]

from tests.training import runs  # noqa: E402

STEPS = 10
SHAPE = (
    "run.seed=7",
    "train.micro_batch_size=2",
    "train.global_batch_size=8",
    "train.attention_kernel=reference",
    "optim.lr=0.02",
    # gradients near zero, whose sign another CPU's rounding may turn, are not blown up to whole steps
    "optim.eps=1e-4",
    "checkpoint.interval=0",
    "checkpoint.save_last=false",
)
CURVES: dict[str, tuple[str, ...]] = {
    "dense": ("model.qk_norm=true", "model.tie_embeddings=true"),
    "gpt": (
        "model.norm=layernorm",
        "model.activation=gelu_tanh",
        "model.position=learned",
        "model.qkv_bias=true",
        "model.mlp_bias=true",
        "optim.schedule=wsd",
    ),
    "experts": (
        "model.num_experts=4",
        "model.top_k=2",
        "model.moe.ffn_size=32",
        "model.moe.num_shared_experts=1",
        "model.moe.aux_loss_coef=0.01",
        "model.moe.z_loss_coef=0.001",
        "model.moe.bias_balance=true",
        "model.init_std=0.2",
    ),
    "muon": ("optim.name=muon",),
}


def curve(name: str) -> dict[str, list[float | None]]:
    """Losses and gradient norms of ten steps on one CPU process in fp32."""
    with tempfile.TemporaryDirectory() as folder:
        data = runs.write_dataset(Path(folder) / "corpus", documents=100)
        records = runs.alone(runs.tiny(Path(folder) / "run", data, *SHAPE, *CURVES[name], steps=STEPS))
    return {"loss": [record.loss for record in records], "grad_norm": [record.grad_norm for record in records]}


def stored() -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = json.loads(STORED.read_text())
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--update", action="store_true", help="write curves.json")
    text = json.dumps({name: curve(name) for name in CURVES}, indent=1) + "\n"
    if parser.parse_args().update:
        STORED.write_text(text)
    else:
        sys.stdout.write(text)
