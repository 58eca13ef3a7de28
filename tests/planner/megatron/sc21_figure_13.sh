#!/bin/bash
# The flags of NVIDIA/Megatron-LM, examples/academic_paper_scripts/sc21/run_figure_13.sh and CONFIG.sh (pp 2).
PP=2
WHOLE=32
TP=$((64/PP))
MEGATRON_EXTRA_PARAMS="--activations-checkpoint-method uniform "
NODES=8
: "${DATA:?Set DATA}"
export MEGATRON_PARAMS=" ${MEGATRON_EXTRA_PARAMS} \
	--tensor-model-parallel-size ${TP} \
	--pipeline-model-parallel-size ${PP} \
	--micro-batch-size 1 --global-batch-size ${WHOLE} \
	--num-layers 32 --hidden-size 20480 --num-attention-heads 128 \
	--DDP-impl local --data-path ${DATA} --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt \
	--log-interval 5 --seq-length 2048 --max-position-embeddings 2048 \
	--train-iters 500 --lr-decay-iters 320 --lr 0.0001 --min-lr 0.00001 --lr-decay-style cosine \
	--lr-warmup-fraction 0.01 --split 969,30,1 --eval-iters 100 --eval-interval 1000 --clip-grad 1.0 \
	--fp16 \
	--loss-scale 8192 "
run="python -u pretrain_gpt.py ${MEGATRON_PARAMS}"
srun -N ${NODES} --ntasks-per-node=8 -l sh -c "${run}"
exit 0
