#!/usr/bin/env bash
# Recipes of Paceline predicted first and measured after: docs/measured/plan.{json,md}. What is predicted or done is
# skipped; a call that is cut off loses the entry it was at.
#
#   bench/plan.sh                    all of it, about 17 minutes on two H200s
#   bench/plan.sh --one-gpu          the recipes of one GPU alone, about 9 minutes
#   bench/plan.sh two                those of two GPUs alone, about 8 minutes
#   bench/plan.sh one --only 1b_2k --minutes 8.5      whatever bench/plan.py takes
#   bench/plan.sh predict            the predictions alone; bench/plan_predict.py --again makes them anew
#   bench/plan.sh one two --tiny --results /tmp/plan --work /tmp/plan
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment
use_environment ""

arguments=() predicts=()
while [ $# -gt 0 ]; do
    case "$1" in
    --one-gpu) arguments=(one ${arguments[@]+"${arguments[@]}"}) ;;
    --tiny) predicts+=("$1") arguments+=("$1") ;;
    --results) predicts+=("$1" "$2") arguments+=("$1" "$2") && shift ;;
    *) arguments+=("$1") ;;
    esac
    shift
done
[ ${#arguments[@]} -gt 0 ] && [[ "${arguments[0]}" != --* ]] || arguments=(one two ${arguments[@]+"${arguments[@]}"})
"$python" bench/plan_predict.py ${predicts[@]+"${predicts[@]}"}
[ "${arguments[0]}" = predict ] || "$python" bench/plan.py "${arguments[@]}"
