#!/usr/bin/env bash
# Trains cells of the speed table with this project and with an anchor, in turn on the same GPUs, and prints the last
# iterations of both:   GPU_KIT=FOLDER tools/bench_gpu.sh [GPT125M LLAMA1B LLAMA1B/tp2 ...]
#
# After a slash stands a layout: dp2, tp2, pp2, cp2, ep2, or with 4, of so many GPUs. PROFILE=1 also traces the last
# iteration of this project's runs and prints what of its communication nothing hid (tools/show_timeline.py).
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
  local name=$1 gpus=$2 log trace=$out/trace-$1 profile=() last=$((${ITERS:-14} - 1))
  shift 2
  log=$out/ours-$name.log
  if [ -n "${PROFILE:-}" ]; then
    profile=(--profile --use-pytorch-profiler --profile-step-start $((last - 1)) --profile-step-end "$last" --profile-ranks 0
      --tensorboard-dir "$trace")
  fi
  (cd "$root" && timeout "${LIMIT:-150}" python3 -m torch.distributed.run --standalone --nproc_per_node "$gpus" pretrain_gpt.py \
    --tokenizer-type NullTokenizer --mock-data --bf16 --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --clip-grad 1.0 \
    --weight-decay 0.1 --adam-beta2 0.95 --train-iters "${ITERS:-14}" --eval-iters 0 --log-interval 1 --log-throughput \
    --num-workers 2 --attention-dropout 0 --hidden-dropout 0 --manual-gc --manual-gc-interval 100 "$@" "${profile[@]}") > "$log" 2>&1 ||
    { echo "ours $name: failed"; tail -5 "$log"; }
  echo "ours $name:"
  grep -oE "elapsed time per iteration \(ms\): [0-9.]+ \| throughput per GPU \(TFLOP/s/GPU\): [0-9.]+" "$log" | tail -4 || true
  grep -oE "max allocated: [0-9.]+" "$log" | tail -1 || true
  if [ -n "${PROFILE:-}" ]; then
    find "$trace" -name '*.json' -exec gzip -1 {} \; -exec mv {}.gz "$out/trace-$name.json.gz" \;
    python3 "$root/tools/show_timeline.py" "$out/trace-$name.json.gz" 2>&1 | tee "$out/timeline-$name.txt" || true
    rm -rf "$trace"
  fi
}

for each in "${@:-GPT125M}"; do
  cell=${each%%/*} name=${each//\//-} layout=${each#*/}
  model=CELL_$cell
  flags=${!model}
  case $each in
    GPT125M*) batch="--micro-batch-size 16 --global-batch-size 64" ;;
    MOE64/ep4) batch="--micro-batch-size 4 --global-batch-size 64" flags="${flags/--num-layers 8 /--num-layers 16 }" ;;
    LLAMA1B* | MOE64* | MLA*) batch="--micro-batch-size 4 --global-batch-size 16" ;;
    LLAMA8B/dp4 | LLAMA8B/pp4) batch="--micro-batch-size 1 --global-batch-size 32" ;;
    LLAMA8B/tp4) batch="--micro-batch-size 1 --global-batch-size 16" ;;
    LLAMA8B/cp4) batch="--micro-batch-size 1 --global-batch-size 4" flags="${flags//8192/32768}" ;;
    *) batch="--micro-batch-size 1 --global-batch-size 8" ;;
  esac
  gpus=${layout: -1}
  theirs=""
  case $layout in
    dp[24]) layout="--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather" ;;
    tp[24]) layout="--tensor-model-parallel-size $gpus --sequence-parallel --use-distributed-optimizer" ;;
    pp2) layout="--pipeline-model-parallel-size 2" ;;
    pp4) # two chunks a rank: of equal cost here, of equal numbers of layers there
      layout="--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --pipeline-model-parallel-layout auto"
      theirs="--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2" ;;
    cp[24]) layout="--context-parallel-size $gpus --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather" ;;
    ep[24]) layout="--expert-model-parallel-size $gpus --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather" ;;
    "$cell") gpus=1 layout="" ;;
    *) echo "unknown layout in $each: dp, tp, pp, cp, ep with 2 or 4" && exit 2 ;;
  esac
  # shellcheck disable=SC2086  # flags are words
  [ -n "${ANCHOR_ONLY:-}" ] || ours "$name" "$gpus" $flags $batch $layout
  # shellcheck disable=SC2086
  [ -n "${OURS_ONLY:-}" ] || anchor "$name" "$gpus" $flags $batch ${theirs:-$layout} || echo "anchor $name: no figures"
done
