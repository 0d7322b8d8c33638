#!/bin/bash
# Train Llama 2 or 3:   ./train_llama.sh [CHECKPOINTS [TOKENIZER [DATA]]] [flags of pretrain_gpt.py]
#
# CHECKPOINTS  folder to save to and to resume from; default: one under runs/
# TOKENIZER    folder with a tokenizer.json, Llama 2's tokenizer.model, or MOCK (the default): text is token ids
# DATA         prefix that tools/preprocess_data.py wrote, or MOCK (the default): made-up data
# flags        are added after those of this script, and override them
#
# Environment variables:
# SIZE            llama2-7b, llama2-13b, llama2-70b, llama3-8b (default), llama3-70b; tiny trains on any laptop
# FP8             1: the matrix products of the layers in fp8
# GPUS_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   the processes, as for torchrun
# TP, PP, CP      tensor, pipeline and context parallel sizes
# SEQ_LENGTH, MICRO_BATCH, BATCH   tokens of a sample, samples of a micro-batch and of a step
# PRETRAINED      folder of a checkpoint to start from, such as an import from the hub
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../arguments.sh" # CHECKPOINTS, TOKENIZER, DATA

SIZE=${SIZE:-llama3-8b}
MODEL=(--recipe "$SIZE") # sizes, optimizer and schedule: python tools/recipes.py show llama3-8b
case $SIZE in
llama2-7b | llama3-8b) : "${TP:=1}" ;;
llama2-13b) : "${TP:=2}" ;;
llama2-70b | llama3-70b) : "${NNODES:=8}" "${TP:=8}" "${PP:=4}" ;;
tiny)
    MODEL=(--recipe llama2-7b --num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4)
    MODEL+=(--group-query-attention --num-query-groups 2)
    : "${GPUS_PER_NODE:=2}" "${TP:=2}" "${SEQ_LENGTH:=64}" "${BATCH:=8}"
    ;;
*)
    echo "SIZE=$SIZE is unknown; use llama2-7b, llama2-13b, llama2-70b, llama3-8b, llama3-70b or tiny" >&2
    exit 2
    ;;
esac
case $SIZE in
llama2-*) VOCABULARY=32000 && : "${SEQ_LENGTH:=4096}" "${BATCH:=1024}" ;;
llama3-*) VOCABULARY=128256 && : "${SEQ_LENGTH:=8192}" "${BATCH:=512}" ;;
tiny) VOCABULARY=512 ;;
esac
: "${GPUS_PER_NODE:=8}" "${TP:=1}" "${PP:=1}" "${CP:=1}"

MODEL+=(--seq-length "$SEQ_LENGTH" --max-position-embeddings "$SEQ_LENGTH")
LAYOUT=(
    --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP" --context-parallel-size "$CP"
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
[ "$TP" -gt 1 ] && LAYOUT+=(--sequence-parallel)
TRAINING=(
    --bf16 --micro-batch-size "${MICRO_BATCH:-1}" --global-batch-size "$BATCH" --train-iters 100000 --lr-warmup-iters 2000
    --eval-interval 1000 --eval-iters 10 --log-interval 10 --log-throughput
    --save "$CHECKPOINTS" --load "$CHECKPOINTS" --save-interval 500 --keep-last 3
)
[ "${FP8:-0}" = 1 ] && TRAINING+=(--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max)
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh" # adds flags of tokenizer and data, and starts the processes
