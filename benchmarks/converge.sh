#!/usr/bin/env bash
# From one checkpoint of an anchor, trains the rest of the run with this project and twice with the anchor, on real
# text, each on one GPU, all three at once:
#
#   GPU_KIT=FOLDER benchmarks/converge.sh GPT125M        # or MOE8
#
# The anchor writes the checkpoint after $BEGIN of $ITERS steps (default 10 of 2000); import-megatron reads it. Ours and
# the anchor go on with the same samples; the second run of the anchor has another seed, so another order of samples.
# The last lines are a table of smoothed losses (benchmarks/convergence.py). FOLDER is that of compare.sh; results go to
# ${OUT:-runs/converge}. MORE are flags of all runs; WINDOW is the number of steps of a mean (100).
set -euo pipefail
: "${GPU_KIT:?name the folder of the anchor kit}"
root=$(cd "$(dirname "$0")/.." && pwd)
begin=${BEGIN:-10}
export ITERS=${ITERS:-2000} PYTHONPATH=$root
set +u
. "$GPU_KIT/setup.sh"
. "$GPU_KIT/anchor.sh"
set -u
mkdir -p "${OUT:=runs/converge}"
OUT=$(cd "$OUT" && pwd)

experts="--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 1024 --moe-grouped-gemm"
experts="$experts --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
case ${1:-GPT125M} in
  GPT125M) model="--num-layers 12 --hidden-size 768 --num-attention-heads 12" ;;
  MOE8)
    model="--num-layers 4 --hidden-size 512 --ffn-hidden-size 1024 --num-attention-heads 8 --swiglu --normalization RMSNorm"
    model="$model --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights $experts" ;;
  *) echo "unknown model $1: GPT125M or MOE8" && exit 2 ;;
esac
name=${1:-GPT125M} out=$OUT/${1:-GPT125M}
model="$model --vocab-size 32767 --seq-length 1024 --max-position-embeddings 1024"
schedule="--micro-batch-size 8 --global-batch-size 8 --lr 6e-4 --min-lr 6e-5 --lr-warmup-iters $((ITERS / 20)) --lr-decay-iters $ITERS ${MORE:-}"
mkdir -p "$out"

text=$OUT/text_text_document
if [ ! -e "$text.idx" ]; then
  python3 "$root/benchmarks/convergence.py" text "$OUT/text.jsonl"
  python3 "$root/tools/train_tokenizer.py" --input "$OUT/text.jsonl" --vocab-size 32767 --max-bytes 30000000 \
    --output-dir "$OUT/tokenizer"
  python3 "$root/tools/preprocess_data.py" --input "$OUT/text.jsonl" --output-prefix "$OUT/text" --append-eod \
    --tokenizer-type GPT2BPETokenizer --vocab-file "$OUT/tokenizer/vocab.json" \
    --merge-file "$OUT/tokenizer/merges.txt" --workers "$(nproc)"
fi
export ANCHOR_DATA=$text
# shellcheck disable=SC2086  # flags are words
train_anchor() { # log, more flags
  local log=$1
  shift
  OUT=$out LIMIT=${LIMIT:-600} anchor "$log" 1 $model $schedule "$@"
}
train_anchor begin --save "$out/theirs" --save-interval "$begin" --exit-interval "$begin"
python3 "$root/tools/checkpoint/convert.py" import-megatron --load "$out/theirs" --save "$out/imported"
train_anchor anchor --load "$out/theirs" > "$out/anchor.txt" &
train_anchor other-seed --load "$out/theirs" --seed 4321 --no-load-rng > "$out/other-seed.txt" &
rm -f "$out/metrics.jsonl"
# shellcheck disable=SC2046
python3 "$root/pretrain_gpt.py" $(cat "$out/imported/flags.txt") --load "$out/imported" --data-path "$text" \
  --split 99,1,0 --eval-iters 0 --log-interval 1 --metrics-path "$out/metrics.jsonl" > "$out/ours.log" 2>&1 ||
  { echo "ours: failed" && tail -n 5 "$out/ours.log"; }
wait
cat "$out/anchor.txt" "$out/other-seed.txt"
python3 "$root/benchmarks/convergence.py" compare "$out/metrics.jsonl" "$out/anchor.log" "$out/other-seed.log" \
  --window "${WINDOW:-100}" --title "$name" --picture "$out/losses.png"
