#!/bin/bash
# The flags of NVIDIA/Megatron-LM, examples/gpt3/train_gpt3_175b_distributed.sh.
export CUDA_DEVICE_MAX_CONNECTIONS=1

PER_NODE=8
NODES=${NODES:-1}   # to be changed
SAVED=$1; BOARD=$2; VOCAB=$3; MERGES=$4; DATA=$5

LAUNCH=(--nproc_per_node $PER_NODE --nnodes $NODES --master_addr localhost --master_port 6000)
MODEL=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto # flash, fused, unfused, local
)
TRAIN=(
    --micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375
    --train-iters 500000 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
    --init-method-std 0.006 --clip-grad 1.0 --fp16
    --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters 430000
)
PARALLEL=(
    --tensor-model-parallel-size 8
    --pipeline-model-parallel-size 16
)
INPUT=(--data-path $DATA --vocab-file $VOCAB --merge-file $MERGES --split 949,50,1)
OUTPUT=(
    --log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10
    --save $SAVED --load $SAVED --tensorboard-dir $BOARD
)
torchrun ${LAUNCH[@]} pretrain_gpt.py \
    ${MODEL[@]} \
    ${TRAIN[@]} \
    ${PARALLEL[@]} \
    ${INPUT[@]} \
    ${OUTPUT[@]}
