#!/bin/bash
# Train Qwen3-Next:   ./train_qwen3_next.sh [CHECKPOINTS [TOKENIZER [DATA]]] [flags of pretrain_gpt.py]
#
# CHECKPOINTS  folder to save to and to resume from; default: one under runs/
# TOKENIZER    folder with a tokenizer.json, or MOCK (the default): text is token ids
# DATA         prefix that tools/preprocess_data.py wrote, or MOCK (the default): made-up data
# flags        are added after those of this script, and override them
#
# Environment variables:
# SIZE            80b-a3b (default), or tiny, which trains on any laptop
# GPUS_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   the processes, as for torchrun
# TP, PP, EP      tensor, pipeline and expert parallel sizes
# SEQ_LENGTH, MICRO_BATCH, BATCH   tokens of a sample, samples of a micro-batch and of a step
# PRETRAINED      folder of a checkpoint to start from, such as an import from the hub
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../arguments.sh" # CHECKPOINTS, TOKENIZER, DATA

case ${SIZE:-80b-a3b} in
80b-a3b)
    MODEL=(
        --num-layers 48 --hidden-size 2048 --ffn-hidden-size 5120 --num-attention-heads 16 --num-query-groups 2
        --kv-channels 256 --max-position-embeddings 262144 --rotary-base 10000000
        --linear-num-key-heads 16 --linear-num-value-heads 32 --linear-key-head-dim 128 --linear-value-head-dim 128
        --num-experts 512 --moe-router-topk 10 --moe-ffn-hidden-size 512 --moe-shared-expert-intermediate-size 512
    )
    VOCABULARY=151936
    : "${SEQ_LENGTH:=4096}" "${BATCH:=1024}" "${NNODES:=8}" "${PP:=2}" "${EP:=32}"
    ;;
tiny)
    MODEL=(
        --num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --num-query-groups 2
        --kv-channels 32 --max-position-embeddings 64 --rotary-base 10000
        --linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 16 --linear-value-head-dim 16
        --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 32
    )
    VOCABULARY=512
    : "${SEQ_LENGTH:=64}" "${BATCH:=8}" "${GPUS_PER_NODE:=2}" "${EP:=2}"
    ;;
*)
    echo "SIZE=$SIZE is unknown; use 80b-a3b or tiny" >&2
    exit 2
    ;;
esac
: "${GPUS_PER_NODE:=8}" "${TP:=1}" "${PP:=1}" "${EP:=1}"

MODEL+=(
    --seq-length "$SEQ_LENGTH" --group-query-attention --qk-layernorm --attention-output-gate
    --experimental-attention-variant gated_delta_net --linear-attention-freq 4 --linear-conv-kernel-dim 4
    --normalization RMSNorm --norm-epsilon 1e-6 --apply-layernorm-1p --swiglu --disable-bias-linear
    --position-embedding-type rope --rotary-percent 0.25 --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02
    --moe-shared-expert-gate --moe-router-dtype fp32 --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 0.001
)
LAYOUT=(
    --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP"
    --expert-model-parallel-size "$EP" --expert-tensor-parallel-size 1
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --moe-token-dispatcher-type alltoall --moe-grouped-gemm
)
[ "$TP" -gt 1 ] && LAYOUT+=(--sequence-parallel)
[ "$PP" -gt 1 ] && LAYOUT+=(--pipeline-model-parallel-layout auto) # stages of about equal cost
TRAINING=(
    --bf16 --micro-batch-size "${MICRO_BATCH:-1}" --global-batch-size "$BATCH" --train-iters 100000
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-fraction 0.005
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
    --eval-interval 1000 --eval-iters 10 --log-interval 10 --log-throughput
    --save "$CHECKPOINTS" --load "$CHECKPOINTS" --save-interval 500 --keep-last 3
)
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh" # adds flags of tokenizer and data, and starts the processes
