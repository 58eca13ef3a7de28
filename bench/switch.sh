#!/usr/bin/env bash
# The mini-replication of the Switch Transformer: docs/measured/switch.{json,md} and docs/switch.md. What is done is
# skipped; a call that is cut off loses the runs it was at.
#
#   bench/switch.sh small                   on a CPU: 21 runs of 3 to 5 minutes
#   bench/switch.sh large --at-once 4       on a GPU: 21 runs, about 5 minutes in all
#   bench/switch.sh small --minutes 20      whatever bench/switch.py takes
#   bench/switch.sh small --tiny --results /tmp/switch --work /tmp/switch
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment
. scripts/demo_data
use_environment ""
[ $# -gt 0 ] || set -- small

demo_data
"$python" bench/switch.py "$@"
