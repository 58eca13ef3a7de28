#!/bin/bash
# The flags of NVIDIA/Megatron-LM, examples/mixtral/train_mixtral_8x7b_distributed.sh.
export CUDA_DEVICE_MAX_CONNECTIONS=1
PER_NODE=8
NODES=${SLURM_NNODES:-"4"}
SAVED=$1
TOKENIZER=$2
DATA=$3
LAUNCH=(
    --nproc_per_node $PER_NODE
    --nnodes $NODES
    --node_rank ${RANK:-"0"}
    --master_addr ${MASTER_ADDR:-"localhost"} --master_port ${MASTER_PORT:-"6000"}
)
MODEL=(
    --use-mcore-models --disable-bias-linear
    --seq-length 4096 --max-position-embeddings 32768
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --init-method-std 0.01 --attention-dropout 0.0 --hidden-dropout 0.0
    --normalization RMSNorm --position-embedding-type rope --swiglu
    --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8
    --no-masked-softmax-fusion --no-position-embedding --rotary-base 1000000
)
EXPERTS=(
    --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
    --moe-grouped-gemm --moe-token-dispatcher-type alltoall
    --overlap-param-gather --overlap-grad-reduce
)
INPUT=(
    --tokenizer-type Llama2Tokenizer --tokenizer-model ${TOKENIZER}
    --data-path $DATA --split 99990,8,2
)
TRAIN=(
    --micro-batch-size 1 --global-batch-size 256 --lr 1e-4 --train-iters 500000
    --lr-decay-iters 320000 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 0.1 --lr-warmup-iters 500
    --clip-grad 1.0 --bf16
)
PARALLEL=(
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --expert-model-parallel-size 8
    --use-distributed-optimizer --sequence-parallel
)
OUTPUT=(
    --log-interval 1 \
    --save-interval 10000 \
    #--wandb-project none \
    --eval-interval 1000 --eval-iters 10 --save $SAVED --load $SAVED \
    --tensorboard-dir "${SAVED}/tensorboard" --no-load-optim --no-load-rng
)
if [ -n "${WANDB_API_KEY}" ]; then
    OUTPUT+=(--wandb-project ${WANDB_PROJECT:-"Mixtral"} --wandb-exp-name ${WANDB_NAME:-"Mixtral_8x7B"})
fi
torchrun ${LAUNCH[@]} pretrain_gpt.py \
    ${MODEL[@]} \
    ${EXPERTS[@]} ${INPUT[@]} ${TRAIN[@]} ${PARALLEL[@]} ${OUTPUT[@]}
