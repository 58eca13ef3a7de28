#!/bin/bash
# The flags of ROCm/Megatron-LM, examples/llama/train_llama2.sh, with its defaults (70B, tp 8).
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
export NCCL_PROTO=${NCCL_PROTO:-Simple}
for ARGUMENT in "$@"
do
   KEY=$(echo $ARGUMENT | cut -f1 -d=)
   export "$KEY"="${ARGUMENT:${#KEY}+1}"
done
USE_FLASH="${USE_FLASH:-1}"
PER_NODE=`python3 -c "import torch; print(torch.cuda.device_count())"`
NODES="${NODES:-1}"
if [ "${NODES:-1}" -gt 1 ]; then
    export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-ens51np0}"
else
    echo "one node"
fi
SIZE="${SIZE:-70}"
TP="${TP:-8}"
PP="${PP:-1}"
CP="${CP:-1}"
MICRO="${MICRO:-2}"
WHOLE="${WHOLE:-8}"
LENGTH="${LENGTH:-4096}"
FSDP="${FSDP:-0}"
AGAIN="${AGAIN:-0}"
OPTIMIZER="${OPTIMIZER:-adam}"
if [ "$FSDP" -eq 1 ] && [ "$TP" -gt 1 ]; then
    TP=1
fi
POSITIONS=32000
TOKENIZER="data/tokenizer_llama2"
if ! [ -d "$TOKENIZER" ]; then
    wget -O "$TOKENIZER/tokenizer.json" https://example.org/tokenizer.json
fi
if [ "$LENGTH" -le 8192 ]; then
  workers=8
else
  workers=24
fi
if [[ $SIZE -eq 7 ]]; then
        WIDTH=4096; INNER=11008; LAYERS=32; HEADS=32; GROUPS_=32
elif [[ $SIZE -eq 13 ]]; then
        WIDTH=5120; INNER=13824; LAYERS=40; HEADS=40; GROUPS_=40
elif [[ $SIZE -eq 70 ]]; then
        WIDTH=8192 # of the stream
        INNER=28672
        LAYERS=80
        HEADS=64
        GROUPS_=8
else
        echo "no such size"
        exit 1
fi
PER_GROUP=$(( ${HEADS} / ${GROUPS_} ))
NUMBER=$(( ${HEADS} / ${PER_GROUP} ))
GPT="
    --tensor-model-parallel-size ${TP} \
    --pipeline-model-parallel-size ${PP} \
    --context-parallel-size ${CP} \
    --num-layers $LAYERS --hidden-size $WIDTH --ffn-hidden-size $INNER --num-attention-heads $HEADS \
    --seq-length $LENGTH --max-position-embeddings $POSITIONS \
    --untie-embeddings-and-output-weights --position-embedding-type rope --no-position-embedding \
    --swiglu --disable-bias-linear --init-method-std 0.02 --attention-dropout 0.0 --hidden-dropout 0.0 \
    --normalization RMSNorm --micro-batch-size $MICRO --global-batch-size $WHOLE --train-iters 10 \
    --no-async-tensor-model-parallel-allreduce --bf16 --no-masked-softmax-fusion \
"
if [ "$AGAIN" -eq 1 ]; then
    GPT="$GPT --recompute-num-layers $LAYERS \
        --recompute-granularity full \
        --recompute-method block \
        "
fi
TRAIN="--lr 1e-4 --min-lr 1e-5 --lr-decay-iters 320000 --lr-decay-style cosine --weight-decay 1.0e-1 \
        --clip-grad 1.0 --ckpt-format torch_dist \
"
if [ "$OPTIMIZER" == "adam" ]; then
    TRAIN="$TRAIN --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 \
        "
else
    TRAIN="$TRAIN --optimizer sgd \
        "
fi
INPUT="
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model ${TOKENIZER} --split 99990,8,2 \
    --dataloader-type cyclic --save-interval 200000 --tensorboard-dir board --log-interval 1 \
    --eval-interval 320000 --eval-iters 10 --num-workers $workers --mock-data --data-cache-path /cache \
"
OUTPUT="
    --log-throughput --no-save-optim --eval-iters -1
"
LAUNCH="
    --nproc_per_node $PER_NODE --nnodes $NODES --node_rank ${NODE_RANK:-0} \
    --master_addr ${MASTER_ADDR:-localhost} --master_port 6020 \
"
MORE="
    --group-query-attention --num-query-groups $NUMBER --no-gradient-accumulation-fusion \
    --distributed-backend nccl --distributed-timeout-minutes 120 --overlap-grad-reduce \
"
if [ "$FSDP" -eq 1 ]; then
    MORE="$MORE --use-torch-fsdp2"
else
    if [ "$OPTIMIZER" == "adam" ]; then
        MORE="$MORE --use-distributed-optimizer --overlap-param-gather"
    fi
fi
if [ "$USE_FLASH" -eq 1 ]; then
MORE="$MORE --use-flash-attn"
fi
MORE="$MORE --sequence-parallel --use-mcore-models"
command="
    torchrun $LAUNCH pretrain_gpt.py \
        $GPT \
        $INPUT \
        $OUTPUT \
        $MORE \
        $TRAIN \
"
command="$command |& tee train.log"
eval $command
