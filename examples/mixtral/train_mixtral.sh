#!/bin/bash
# Train Mixtral:   ./train_mixtral.sh [CHECKPOINTS [TOKENIZER [DATA]]] [flags of pretrain_gpt.py]
#
# CHECKPOINTS  folder to save to and to resume from; default: one under runs/
# TOKENIZER    folder with a tokenizer.json, or MOCK (the default): text is token ids
# DATA         prefix that tools/preprocess_data.py wrote, or MOCK (the default): made-up data
# flags        are added after those of this script, and override them
#
# Environment variables:
# SIZE            8x7b (default) or tiny, which trains on any laptop
# GPUS_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   the processes, as for torchrun
# TP, PP, EP      tensor, pipeline and expert parallel sizes
# SEQ_LENGTH      tokens of a sample
# PRETRAINED      folder of a checkpoint to start from, such as an import from the hub
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/../arguments.sh" # CHECKPOINTS, TOKENIZER, DATA

case ${SIZE:-8x7b} in
8x7b)
    MODEL=(
        --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-experts 8
        --num-attention-heads 32 --group-query-attention --num-query-groups 8
        --seq-length "${SEQ_LENGTH:-4096}" --max-position-embeddings 32768
    )
    VOCABULARY=32000 BATCH=256
    : "${GPUS_PER_NODE:=8}" "${TP:=1}" "${PP:=1}" "${EP:=8}"
    ;;
tiny)
    MODEL=(
        --num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-experts 4
        --num-attention-heads 4 --group-query-attention --num-query-groups 2
        --seq-length "${SEQ_LENGTH:-64}" --max-position-embeddings 64
    )
    VOCABULARY=512 BATCH=8
    : "${GPUS_PER_NODE:=2}" "${TP:=1}" "${PP:=1}" "${EP:=2}"
    ;;
*)
    echo "SIZE=$SIZE is unknown; use 8x7b or tiny" >&2
    exit 2
    ;;
esac

MODEL+=(
    --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear
    --position-embedding-type rope --rotary-base 1000000 --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02
    --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01
)
LAYOUT=(
    --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP"
    --expert-model-parallel-size "$EP" --expert-tensor-parallel-size 1
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --moe-token-dispatcher-type alltoall --moe-grouped-gemm
)
[ "$TP" -gt 1 ] && LAYOUT+=(--sequence-parallel)
TRAINING=(
    --bf16 --micro-batch-size 1 --global-batch-size "$BATCH" --train-iters 100000
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-fraction 0.005
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
    --eval-interval 1000 --eval-iters 10 --log-interval 10 --log-throughput
    --save "$CHECKPOINTS" --load "$CHECKPOINTS" --save-interval 500 --keep-last 3
)
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh" # adds flags of tokenizer and data, and starts the processes
