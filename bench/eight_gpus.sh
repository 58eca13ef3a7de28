#!/usr/bin/env bash
# Eight H200s of one host: docs/measured/eight_gpus.{json,md} and pictures in docs/pictures. Predicted first, then
# measured; what is done is skipped, and a call that is cut off loses the entry it was at.
#
#   bench/eight_gpus.sh                    the most valuable parts first, as far as eight minutes go; call it again
#   bench/eight_gpus.sh ceilings thirteen  doctor; the 13B from its naive recipe to its best, bf16 and fp8
#   bench/eight_gpus.sh layouts            tp, pp, dp, FSDP, cp of the 13B: time, memory, exposed communication
#   bench/eight_gpus.sh scaling            llama3_8b on two, four and eight GPUs
#   bench/eight_gpus.sh explain            waterfalls of the naive and the best recipes
#   bench/eight_gpus.sh wide experts       llama3_70b's widths, 131072 tokens; mixtures of experts
#   bench/eight_gpus.sh rungs              the rungs of the ladder in between
#   bench/eight_gpus.sh all --gpus 4       all parts on four GPUs, or on two; whatever bench/eight_gpus.py takes
#   bench/eight_gpus.sh predict            the predictions alone
#   bench/eight_gpus.sh all --tiny --results /tmp/eight --work /tmp/eight    with tiny models on CPUs
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment
use_environment ""
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1

parts=(ceilings thirteen layouts scaling explain wide experts rungs)
[ $# -gt 0 ] || set -- all --minutes 8
[[ "$1" != --* ]] || set -- all "$@"
arguments=() predicts=()
while [ $# -gt 0 ]; do
    case "$1" in
    all) arguments+=("${parts[@]}") ;;
    --tiny) predicts+=("$1") arguments+=("$1") ;;
    --results | --gpus) predicts+=("$1" "$2") arguments+=("$1" "$2") && shift ;;
    *) arguments+=("$1") ;;
    esac
    shift
done
"$python" bench/eight_gpus_predict.py ${predicts[@]+"${predicts[@]}"}
[ "${arguments[0]}" = predict ] || "$python" bench/eight_gpus.py "${arguments[@]}"
