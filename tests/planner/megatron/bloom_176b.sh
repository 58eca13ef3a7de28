#!/bin/bash
#SBATCH --job-name=bloom
#SBATCH --nodes=48
#SBATCH --ntasks-per-node=1          # one launcher a node
#SBATCH --gres=gpu:8                 # number of gpus
#SBATCH --time 100:00:00
# The flags of bigscience-workshop/bigscience, train/tr11-176B-ml/tr11-176B-ml.slurm.
set -x -e
source $WORK/start-environment
SAVED=$SCRATCH/saved/main
BOARD=$SCRATCH/board
export HF_DATASETS_OFFLINE=1
MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
PER_NODE=8
NODES=$SLURM_NNODES
TP=4
PP=12
MICRO=2  # was 1 until 784
WHOLE=2048
WIDTH=14336
LENGTH=2048
OPTIM=" \
    --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 \
    --lr 6e-5 --min-lr 6e-6 --lr-decay-style cosine --lr-decay-samples 200_000_000 --lr-warmup-samples 183_105 \
    --clip-grad 1.0 --weight-decay 1e-1 \
    "
# --exit-duration-in-mins 1190 \
MODEL=" \
    --pp-partition-method 'type:transformer|embedding' \
    --num-layers 70 --hidden-size $WIDTH --num-attention-heads 112 \
    --seq-length $LENGTH --max-position-embeddings $LENGTH \
    --micro-batch-size $MICRO --rampup-batch-size 192 16 9_765_625 --global-batch-size $WHOLE \
    --train-samples 220_000_000 \
    --tokenizer-type PretrainedFromHF --tokenizer-name-or-path bigscience/tokenizer \
    --init-method-std 0.0048 --embed-layernorm --bf16 --seed 42 --position-embedding-type alibi \
    --checkpoint-activations --abort-on-unmet-fused-kernel-constraints --kill-switch-path /tmp/kill \
    --pad-vocab-size-to 250880 \
    $OPTIM --exit-duration-in-mins 5990 \
    "
OUTPUT=" \
    --log-interval 1 --save-interval 100 --eval-interval 1000 --eval-iters 1 \
    --tensorboard-dir $BOARD --tensorboard-queue-size 5 --log-timers-to-tensorboard \
    --log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard \
    "
STAGE=0
config_json="./ds_config.$SLURM_JOB_ID.json"
cat <<EOT > $config_json
{
  "train_micro_batch_size_per_gpu": $MICRO,
  "zero_optimization": { "stage": $STAGE }
}
EOT
DEEPSPEED=" \
    --deepspeed --deepspeed_config ${config_json} --zero-stage ${STAGE} --deepspeed-activation-checkpointing \
    "
export LAUNCHER="python -u -m torch.distributed.run \
    --nproc_per_node $PER_NODE \
    --nnodes $NODES \
    --rdzv_endpoint $MASTER_ADDR:6000 --rdzv_backend c10d --max_restarts 0 --tee 3 \
    "
export CMD=" \
    `pwd`/pretrain_gpt.py \
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP \
    $MODEL $OUTPUT --save $SAVED --load $SAVED \
    --train-weighted-split-paths-path train.txt --valid-weighted-split-paths-path valid.txt \
    --num-workers 2 --valid-num-workers 0 --data-impl mmap --distributed-backend nccl \
    $DEEPSPEED \
    "
echo $CMD
# without it the training hangs
export CUDA_LAUNCH_BLOCKING=1
clear; srun --wait=60 --kill-on-bad-exit=1 --jobid $SLURM_JOB_ID bash -c "$LAUNCHER --node_rank \$SLURM_PROCID $CMD" 2>&1 | tee -a main_log.txt
echo "END TIME: $(date)"
