#!/bin/bash
# Train Llama 3 8B in fp8:   ./train_llama3_8b_fp8.sh [CHECKPOINTS [TENSORBOARD [TOKENIZER [DATA]]]] [flags]
#
# CHECKPOINTS  folder to save to and to resume from; default: runs/llama3_8b_fp8
# TENSORBOARD  folder of TensorBoard's files; default: runs/llama3_8b_fp8/tensorboard
# TOKENIZER    folder with a tokenizer.json, or MOCK (the default): text is token ids
# DATA         prefix that tools/preprocess_data.py wrote, or MOCK (the default): made-up data
# flags        are added after those of this script, and override them
#
# The arguments and flags are those of Megatron-LM's script of this name; train_llama.sh has other sizes and defaults.
#
# Environment variables:
# GPUS_PER_NODE, NUM_NODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   the processes, as for torchrun
# TP_SIZE, PP_SIZE, CP_SIZE            tensor, pipeline and context parallel sizes
# NUM_LAYERS, HIDDEN_SIZE, FFN_HIDDEN_SIZE, NUM_HEADS, NUM_QUERY_GROUPS, KV_CHANNELS, SEQ_LENGTH   sizes of the model
# MICRO_BATCH_SIZE, GLOBAL_BATCH_SIZE  samples of a micro-batch and of a step
# DTYPE                                fp8 (default) or bf16
set -euo pipefail

ARGUMENTS=()
while [ $# -gt 0 ] && [[ $1 != -* ]]; do
    ARGUMENTS+=("$1")
    shift
done
CHECKPOINTS=${ARGUMENTS[0]:-runs/llama3_8b_fp8} TOKENIZER=${ARGUMENTS[2]:-MOCK} DATA=${ARGUMENTS[3]:-MOCK}
TENSORBOARD=${ARGUMENTS[1]:-runs/llama3_8b_fp8/tensorboard}
: "${GPUS_PER_NODE:=8}" "${NNODES:=${NUM_NODES:-1}}" "${SEQ_LENGTH:=8192}"

MODEL=(
    --use-mcore-models --num-layers "${NUM_LAYERS:-32}" --hidden-size "${HIDDEN_SIZE:-4096}"
    --ffn-hidden-size "${FFN_HIDDEN_SIZE:-14336}" --num-attention-heads "${NUM_HEADS:-32}"
    --group-query-attention --num-query-groups "${NUM_QUERY_GROUPS:-8}" --kv-channels "${KV_CHANNELS:-128}"
    --seq-length "$SEQ_LENGTH" --max-position-embeddings "$SEQ_LENGTH"
    --position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0
    --hidden-dropout 0.0 --swiglu --init-method-std 0.0134 --apply-layernorm-1p --untie-embeddings-and-output-weights
    --disable-bias-linear
)
LAYOUT=(
    --tensor-model-parallel-size "${TP_SIZE:-1}" --pipeline-model-parallel-size "${PP_SIZE:-1}"
    --context-parallel-size "${CP_SIZE:-1}" --sequence-parallel
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
TRAINING=(
    --micro-batch-size "${MICRO_BATCH_SIZE:-1}" --global-batch-size "${GLOBAL_BATCH_SIZE:-128}"
    --train-samples 1953125000 --lr-decay-samples 1949218748 --lr-warmup-samples 3906252
    --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5 --lr-decay-style cosine
    --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
    --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion --calculate-per-token-loss --attention-backend auto
    --manual-gc --empty-unused-memory-level 1 --exit-duration-in-mins 235 --distributed-timeout-minutes 60
    --log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput
    --ckpt-format torch_dist --save "$CHECKPOINTS" --load "$CHECKPOINTS" --tensorboard-dir "$TENSORBOARD"
)
if [ "${DTYPE:-fp8}" = fp8 ]; then
    TRAINING+=(--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather)
fi
VOCABULARY=128256
if [ "$TOKENIZER" = MOCK ]; then
    TEXT=(--tokenizer-type NullTokenizer --vocab-size $VOCABULARY)
else
    TEXT=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER")
fi
if [ "$DATA" = MOCK ]; then TEXT+=(--mock-data); else TEXT+=(--data-path "$DATA"); fi
TEXT+=(--split "'99,1,0'" --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1)
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh" # starts the processes
