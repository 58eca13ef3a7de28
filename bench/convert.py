"""How near to the disk's own speed is `paceline convert`, and how much memory does it take?

    python bench/convert.py                          # a model of 16 GB in bf16, in ./convert-bench, removed at the end
    python bench/convert.py --gb 2 --experts         # 2 GB, with 64 experts a layer
    python bench/convert.py --folder /mnt/fast/room  # on another disk

A Llama- or Qwen3-MoE-like model of random weights is written as a Hugging Face folder in files of 5 GB. Then:
  disk     the bytes of the folder, copied by one thread in blocks of 32 MiB: read, written, flushed to the device
  convert  the command `paceline convert`: to a checkpoint, from it to a Hugging Face folder, and to Megatron-LM

Before each, the pages of what is read are dropped, so that it comes from the device. Rates are bytes of weights over
wall time, from process start to exit. Memory is the peak RSS of the command, its libraries (about 0.5 GiB) included.
One JSON line is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import cut_off
import torch

from paceline.config.model import ModelConfig
from paceline.interop.convert import BLOCK_BYTES
from paceline.interop.hf_links import model_shapes
from paceline.interop.hf_write import HubWriter, plan_hub
from paceline.interop.links import blocks

DENSE = {"num_heads": 32, "num_kv_heads": 8, "hidden_size": 4096, "ffn_size": 14336, "vocab_size": 128256}
EXPERTS = {
    "num_heads": 32,
    "num_kv_heads": 4,
    "head_dim": 128,
    "hidden_size": 2048,
    "ffn_size": 6144,
    "vocab_size": 151936,
    "qk_norm": True,
    "num_experts": 64,
    "top_k": 8,
    "moe": {"ffn_size": 768},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=16.0, help="bytes of weights, in 10^9")
    parser.add_argument("--experts", action="store_true", help="a mixture of experts")
    parser.add_argument("--rounds", type=int, default=2, help="of each; the best counts")
    parser.add_argument("--folder", type=Path, default=Path("convert-bench"), help="a new folder to work in")
    parser.add_argument("--threads", type=int, default=0)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True)
    try:
        print(json.dumps(measure(arguments)))
    finally:
        shutil.rmtree(arguments.folder)


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    room: Path = arguments.folder
    source = room / "hub"
    num_bytes = make_model(source, arguments.gb, experts=arguments.experts)
    disk = min(copy_seconds(source, room / "copy") for _ in range(arguments.rounds))
    result: dict[str, object] = {
        "bench": "convert",
        "gb": round(num_bytes / 1e9, 2),
        "experts": arguments.experts,
        "disk_gb_per_second": round(num_bytes / disk / 1e9, 3),
    }
    for name, origin, options in (
        ("hf_to_paceline", source, ["--to", "paceline"]),
        ("paceline_to_hf", room / "hf_to_paceline", ["--to", "hf"]),
        ("hf_to_megatron", source, ["--to", "megatron"]),
    ):
        runs = []
        for _ in range(arguments.rounds):
            shutil.rmtree(room / name, ignore_errors=True)
            drop_pages(origin)
            runs.append(run([str(origin), str(room / name), *options, "--threads", str(arguments.threads)]))
        seconds, rss = min(run[0] for run in runs), max(run[1] for run in runs)
        result[f"{name}_gb_per_second"] = round(num_bytes / seconds / 1e9, 3)
        result[f"{name}_share_of_disk"] = round(disk / seconds, 2)
        result[f"{name}_peak_rss_gib"] = round(rss / 2**30, 2)
    result["same_bits"] = all(
        (source / file.name).read_bytes() == file.read_bytes()
        for file in (room / "paceline_to_hf").glob("*.safetensors")
    )
    result["cores"] = os.cpu_count()
    result["load_average"] = round(os.getloadavg()[0], 1)
    result["versions"] = {"python": platform.python_version(), "torch": torch.__version__}
    return result


def make_model(folder: Path, gb: float, *, experts: bool) -> int:
    """A folder of random weights in bf16, of about so many GB; its bytes."""
    fields = EXPERTS if experts else DENSE

    def size(layers: int) -> int:
        shapes = model_shapes(ModelConfig(num_layers=layers, **fields))
        return 2 * sum(shape.numel() for shape in shapes.values())

    one, two = size(1), size(2)
    layers = max(1, round((gb * 1e9 - one) / (two - one)) + 1)
    model = ModelConfig(num_layers=layers, **fields)
    shapes = model_shapes(model)
    plan = plan_hub(model, dict.fromkeys(shapes, torch.bfloat16))
    folder.mkdir()
    writer = HubWriter(folder, plan)
    writer.create({})
    noise = torch.randn(BLOCK_BYTES // 2).bfloat16()
    for name, shape in shapes.items():
        for number, box in enumerate(blocks(shape, 2, BLOCK_BYTES)):
            writer.sink.write(name, box, noise[: box.numel].roll(number).view(box.sizes))
    writer.files.close()
    writer.files.finish()
    return size(layers)


def copy_seconds(source: Path, target: Path) -> float:
    drop_pages(source)
    began = time.perf_counter()
    target.mkdir()
    for file in sorted(source.iterdir()):
        with file.open("rb", buffering=0) as read, (target / file.name).open("wb", buffering=0) as write:
            while block := read.read(BLOCK_BYTES):
                write.write(block)
            os.fsync(write.fileno())
    seconds = time.perf_counter() - began
    shutil.rmtree(target)
    return seconds


def drop_pages(folder: Path) -> None:
    for file in (path for path in folder.rglob("*") if path.is_file()):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def run(arguments: list[str]) -> tuple[float, int]:
    """Seconds and peak RSS in bytes of `paceline convert`."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "paceline", "convert", *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert isinstance(usage, resource.struct_rusage)
    return time.perf_counter() - began, usage.ru_maxrss * 1024


if __name__ == "__main__":
    cut_off.run(main)
