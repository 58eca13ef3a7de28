#!/usr/bin/env bash
# `paceline tune` beside hand-made recipes and an exhaustive sweep: docs/measured/tune.{json,md}. What is done is skipped,
# a tuning that is cut off goes on after its last trial.
#
#   bench/tune.sh                             tunings and hand-made recipes, on two GPUs, in all about 90 minutes
#   bench/tune.sh ladder --only naive --minutes 8.5      whatever bench/tune.py takes
#   bench/tune.sh sweep --minutes 8.5         60 points on one GPU, about half an hour in all
#   bench/tune.sh ladder hand --one-gpu       on one GPU, 8 of 40 layers: docs/measured/tune_one_gpu.*
#   bench/tune.sh ladder sweep --tiny --results /tmp/tune --work /tmp/tune
#
# PACELINE_PYTHON=/path/to/python takes that Python as it is.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment
use_environment ""
[ $# -gt 0 ] || set -- ladder hand
"$python" bench/tune.py "$@"
