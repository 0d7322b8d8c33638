#!/bin/bash
# Train T5:   ./train_t5.sh [CHECKPOINTS [TEXT]] [flags of pretrain_t5.py]
#
# CHECKPOINTS  folder to save to and to resume from; default: one under runs/
# TEXT         a .jsonl file, which is prepared in CHECKPOINTS/data the first time; a prefix that tools/preprocess_data.py
#              --split-sentences wrote, with its VOCAB_FILE; SAMPLE: the pages of docs/, to try;
#              or MOCK (the default): made-up data
# flags        are added after those of this script, and override them
#
# Environment variables:
# SIZE            220m (default), or tiny, which trains on any laptop
# VOCAB_FILE      vocab.txt of WordPiece; default: one that is trained on TEXT
# GPUS_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   the processes, as for torchrun
# TP, PP          tensor and pipeline parallel sizes; the first pipeline stages have the encoder
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/../arguments.sh" # CHECKPOINTS, and TEXT as TOKENIZER
DATA=$TOKENIZER

BATCH=512 WORDS=30522 SPLIT=949,50,1
case ${SIZE:-220m} in
220m)
    MODEL=(
        --encoder-num-layers 12 --decoder-num-layers 12 --hidden-size 768 --num-attention-heads 12 --kv-channels 64
        --ffn-hidden-size 3072 --encoder-seq-length 512 --decoder-seq-length 128 --init-method-std 0.015
    )
    ;;
tiny)
    MODEL=(
        --encoder-num-layers 2 --decoder-num-layers 2 --hidden-size 64 --num-attention-heads 4
        --encoder-seq-length 64 --decoder-seq-length 32
    )
    BATCH=16 WORDS=800 SPLIT=90,5,5
    : "${GPUS_PER_NODE:=2}" "${PP:=2}"
    ;;
*)
    echo "SIZE=$SIZE is unknown; use 220m or tiny" >&2
    exit 2
    ;;
esac
: "${GPUS_PER_NODE:=8}" "${TP:=1}" "${PP:=1}"
MODEL+=(--position-embedding-type relative)

source "$(dirname "${BASH_SOURCE[0]}")/../sentences.sh" # prepares the text

LAYOUT=(
    --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP"
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
[ "$TP" -gt 1 ] && LAYOUT+=(--sequence-parallel)
TRAINING=(
    --bf16 --micro-batch-size 4 --global-batch-size $BATCH --train-iters 1000000
    --lr 1e-4 --min-lr 1e-5 --lr-decay-style linear --lr-warmup-fraction 0.01 --weight-decay 1e-2 --clip-grad 1.0
    --eval-interval 1000 --eval-iters 10 --log-interval 100
    --save "$CHECKPOINTS" --load "$CHECKPOINTS" --save-interval 10000 --keep-last 3
)
TEXT=(
    --tokenizer-type BertWordPieceLowerCase --vocab-file "${VOCAB_FILE:?is the vocab.txt of the prepared text}"
    --vocab-extra-ids 100 "${SOURCE[@]}"
)
SCRIPT=pretrain_t5.py
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh" # starts the processes
