"""The models of the speed table, as flags of pretrain_gpt.py."""

_LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --rotary-base 500000 --disable-bias-linear "
    "--untie-embeddings-and-output-weights --init-method-std 0.02 "
)
_GROUPED = _LLAMA + "--group-query-attention "
_EXPERTS = (
    "--num-experts 64 --moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type "
    "aux_loss --moe-aux-loss-coeff 1e-3 --moe-permute-fusion --moe-router-fusion "
)
_LLAMA8B = _GROUPED + (
    "--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --num-query-groups 8 --kv-channels 128 "
    "--seq-length 8192 --max-position-embeddings 8192 --micro-batch-size 1 --global-batch-size 8 "
)
_ATTENTION1B = _GROUPED + (
    "--num-layers 12 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 16 --num-query-groups 8 "
    "--kv-channels 128 --vocab-size 32000 --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 2 "
    "--global-batch-size 8"
)
_BF16_MOMENTS = (
    "--use-distributed-optimizer --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
)
_NEMOTRON = (
    "--is-hybrid-model --num-attention-heads 32 --group-query-attention --kv-channels 128 --mamba-head-dim 64 "
    "--mamba-num-groups 8 --mamba-state-dim 128 --position-embedding-type none --squared-relu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --normalization RMSNorm --init-method-std 0.02 --vocab-size 131072 "
)
_ROUTER = (
    "--moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-router-dtype fp32 --moe-permute-fusion "
    "--moe-router-fusion "
)
CELLS = {
    "GPT125M": "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --vocab-size 50304 --seq-length 1024 "
    "--max-position-embeddings 1024 --micro-batch-size 64 --global-batch-size 64",
    "LLAMA1B": _GROUPED
    + "--num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 32 --num-query-groups 8 "
    "--kv-channels 64 --vocab-size 128256 --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 4 "
    "--global-batch-size 16",
    "LLAMA8B_12L": _LLAMA8B + "--num-layers 12 --vocab-size 32000",
    "LLAMA8B": _LLAMA8B + "--num-layers 32 --vocab-size 128256",
    "LLAMA8B_1GPU": _LLAMA8B
    + "--num-layers 32 --vocab-size 128256 --use-distributed-optimizer --use-precision-aware-optimizer "
    "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --recompute-granularity selective --recompute-modules layernorm",
    "MOE64": _GROUPED
    + _EXPERTS
    + "--num-layers 8 --hidden-size 2048 --ffn-hidden-size 1024 --num-attention-heads 32 --num-query-groups 4 "
    "--kv-channels 128 --vocab-size 32000 --seq-length 4096 --max-position-embeddings 4096 --moe-router-topk 8 "
    "--moe-ffn-hidden-size 1024 --micro-batch-size 4 --global-batch-size 16",
    "HYBRID_M2": _GROUPED
    + "--hybrid-layer-pattern M-M-M-M*-M-M- --is-hybrid-model --hidden-size 2048 --ffn-hidden-size 5632 "
    "--num-attention-heads 16 --num-query-groups 4 --kv-channels 128 --mamba-num-heads 64 --mamba-head-dim 64 "
    "--mamba-state-dim 128 --mamba-num-groups 8 --vocab-size 32000 --seq-length 4096 --max-position-embeddings 4096 "
    "--micro-batch-size 2 --global-batch-size 8",
    "QWEN4B12L": _GROUPED.replace("500000", "1000000")
    + "--num-layers 12 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32 --num-query-groups 8 "
    "--kv-channels 128 --qk-layernorm --vocab-size 151936 --seq-length 4096 --max-position-embeddings 4096 "
    "--micro-batch-size 2 --global-batch-size 16",
    "NEMOTRON_H": _NEMOTRON
    + "--hybrid-layer-pattern M-M-M*M- --hidden-size 4096 --ffn-hidden-size 21504 --num-query-groups 8 "
    "--mamba-num-heads 128 --seq-length 8192 --max-position-embeddings 8192 --micro-batch-size 1 "
    "--global-batch-size 8",
    "NEMOTRON_30B_A3B": _NEMOTRON
    + _ROUTER
    + _BF16_MOMENTS
    + " --hybrid-layer-pattern MEMEM*ME --hidden-size 2688 --ffn-hidden-size 1856 --num-query-groups 2 "
    "--mamba-num-heads 64 --num-experts 128 --moe-router-topk 6 --moe-ffn-hidden-size 1856 "
    "--moe-shared-expert-intermediate-size 3712 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-topk-scaling-factor 2.5 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 "
    "--seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 8 --global-batch-size 16",
    "QWEN3_NEXT": _GROUPED.replace("500000", "10000000")
    + _ROUTER
    + _BF16_MOMENTS
    + " --num-layers 4 --hidden-size 2048 --ffn-hidden-size 5120 --num-attention-heads 16 --num-query-groups 2 "
    "--kv-channels 256 --rotary-percent 0.25 --apply-layernorm-1p --qk-layernorm --attention-output-gate "
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 4 --linear-num-key-heads 16 "
    "--linear-num-value-heads 32 --linear-key-head-dim 128 --linear-value-head-dim 128 --linear-conv-kernel-dim 4 "
    "--num-experts 512 --moe-router-topk 10 --moe-ffn-hidden-size 512 --moe-shared-expert-intermediate-size 512 "
    "--moe-shared-expert-gate --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 --vocab-size 151936 "
    "--seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 8 --global-batch-size 16",
    "MLA": _LLAMA
    + _EXPERTS
    + "--num-layers 4 --hidden-size 2048 --ffn-hidden-size 10944 --num-attention-heads 16 --multi-latent-attention "
    "--kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --vocab-size 102400 "
    "--seq-length 4096 --max-position-embeddings 4096 --moe-router-topk 6 --moe-ffn-hidden-size 1408 "
    "--moe-shared-expert-intermediate-size 2816 --moe-layer-freq ([0]+[1]*3) --micro-batch-size 4 "
    "--global-batch-size 16",
    "DSA": _LLAMA
    + _BF16_MOMENTS
    + " --num-layers 4 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --multi-latent-attention "
    "--q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 "
    "--experimental-attention-variant dsa --dsa-indexer-n-heads 64 --dsa-indexer-head-dim 128 --dsa-indexer-topk 2048 "
    "--vocab-size 129280 --seq-length 8192 --max-position-embeddings 8192 --micro-batch-size 1 --global-batch-size 4",
    "ATTENTION1B": _ATTENTION1B,
    "DELTA1B": _ATTENTION1B + " --experimental-attention-variant gated_delta_net --linear-attention-freq 4 "
    "--linear-num-key-heads 16 --linear-num-value-heads 32 --linear-key-head-dim 128 --linear-value-head-dim 128 "
    "--linear-conv-kernel-dim 4",
}
"""Models of the speed table with the batch that they are measured with."""
COMMON = (
    "--tokenizer-type NullTokenizer --mock-data --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --clip-grad 1.0 "
    "--weight-decay 0.1 --adam-beta2 0.95 --attention-dropout 0 --hidden-dropout 0 --eval-iters 0 --num-workers 2 "
    "--manual-gc --manual-gc-interval 100 --log-interval 5"
)
"""Flags of every run in addition to those of its model."""
