#!/bin/bash
# Train GPT-3:   ./train_gpt3.sh [CHECKPOINTS [TOKENIZER [DATA]]] [flags of pretrain_gpt.py]
#
# CHECKPOINTS  folder to save to and to resume from; default: one under runs/
# TOKENIZER    folder with GPT-2's vocab.json and merges.txt, or MOCK (the default): text is token ids
# DATA         prefix that tools/preprocess_data.py wrote, or MOCK (the default): made-up data
# flags        are added after those of this script, and override them
#
# Environment variables:
# SIZE            345m (default), 175b, or tiny, which trains on any laptop
# GPUS_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   the processes, as for torchrun
# TP, PP          tensor and pipeline parallel sizes
# SEQ_LENGTH, MICRO_BATCH, BATCH   tokens of a sample, samples of a micro-batch and of a step
# PRETRAINED      folder of a checkpoint to start from
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../arguments.sh" # CHECKPOINTS, TOKENIZER, DATA

VOCABULARY=50257
case ${SIZE:-345m} in
345m)
    MODEL=(--num-layers 24 --hidden-size 1024 --num-attention-heads 16)
    SCHEDULE=(--train-iters 500000 --lr-decay-iters 320000 --lr-warmup-fraction 0.01 --lr 1.5e-4 --min-lr 1e-5)
    : "${SEQ_LENGTH:=1024}" "${MICRO_BATCH:=8}" "${BATCH:=64}"
    ;;
175b)
    MODEL=(--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --init-method-std 0.006)
    # 300 billion tokens; the batch grows from 64 over the first 12 billion, the learning rate falls over 260 billion
    SCHEDULE=(--train-samples 146484375 --lr-decay-samples 126953125 --lr-warmup-samples 183105 --lr 6e-5 --min-lr 6e-6)
    SCHEDULE+=(--rampup-batch-size 64 64 5859375)
    : "${SEQ_LENGTH:=2048}" "${MICRO_BATCH:=1}" "${BATCH:=1536}" "${NNODES:=16}" "${TP:=8}" "${PP:=16}"
    ;;
tiny)
    MODEL=(--num-layers 2 --hidden-size 64 --num-attention-heads 4)
    SCHEDULE=(--train-iters 100 --lr-warmup-fraction 0.01 --lr 1e-3 --min-lr 1e-5)
    VOCABULARY=512
    : "${SEQ_LENGTH:=64}" "${MICRO_BATCH:=1}" "${BATCH:=8}" "${GPUS_PER_NODE:=2}" "${TP:=2}"
    ;;
*)
    echo "SIZE=$SIZE is unknown; use 345m, 175b or tiny" >&2
    exit 2
    ;;
esac
: "${GPUS_PER_NODE:=8}" "${TP:=1}" "${PP:=1}"

MODEL+=(--seq-length "$SEQ_LENGTH" --max-position-embeddings "$SEQ_LENGTH")
LAYOUT=(
    --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP"
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
[ "$TP" -gt 1 ] && LAYOUT+=(--sequence-parallel)
TRAINING=(
    --bf16 --micro-batch-size "$MICRO_BATCH" --global-batch-size "$BATCH" "${SCHEDULE[@]}" --lr-decay-style cosine
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
    --eval-interval 1000 --eval-iters 10 --log-interval 10 --log-throughput
    --save "$CHECKPOINTS" --load "$CHECKPOINTS" --save-interval 500 --keep-last 3
)
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh" # adds flags of tokenizer and data, and starts the processes
