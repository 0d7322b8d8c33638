#!/bin/bash
# Train Nemotron-H:   ./train_nemotron_h.sh [CHECKPOINTS [TOKENIZER [DATA]]] [flags of pretrain_mamba.py]
#
# CHECKPOINTS  folder to save to and to resume from; default: one under runs/
# TOKENIZER    folder with a tokenizer.json, or MOCK (the default): text is token ids
# DATA         prefix that tools/preprocess_data.py wrote, or MOCK (the default): made-up data
# flags        are added after those of this script, and override them
#
# Environment variables:
# SIZE            8b (default), 30b-a3b (experts), or tiny and tiny-moe, which train on any laptop
# GPUS_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   the processes, as for torchrun
# TP, PP, EP      tensor, pipeline and expert parallel sizes
# SEQ_LENGTH, MICRO_BATCH, BATCH   tokens of a sample, samples of a micro-batch and of a step
# PRETRAINED      folder of a checkpoint to start from, such as an import from the hub
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../arguments.sh" # CHECKPOINTS, TOKENIZER, DATA

SCRIPT=pretrain_mamba.py VOCABULARY=131072 DECAY=20000 EXPERTS=()
case ${SIZE:-8b} in
8b)
    MODEL=(
        --hybrid-layer-pattern "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
        --hidden-size 4096 --ffn-hidden-size 21504 --num-attention-heads 32 --num-query-groups 8 --kv-channels 128
        --mamba-num-heads 128 --mamba-head-dim 64 --mamba-num-groups 8 --mamba-state-dim 128
    )
    : "${SEQ_LENGTH:=8192}" "${BATCH:=768}" "${TP:=2}"
    ;;
30b-a3b)
    MODEL=(
        --hybrid-layer-pattern "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
        --hidden-size 2688 --ffn-hidden-size 1856 --num-attention-heads 32 --num-query-groups 2 --kv-channels 128
        --mamba-num-heads 64 --mamba-head-dim 64 --mamba-num-groups 8 --mamba-state-dim 128
    )
    EXPERTS=(
        --num-experts 128 --moe-router-topk 6 --moe-ffn-hidden-size 1856 --moe-shared-expert-intermediate-size 3712
    )
    : "${SEQ_LENGTH:=8192}" "${BATCH:=3072}" "${NNODES:=4}" "${EP:=8}"
    ;;
tiny | tiny-moe)
    MODEL=(
        --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --num-query-groups 2 --kv-channels 16
        --mamba-num-heads 8 --mamba-head-dim 16 --mamba-num-groups 4 --mamba-state-dim 16
    )
    VOCABULARY=512 DECAY=4
    : "${SEQ_LENGTH:=64}" "${BATCH:=8}" "${GPUS_PER_NODE:=2}"
    if [ "$SIZE" = tiny-moe ]; then
        MODEL+=(--hybrid-layer-pattern "MEM*E")
        EXPERTS=(
            --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 32
        )
        : "${EP:=2}"
    else
        MODEL+=(--hybrid-layer-pattern "M-M*-")
        : "${TP:=2}"
    fi
    ;;
*)
    echo "SIZE=$SIZE is unknown; use 8b, 30b-a3b, tiny or tiny-moe" >&2
    exit 2
    ;;
esac
: "${GPUS_PER_NODE:=8}" "${TP:=1}" "${PP:=1}" "${EP:=1}"

MODEL+=(
    --seq-length "$SEQ_LENGTH" --max-position-embeddings "$SEQ_LENGTH" --group-query-attention
    --position-embedding-type none --squared-relu --disable-bias-linear --untie-embeddings-and-output-weights
    --normalization RMSNorm --norm-epsilon 1e-5 --mamba-conv-kernel-dim 4 --mamba-min-time-step 0.001
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02
)
LAYOUT=(
    --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP"
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
[ "$TP" -gt 1 ] && LAYOUT+=(--sequence-parallel)
[ "$PP" -gt 1 ] && LAYOUT+=(--pipeline-model-parallel-layout auto) # stages of about equal cost
if [ ${#EXPERTS[@]} -gt 0 ]; then
    MODEL+=(
        "${EXPERTS[@]}" --moe-router-score-function sigmoid --moe-router-enable-expert-bias
        --moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32
        --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
    )
    LAYOUT+=(
        --expert-model-parallel-size "$EP" --expert-tensor-parallel-size 1
        --moe-token-dispatcher-type alltoall --moe-grouped-gemm
    )
fi
TRAINING=(
    --bf16 --micro-batch-size "${MICRO_BATCH:-1}" --global-batch-size "$BATCH" --train-iters 100000
    --lr 8e-4 --min-lr 8e-6 --lr-decay-style WSD --lr-wsd-decay-style minus_sqrt --lr-wsd-decay-iters "$DECAY"
    --lr-warmup-fraction 0.005 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
    --eval-interval 1000 --eval-iters 10 --log-interval 10 --log-throughput
    --save "$CHECKPOINTS" --load "$CHECKPOINTS" --save-interval 500 --keep-last 3
)
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh" # adds flags of tokenizer and data, and starts the processes
