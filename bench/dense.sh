#!/usr/bin/env bash
# Dense training on one and two GPUs: docs/measured/dense.{json,md} and docs/ladder.md. What is done is skipped; a call
# that is cut off loses the entry it was at.
#
#   bench/dense.sh                          the table, about 9 minutes on two H200s
#   bench/dense.sh ladder                   from the naive recipe to the best, one change a rung
#   bench/dense.sh tune                     other ways to the same work; a faster one takes its row of the table
#   bench/dense.sh curves                   500 steps of real text: fast paths on and off, fp8, three seeds
#   bench/dense.sh overheads profile        what is not the step itself; where a step goes
#   bench/dense.sh dense ladder --one-gpu   on one GPU, larger models with fewer layers: docs/measured/dense_one_gpu.*
#   bench/dense.sh curves --at-once 3       on one GPU, three runs at a time
#   bench/dense.sh ladder --minutes 8.5     whatever bench/dense.py takes
#   bench/dense.sh dense ladder --tiny --results /tmp/dense --work /tmp/dense
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment
. scripts/demo_data
use_environment ""
[ $# -gt 0 ] || set -- dense

case " $* " in *" dense "* | *" curves "* | *" overheads "*) demo_data ;;
esac
"$python" bench/dense.py "$@"
