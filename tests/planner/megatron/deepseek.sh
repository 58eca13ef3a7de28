#!/bin/bash
# The flags of NVIDIA/Megatron-LM, examples/deepseek_v3/train_deepseekv3.sh (sizes 16B and 671B).
set -e
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
PER_NODE=`python3 -c "import torch; print(torch.cuda.device_count())"`
WHERE="${WHERE:-cluster}"
if [ $WHERE = "cluster" ]; then
    NODES=${NODES:-1}
elif [ $WHERE = "slurm" ]; then
    NODES=$SLURM_NNODES
fi
SIZE=${SIZE:-16B}
MICRO=${MICRO:-1}
WHOLE=${WHOLE:-128}
LENGTH="${LENGTH:-4096}"
PR=${PR:-bf16}
TP=${TP:-1}
ETP=${ETP:-1}
PP=${PP:-1}
EP="${EP:-1}"
SP=true
ITERS=${ITERS:-10}
DECAY=$(( ${ITERS} - 2 ))
AC="${AC:-none}"
if [ "$ETP" -eq 1 ]; then
  if [ "$TP" != "$EP" ] && [ "$TP" -ne 1 ]; then
    exit 1
  fi
fi
if [ -z ${MP_VP} ]; then
    virtual=""
else
    virtual=" --num-layers-per-virtual-pipeline-stage ${MP_VP}"
fi
if [ $SIZE = 671B ]; then
    WIDTH=7168; HEADS=128; LAYERS=${LAYERS:-61}; INNER=18432; EXPERT=2048; EXPERTS=256; TOPK=8; SHARED=1
    moe=" \
        --q-lora-rank 1536 --moe-router-score-function sigmoid --moe-router-num-groups ${EP} \
        --moe-router-group-topk 4 --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
    "
elif [ $SIZE = 16B ]; then
    WIDTH=2048; HEADS=16; LAYERS=${LAYERS:-27}; INNER=10944; EXPERT=1408; EXPERTS=64; TOPK=6; SHARED=2
    moe=" \
        --moe-router-num-groups ${EP} \
        --moe-router-group-topk 1
    "
fi
moe=" \
    ${moe} \
    --multi-latent-attention --qk-layernorm --attention-sink-k 0 \
    --moe-ffn-hidden-size ${EXPERT} --enable-shared-expert --moe-layer-freq '1' --num-shared-experts ${SHARED} \
    --moe-shared-expert-intermediate-size  $((${SHARED} * ${EXPERT})) \
    --moe-router-load-balancing-type seq_aux_loss\
    --moe-router-topk ${TOPK} --num-experts ${EXPERTS} --moe-token-dispatcher-type alltoall \
    --moe-shared-expert-overlap --moe-aux-loss-coeff 1e-2 \
    --expert-model-parallel-size ${EP} --expert-tensor-parallel-size ${ETP} \
    --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --kv-channels 128 "
if [ $AC = full ]; then
    again=" --recompute-method block --recompute-granularity full --recompute-num-layers 1"
elif [ $AC = none ]; then
    again=" \
    "
fi
if [ $SP = true ] && [ $TP -gt 1 ]; then
    sequence=" --sequence-parallel"
fi
megatron="  \
	--log-throughput --no-gradient-accumulation-fusion --no-async-tensor-model-parallel-allreduce \
	--mock-data --data-cache-path cache \
        --lr 1e-5 --min-lr 1e-6 --lr-decay-style cosine --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 \
        --clip-grad 1.0 --init-method-std 0.008 --attention-dropout 0.0 --hidden-dropout 0.0 \
        --dataloader-type cyclic --lr-decay-iters ${DECAY} --lr-warmup-iters 2 --train-iters ${ITERS} \
        --micro-batch-size ${MICRO} --global-batch-size ${WHOLE} \
        --num-layers ${LAYERS} --hidden-size ${WIDTH} --num-attention-heads ${HEADS} --ffn-hidden-size ${INNER} \
        --seq-length ${LENGTH} --max-position-embeddings ${LENGTH} --max-padding-length 4096 \
        --log-interval 1 --eval-interval 10000 --eval-iters -1 --save-interval 500000 --ckpt-format torch \
        --tensorboard-queue-size 1 --tensorboard-dir board --log-timers-to-tensorboard \
        --log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard \
        --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size ${PP} --num-workers 8 \
        --extra-vocab-size 0 --tokenizer-type DeepSeekV3Tokenizer --tokenizer-model deepseek-ai/DeepSeek-V3\
        --dataset LLama-Pretrain-Idxmap --swiglu --normalization RMSNorm --norm-epsilon 1e-06 \
        --use-rotary-position-embeddings --position-embedding-type rope --untie-embeddings-and-output-weights \
        --disable-bias-linear --rotary-base 10000 --rotary-scaling-factor 40 \
        --transformer-impl transformer_engine --moe-grouped-gemm --moe-use-legacy-grouped-gemm \
        --distributed-timeout-minutes 60 --eod-mask-loss \
        "
if [ $PR = bf16 ]; then
    precision=" \
        --bf16"
fi
torchrun --nproc_per_node $PER_NODE --nnodes $NODES pretrain_deepseek.py ${megatron} ${moe} ${precision} \
    ${again} ${virtual} ${sequence} --use-distributed-optimizer --use-flash-attn --train-mode pretrain \
    --overlap-grad-reduce --ddp-bucket-size 629145600 --overlap-param-gather
