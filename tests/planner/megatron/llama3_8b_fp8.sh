#!/bin/bash
# The flags of NVIDIA/Megatron-LM, examples/llama/train_llama3_8b_h100_fp8.sh.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
#export NCCL_IB_TIMEOUT=${NCCL_IB_TIMEOUT:-19}

SAVED=${1:-"checkpoints/llama3"}
TOKENIZER=${3:-"MOCK"} # a path, or MOCK
DATA=${4:-"MOCK"}
mkdir -p "$(dirname "$SAVED")"

PER_NODE=8
NODES=1
WORLD=$(($PER_NODE*$NODES))
TP=1
CP=1
KIND="fp8"
LENGTH=8192
CACHE="${PWD}/cache"

LAUNCH=(
    --nproc_per_node $PER_NODE --nnodes $NODES --node_rank ${NODE_RANK:-0}
    --master_addr ${MASTER_ADDR:-localhost} --master_port ${MASTER_PORT:-6000}
)
MODEL=(
    --use-mcore-models
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128
    --seq-length $LENGTH --max-position-embeddings $LENGTH
    --position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0
    --attention-dropout 0.0 --hidden-dropout 0.0
    --swiglu --init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p
    --untie-embeddings-and-output-weights --disable-bias-linear
)
TRAIN=(
    --micro-batch-size 1 --global-batch-size 128
    --train-samples 1953125000 --lr-decay-samples 1949218748 --lr-warmup-samples 3906252
    --lr 0.00015 --min-lr 0.00001
    --decoupled-lr 5.0e-4      # of embedding and head
    --decoupled-min-lr 4.5e-5
    --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
    --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion --calculate-per-token-loss
    --manual-gc --empty-unused-memory-level 1 --exit-duration-in-mins 235
)
PRECISION=()
if [[ "$KIND" == "fp8" ]]; then
    PRECISION+=(
        "--fp8-format hybrid"
        "--fp8-amax-history-len 1024"
        "--fp8-amax-compute-algo max"
        "--fp8-param-gather"
    )
fi
PARALLEL=(
    --tensor-model-parallel-size $TP
    --context-parallel-size $CP
    # --pipeline-model-parallel-size $PP
    --sequence-parallel
)
TRAIN+=(--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)
INPUT=()
if [[ "$TOKENIZER" == "MOCK" ]] || [[ "$DATA" == "MOCK" ]] || [[ -z "$TOKENIZER" ]]; then
    INPUT+=(
        "--mock-data" "--tokenizer-type NullTokenizer" "--vocab-size 128256"
        "--data-cache-path ${CACHE}" "--tiktoken-pattern v2" "--split '99,1,0'"
        "--no-create-attention-mask-in-dataloader" "--no-mmap-bin-files" "--num-workers 1"
    )
else
    INPUT+=("--data-path $DATA" "--tokenizer-type HuggingFaceTokenizer" "--tokenizer-model $TOKENIZER")
fi
OUTPUT=(
    --log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput
    --profile --profile-step-start 4 --profile-step-end 6
    --ckpt-format torch_dist --distributed-timeout-minutes 60
    --save "$SAVED" --load "$SAVED" --tensorboard-dir "${2:-board}"
)
SCRIPT="pretrain_gpt.py"
if [ ! -f "$SCRIPT" ]; then
    echo "no $SCRIPT here"
    exit 1
fi
torchrun ${LAUNCH[@]} \
    "$SCRIPT" \
    ${MODEL[@]} ${TRAIN[@]} ${PRECISION[@]} ${PARALLEL[@]} ${INPUT[@]} \
    ${OUTPUT[@]}
set +x
