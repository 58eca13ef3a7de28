#!/usr/bin/env bash
# Every parallelism on two GPUs beside one: docs/measured/layouts.{json,md}. What is done is skipped; a call that is cut
# off loses the entry it was at.
#
#   bench/layouts.sh                          all of it, about 25 minutes on two H200s
#   bench/layouts.sh speed                    step time and memory of a model of Llama-3-8B's widths
#   bench/layouts.sh curves                   50 steps of real text in bf16, against one GPU and its noise
#   bench/layouts.sh long                     a 1B model at 131072 tokens
#   bench/layouts.sh curves --share-gpu       on a machine of one GPU: losses and memory of each rank, no speed
#   bench/layouts.sh curves --minutes 9       whatever bench/layouts.py takes
#   bench/layouts.sh speed curves long --tiny --results /tmp/layouts --work /tmp/layouts
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment
. scripts/demo_data
use_environment ""
[ $# -gt 0 ] || set -- speed curves long

case " $* " in *" curves "*) demo_data ;;
esac
"$python" bench/layouts.py "$@"
