#!/usr/bin/env bash
# Compares the losses of this project with those of an anchor, another training program. From one checkpoint of the
# anchor, both train the rest of a run on real text, all runs at the same time on one GPU:
#
#   GPU_KIT=FOLDER benchmarks/converge.sh GPT125M                        # or MOE8
#   GPU_KIT=FOLDER benchmarks/converge.sh MOE8 anchor anchor-again ours ours-plain other-seed
#
# The anchor writes the checkpoint after $BEGIN of $ITERS steps (default: 10 of 2000), and tools/checkpoint/convert.py
# import-megatron converts it. All runs train on the same samples in the same order, except other-seed:
#   anchor        the reference
#   anchor-again  the anchor once more, which shows the effect of its own rounding; $AGAIN are more flags of this run
#   other-seed    the anchor with another seed, so with another order of samples
#   ours          this project
#   ours-plain    this project with plain torch instead of its kernels, which round differently
#   ours-other    the checkout in the folder $OTHER, such as one with a change; $OTHER_FLAGS are more flags of this run
# Default: anchor, other-seed and ours. The last lines are tables of smoothed losses (benchmarks/convergence.py).
#
# FOLDER is that of compare.sh. The text is prepared once.
#   OUT        folder of the results (default: runs/converge)
#   LIMIT      seconds after which all runs are stopped (default: 7200); the steps that they have done are compared
#   MORE       more flags of all runs
#   WINDOW     number of steps over which losses are averaged (default: 100)
set -euo pipefail
: "${GPU_KIT:?name the folder of the anchor kit}"
root=$(cd "$(dirname "$0")/.." && pwd)
cell=${1:-GPT125M}
shift || true
runs=${*:-anchor other-seed ours}
begin=${BEGIN:-10} limit=${LIMIT:-7200}
export ITERS=${ITERS:-2000} PYTHONPATH=$root
set +u
. "$GPU_KIT/setup.sh"
. "$GPU_KIT/anchor.sh"
set -u
mkdir -p "${OUT:=runs/converge}"
OUT=$(cd "$OUT" && pwd)
out=$OUT/$cell

experts="--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 1024 --moe-grouped-gemm"
experts="$experts --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
case $cell in
  GPT125M) model="--num-layers 12 --hidden-size 768 --num-attention-heads 12" ;;
  MOE8)
    model="--num-layers 4 --hidden-size 512 --ffn-hidden-size 1024 --num-attention-heads 8 --swiglu --normalization RMSNorm"
    model="$model --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights $experts" ;;
  *) echo "unknown model $cell: GPT125M or MOE8" && exit 2 ;;
esac
for run in $runs; do
  case $run in
    anchor | anchor-again | other-seed | ours | ours-plain) ;;
    ours-other) : "${OTHER:?ours-other needs the folder of the other checkout}" ;;
    *) echo "unknown run $run: anchor, anchor-again, other-seed, ours, ours-plain or ours-other" && exit 2 ;;
  esac
done
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

left() { # seconds until the limit, at least 1
  echo $((limit > SECONDS ? limit - SECONDS : 1))
}
# shellcheck disable=SC2086  # flags are words
train_anchor() { # run, more flags
  local run=$1
  shift
  OUT=$out LIMIT=$(left) anchor "$run" 1 $model $schedule "$@" > "$out/$run.txt"
}
train_ours() { # run, folder of the code, more flags
  local run=$1 code=$2 seconds status=0
  shift 2
  rm -f "$out/$run.jsonl"
  seconds=$(left)
  PYTHONPATH=$code timeout "$seconds" python3 "$code/pretrain_gpt.py" --config "$out/imported/flags.yaml" \
    --load "$out/imported" --data-path "$text" --split 99,1,0 --eval-iters 0 --log-interval 1 \
    --metrics-path "$out/$run.jsonl" "$@" > "$out/$run.log" 2>&1 || status=$?
  echo "$run: exit $status" > "$out/$run.txt"
  [ "$status" = 0 ] || [ "$status" = 124 ] || tail -n 5 "$out/$run.log" >> "$out/$run.txt"
}
start() { # run
  case $1 in
    anchor) train_anchor anchor --load "$out/theirs" ;;
    # shellcheck disable=SC2086
    anchor-again) train_anchor anchor-again --load "$out/theirs" ${AGAIN:-} ;;
    other-seed) train_anchor other-seed --load "$out/theirs" --seed 4321 --no-load-rng ;;
    ours) train_ours ours "$root" ;;
    ours-plain) train_ours ours-plain "$root" --transformer-impl local ;;
    # shellcheck disable=SC2086
    ours-other) train_ours ours-other "$(cd "$OTHER" && pwd)" ${OTHER_FLAGS:-} ;;
  esac
}
train_anchor begin --save "$out/theirs" --save-interval "$begin" --exit-interval "$begin" || true
cat "$out/begin.txt"
for run in $runs; do
  case $run in ours*) ;; *) start "$run" & ;; esac
done
python3 "$root/tools/checkpoint/convert.py" import-megatron --load "$out/theirs" --save "$out/imported"
for run in $runs; do
  case $run in ours*) start "$run" & ;; esac
done
wait
compared=()
for run in $runs; do
  cat "$out/$run.txt"
  case $run in
    ours*) compared+=("$run=$out/$run.jsonl") ;;
    anchor) compared=("$run=$out/$run.log" ${compared[@]+"${compared[@]}"}) ;; # the reference is the first
    *) compared+=("$run=$out/$run.log") ;;
  esac
done
python3 "$root/benchmarks/convergence.py" compare "${compared[@]}" --window "${WINDOW:-100}" --title "$cell" \
  --picture "$out/losses.png"
