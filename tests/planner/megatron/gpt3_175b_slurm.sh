#!/bin/bash
#SBATCH --nodes=128 --exclusive --ntasks-per-node=8 --job-name=gpt3
# The flags of NVIDIA/Megatron-LM, examples/pretrain_gpt3_175B.sh (2021).
HERE=`pwd`
NOW=`date +'date_%y-%m-%d_time_%H-%M-%S'`
mkdir -p $HERE/logs
FIRST=${FIRST:-"<path>"}
SECOND=${SECOND:-"<path>"}
MIX="0.2 ${FIRST} 0.8 ${SECOND}"

flags=" \
	--tensor-model-parallel-size 8 \
	--pipeline-model-parallel-size 16 \
	--num-layers 96 --hidden-size 12288 --num-attention-heads 96 \
	--seq-length 2048 --max-position-embeddings 2048 \
	--micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375 \
	--train-samples 146484375 --lr-decay-samples 126953125 --lr-warmup-samples 183105 \
	--lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine \
	--log-interval 10 --eval-iters 40 --eval-interval 1000 \
	--data-path ${MIX} --vocab-file gpt-vocab.json --merge-file gpt-merges.txt \
	--save-interval 1000 --save saved --load saved --split 98,2,0 \
	--clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 \
	--tensorboard-dir board \
	--fp16 \
	--checkpoint-activations "

start="python -u ${HERE}/pretrain_gpt.py $@ ${flags}"
srun -l --container-image "some/image:20.12" --output=$HERE/logs/%x_%j_$NOW.log sh -c "${start}"
set +x
