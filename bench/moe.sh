#!/usr/bin/env bash
# Mixtures of experts on two GPUs or one: docs/measured/moe.{json,md}, docs/measured/moe_one_gpu.{json,md}. What is done is
# skipped; a call that is cut off loses the entry it was at.
#
#   bench/moe.sh                            the table, about 7 minutes on two H200s
#   bench/moe.sh baseline                   the same work by Transformers, if it is installed
#   bench/moe.sh imbalance profile          uneven loads; where a step goes
#   bench/moe.sh curves --at-once 4         500 steps of real text: kernels, fp8, expert parallelism, three seeds
#   bench/moe.sh tune                       other ways to the same work; a faster one takes its row of the table
#   bench/moe.sh table baseline --one-gpu   on one GPU, with models cut in depth
#   bench/moe.sh table --minutes 8.5        whatever bench/moe.py takes
#   bench/moe.sh table --tiny --results /tmp/moe --work /tmp/moe
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment
. scripts/demo_data
use_environment ""
[ $# -gt 0 ] || set -- table

case " $* " in *" curves "*) demo_data ;;
esac
"$python" bench/moe.py "$@"
