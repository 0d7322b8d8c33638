#!/bin/bash
# Train Qwen3:   ./train_qwen3.sh [CHECKPOINTS [TOKENIZER [DATA]]] [flags of pretrain_gpt.py]
#
# CHECKPOINTS  folder to save to and to resume from; default: one under runs/
# TOKENIZER    folder with a tokenizer.json, or MOCK (the default): text is token ids
# DATA         prefix that tools/preprocess_data.py wrote, or MOCK (the default): made-up data
# flags        are added after those of this script, and override them
#
# Environment variables:
# SIZE            0.6b, 8b (default), 30b-a3b and 235b-a22b (experts), or tiny and tiny-moe, which train on any laptop
# GPUS_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   the processes, as for torchrun
# TP, PP, EP      tensor, pipeline and expert parallel sizes
# SEQ_LENGTH      tokens of a sample
# PRETRAINED      folder of a checkpoint to start from, such as an import from the hub
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/../arguments.sh" # CHECKPOINTS, TOKENIZER, DATA

UNTIED=--untie-embeddings-and-output-weights VOCABULARY=151936 BATCH=256
LONGEST=(--seq-length "${SEQ_LENGTH:-4096}" --max-position-embeddings 40960)
EXPERTS=()
case ${SIZE:-8b} in
0.6b)
    MODEL=(--num-layers 28 --hidden-size 1024 --ffn-hidden-size 3072 --num-attention-heads 16 --num-query-groups 8)
    MODEL+=(--kv-channels 128 "${LONGEST[@]}")
    : "${TP:=1}" "${PP:=1}" "${EP:=1}"
    ;;
8b)
    MODEL=(--num-layers 36 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 32 --num-query-groups 8)
    MODEL+=(--kv-channels 128 "${LONGEST[@]}" $UNTIED)
    : "${TP:=2}" "${PP:=1}" "${EP:=1}"
    ;;
30b-a3b)
    MODEL=(--num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --num-query-groups 4)
    MODEL+=(--kv-channels 128 "${LONGEST[@]}" $UNTIED)
    EXPERTS=(--num-experts 128 --moe-ffn-hidden-size 768 --moe-router-topk 8)
    : "${TP:=1}" "${PP:=1}" "${EP:=8}"
    ;;
235b-a22b)
    MODEL=(--num-layers 94 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 64 --num-query-groups 4)
    MODEL+=(--kv-channels 128 "${LONGEST[@]}" $UNTIED)
    EXPERTS=(--num-experts 128 --moe-ffn-hidden-size 1536 --moe-router-topk 8)
    : "${NNODES:=8}" "${TP:=1}" "${PP:=8}" "${EP:=8}"
    ;;
tiny | tiny-moe)
    MODEL=(--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --num-query-groups 2)
    MODEL+=(--kv-channels 32 --seq-length "${SEQ_LENGTH:-64}" --max-position-embeddings 64)
    VOCABULARY=512 BATCH=8
    : "${GPUS_PER_NODE:=2}"
    if [ "$SIZE" = tiny-moe ]; then
        MODEL+=($UNTIED)
        EXPERTS=(--num-experts 4 --moe-ffn-hidden-size 32 --moe-router-topk 2)
        : "${TP:=1}" "${EP:=2}"
    fi
    : "${TP:=2}" "${PP:=1}" "${EP:=1}"
    ;;
*)
    echo "SIZE=$SIZE is unknown; use 0.6b, 8b, 30b-a3b, 235b-a22b, tiny or tiny-moe" >&2
    exit 2
    ;;
esac
: "${GPUS_PER_NODE:=8}"

MODEL+=(
    --group-query-attention --qk-layernorm --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear
    --position-embedding-type rope --rotary-base 1000000 --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02
)
LAYOUT=(
    --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP"
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
[ "$TP" -gt 1 ] && LAYOUT+=(--sequence-parallel)
[ "$PP" -gt 1 ] && LAYOUT+=(--pipeline-model-parallel-layout auto) # stages of about equal cost
if [ ${#EXPERTS[@]} -gt 0 ]; then
    MODEL+=("${EXPERTS[@]}" --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.001 --moe-router-dtype fp32)
    LAYOUT+=(--expert-model-parallel-size "$EP" --expert-tensor-parallel-size 1)
    LAYOUT+=(--moe-token-dispatcher-type alltoall --moe-grouped-gemm)
fi
TRAINING=(
    --bf16 --micro-batch-size 1 --global-batch-size "$BATCH" --train-iters 100000
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-fraction 0.005
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
    --eval-interval 1000 --eval-iters 10 --log-interval 10 --log-throughput
    --save "$CHECKPOINTS" --load "$CHECKPOINTS" --save-interval 500 --keep-last 3
)
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh" # adds flags of tokenizer and data, and starts the processes
