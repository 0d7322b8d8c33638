#!/usr/bin/env bash
# Trains cells of the speed table with this project and with an anchor, in turn on the same GPUs, and prints the last
# iterations of both:   GPU_KIT=FOLDER tools/bench_gpu.sh [GPT125M LLAMA1B LLAMA1B/tp2 ...]
#
# After a slash stands a layout of two GPUs: dp2, tp2, pp2, cp2.
# FOLDER holds setup.sh, which unpacks the anchor, and anchor.sh, which defines the function `anchor NAME GPUS FLAGS...`
# and the models as CELL_<NAME>. Logs go to ${OUT:-.}.
set -euo pipefail
: "${GPU_KIT:?name the folder of the anchor kit}"
root=$(cd "$(dirname "$0")/.." && pwd)
kit=$GPU_KIT
set +u
. "$kit/setup.sh"
. "$kit/anchor.sh"
set -u
out=$(cd "${OUT:-.}" && pwd)

ours() {
  local name=$1 gpus=$2 log
  shift 2
  log=$out/ours-$name.log
  (cd "$root" && timeout "${LIMIT:-150}" python3 -m torch.distributed.run --standalone --nproc_per_node "$gpus" pretrain_gpt.py \
    --tokenizer-type NullTokenizer --mock-data --bf16 --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --clip-grad 1.0 \
    --weight-decay 0.1 --adam-beta2 0.95 --train-iters "${ITERS:-14}" --eval-iters 0 --log-interval 1 --log-throughput \
    --num-workers 2 --attention-dropout 0 --hidden-dropout 0 --manual-gc --manual-gc-interval 100 "$@") > "$log" 2>&1 ||
    { echo "ours $name: failed"; tail -5 "$log"; }
  echo "ours $name:"
  grep -oE "elapsed time per iteration \(ms\): [0-9.]+ \| throughput per GPU \(TFLOP/s/GPU\): [0-9.]+" "$log" | tail -4
}

for each in "${@:-GPT125M}"; do
  cell=${each%%/*} name=${each//\//-}
  model=CELL_$cell
  case $cell in
    GPT125M) batch="--micro-batch-size 16 --global-batch-size 64" ;;
    LLAMA1B | MOE64 | MLA) batch="--micro-batch-size 4 --global-batch-size 16" ;;
    *) batch="--micro-batch-size 1 --global-batch-size 8" ;;
  esac
  gpus=2
  case $each in
    */dp2) layout="--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather" ;;
    */tp2) layout="--tensor-model-parallel-size 2 --sequence-parallel" ;;
    */pp2) layout="--pipeline-model-parallel-size 2" ;;
    */cp2) layout="--context-parallel-size 2" ;;
    */*) echo "unknown layout in $each: dp2, tp2, pp2, cp2" && exit 2 ;;
    *) gpus=1 layout="" ;;
  esac
  # shellcheck disable=SC2086  # flags are words
  ours "$name" $gpus ${!model} $batch $layout
  # shellcheck disable=SC2086
  anchor "$name" $gpus ${!model} $batch $layout || echo "anchor $name: no figures"
done
