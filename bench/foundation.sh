#!/usr/bin/env bash
# The foundation's measurements on a machine with one or two GPUs, in parts that are skipped when they are done.
#
#   bench/foundation.sh [FOLDER]      logs and JSON lines go there (default: runs/foundation)
#
# Parts: the demo on all GPUs and on one; `paceline bench train` of llama3_1b (one GPU) and llama3_8b (two); `paceline
# train` of the same recipes on the demo's dataset, to hold the bench against; a kernel profile of the 8B step; `data
# build` on 16 cores. Then bench/foundation_report.py writes docs/measured/foundation.{json,md}.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-runs/foundation}
mkdir -p "$out"
. scripts/environment
use_environment ""
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
began=$(date +%s)

part() {
    name=$1
    shift
    if [ -f "$out/$name.done" ]; then
        return
    fi
    say "[$(($(date +%s) - began)) s] $name"
    start=$(date +%s)
    if "$@" >"$out/$name.log" 2>&1; then
        echo "$(($(date +%s) - start))" >"$out/$name.done"
    else
        echo "failed: $name; its last lines:" >&2
        tail -20 "$out/$name.log" >&2
    fi
}

bench() { # NAME RECIPE PROCESSES
    "$python" -m paceline bench train "recipes/$2.toml" --nproc "$3" --steps 10 --warm-up 4 --out "$out/$1.jsonl"
}
train() { # NAME RECIPE PROCESSES: 14 steps of the same recipe on a real dataset
    rm -rf "$out/run-$1"
    "$python" -m paceline train "recipes/$2.toml" --nproc "$3" --set "run.dir=$out/run-$1" --set train.steps=14 \
        --set data.train=data/demo-train --set checkpoint.save_last=false --set observe.log_interval=5 \
        --set observe.progress=lines
}

part demo scripts/demo
part bench_1b bench bench_1b llama3_1b 1
part train_1b train train_1b llama3_1b 1
if [ "$gpus" -ge 2 ]; then
    part bench_8b bench bench_8b llama3_8b 2
    part train_8b train train_8b llama3_8b 2
    part profile_8b "$python" -m torch.distributed.run --nproc-per-node 2 bench/profile_step.py recipes/llama3_8b.toml \
        --out "$out/profile_8b.json"
fi
part demo_one "$python" -m paceline train recipes/demo_gpu.toml --nproc 1 --set "run.dir=$out/run-demo-one" \
    --set observe.progress=lines
part data_16 taskset -c 0-15 "$python" bench/data_build.py --cores 16 --one-by-one --rounds 2 --tokens 20000000
"$python" bench/foundation_report.py "$out"
