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
use_environment ""
[ $# -gt 0 ] || set -- small

# as scripts/demo makes it: this Python's own standard library
if [ ! -f data/demo-tokenizer.json ] || [ ! -f data/demo-train.idx ]; then
    mkdir -p data
    mapfile -t inputs < <("$python" scripts/stdlib_sources.py)
    say "building the demo's dataset from ${#inputs[@]} files and packages of the standard library"
    "$python" -m paceline data train-tokenizer "${inputs[@]}" --glob '*.py' --vocab-size 4096 \
        --out data/demo-tokenizer.json
    "$python" -m paceline data build "${inputs[@]}" --glob '*.py' --out data/demo \
        --tokenizer data/demo-tokenizer.json --valid-share 0.03 --dedup
fi
"$python" bench/switch.py "$@"
