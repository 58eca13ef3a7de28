#!/usr/bin/env bash
# Fine-tuning on one and two GPUs beside Transformers, PEFT and Liger kernels, as far as they are installed:
# docs/measured/post_training.{json,md}. What is done is skipped; a call that is cut off loses the entry it was at.
#
#   bench/post_training.sh                       LoRA of llama3_8b in bf16 and fp8, packed rows of 8192 tokens
#   bench/post_training.sh full                  all weights of llama3_8b
#   bench/post_training.sh moe                   a mixture of experts: all weights, and LoRA of 48 layers
#   bench/post_training.sh convert               16 GB between formats, beside a plain copy
#   bench/post_training.sh lora full --one-gpu   on one GPU, larger models cut in depth: docs/measured/post_training_one_gpu.*
#   bench/post_training.sh full --minutes 8.5    whatever bench/post_training.py takes
#   bench/post_training.sh lora --tiny --results /tmp/post --work /tmp/post
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment
use_environment ""
[ $# -gt 0 ] || set -- lora
[[ "$1" != --* ]] || set -- lora "$@"
"$python" bench/post_training.py "$@"
