#!/bin/bash
# Train DeepSeek-V3:   ./train_deepseek_v3.sh [CHECKPOINTS [TOKENIZER [DATA]]] [flags of pretrain_gpt.py]
#
# CHECKPOINTS  folder to save to and to resume from; default: one under runs/
# TOKENIZER    folder with a tokenizer.json, or MOCK (the default): text is token ids
# DATA         prefix that tools/preprocess_data.py wrote, or MOCK (the default): made-up data
# flags        are added after those of this script, and override them
#
# Environment variables:
# SIZE            671b (default), or tiny, which trains on any laptop
# GPUS_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   the processes, as for torchrun
# TP, PP, EP      tensor, pipeline and expert parallel sizes
# SEQ_LENGTH, MICRO_BATCH, BATCH   tokens of a sample, samples of a micro-batch and of a step
# PRETRAINED      folder of a checkpoint to start from
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../arguments.sh" # CHECKPOINTS, TOKENIZER, DATA

case ${SIZE:-671b} in
671b)
    MODEL=(
        --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128
        --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128
        --num-experts 256 --moe-layer-freq "[0]*3+[1]*58" --moe-ffn-hidden-size 2048 --moe-router-topk 8
        --moe-shared-expert-intermediate-size 2048 --moe-router-num-groups 8 --moe-router-group-topk 4
    )
    VOCABULARY=129280
    : "${SEQ_LENGTH:=4096}" "${BATCH:=3072}" "${NNODES:=32}" "${PP:=8}" "${EP:=32}"
    ;;
tiny)
    MODEL=(
        --num-layers 3 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4
        --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16
        --num-experts 8 --moe-layer-freq "[0]+[1]*2" --moe-ffn-hidden-size 32 --moe-router-topk 2
        --moe-shared-expert-intermediate-size 32 --moe-router-num-groups 4 --moe-router-group-topk 2
    )
    VOCABULARY=512
    : "${SEQ_LENGTH:=64}" "${BATCH:=8}" "${GPUS_PER_NODE:=2}" "${EP:=2}"
    ;;
*)
    echo "SIZE=$SIZE is unknown; use 671b or tiny" >&2
    exit 2
    ;;
esac
: "${GPUS_PER_NODE:=8}" "${TP:=1}" "${PP:=1}" "${EP:=1}"

MODEL+=(
    --seq-length "$SEQ_LENGTH" --max-position-embeddings "$SEQ_LENGTH" --multi-latent-attention --qk-layernorm
    --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --position-embedding-type rope --rope-type rope --rotary-base 10000
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.006
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
    --moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
    --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3
)
LAYOUT=(
    --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP"
    --expert-model-parallel-size "$EP" --expert-tensor-parallel-size 1
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --moe-token-dispatcher-type flex --moe-grouped-gemm
)
[ "$TP" -gt 1 ] && LAYOUT+=(--sequence-parallel)
[ "$PP" -gt 1 ] && LAYOUT+=(--pipeline-model-parallel-layout auto) # stages of about equal cost
TRAINING=(
    --bf16 --micro-batch-size "${MICRO_BATCH:-1}" --global-batch-size "$BATCH" --train-iters 100000
    --lr 2.2e-4 --min-lr 2.2e-5 --lr-decay-style cosine --lr-warmup-iters 2000
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
    --recompute-granularity selective --recompute-modules mla_up_proj mlp moe_act layernorm
    --eval-interval 1000 --eval-iters 10 --log-interval 10 --log-throughput
    --save "$CHECKPOINTS" --load "$CHECKPOINTS" --save-interval 500 --keep-last 3
)
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh" # adds flags of tokenizer and data, and starts the processes
