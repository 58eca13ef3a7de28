#! /bin/bash
# The flags of NVIDIA/Megatron-LM, examples/pretrain_gpt_distributed_with_mp.sh.
PER_NODE=${PER_NODE:-8}
NODES=${NODES:-1}
LAUNCH="--nproc_per_node $PER_NODE --nnodes $NODES --node_rank ${RANK_OF_NODE:-0} --master_addr localhost --master_port 6000"

python -m torch.distributed.launch $LAUNCH \
       pretrain_gpt.py \
       --tensor-model-parallel-size 2 \
       --pipeline-model-parallel-size 2 \
       --num-layers 24 --hidden-size 1024 --num-attention-heads 16 \
       --micro-batch-size 4 --global-batch-size 16 \
       --seq-length 1024 --max-position-embeddings 1024 \
       --train-iters 500000 --lr-decay-iters 320000 \
       --save ${SAVED:-saved} --load ${SAVED:-saved} --data-path ${DATA:-my_text_document} \
       --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt \
       --data-impl mmap --split 949,50,1 --distributed-backend nccl \
       --lr 0.00015 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 1e-2 --clip-grad 1.0 \
       --lr-warmup-fraction .01 \
       --checkpoint-activations \
       --log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10 \
       --fp16
