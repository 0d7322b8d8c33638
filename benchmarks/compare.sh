#!/usr/bin/env bash
# Trains models of the speed table with this project and with an anchor, in turn on the same GPUs, prints the ratio of
# their speeds and appends a row to $RESULTS (default: benchmarks/results/h200.json):
#
#   GPU_KIT=FOLDER benchmarks/compare.sh GPT125M LLAMA1B LLAMA1B/tp2 ...
#
# After a slash stands a layout: dp, tp, pp, cp or ep with 2 or 4 GPUs; or graphs: micro-batches of one sample, 16 a
# step, with the CUDA graphs of both sides on one GPU. FOLDER holds setup.sh, which unpacks the anchor, and anchor.sh,
# which defines the function `anchor NAME GPUS FLAGS...`. Logs go to ${OUT:-.}. OURS and ANCHOR are more flags of one
# side (OURS="--kernels": where a step goes), ITERS the anchor's iterations. ANCHOR_ONLY=1 and OURS_ONLY=1 run one side,
# and print no ratio.
set -euo pipefail
: "${GPU_KIT:?name the folder of the anchor kit}"
root=$(cd "$(dirname "$0")/.." && pwd)
results=${RESULTS:-$root/benchmarks/results/h200.json}
export ITERS=${ITERS:-20}
set +u
. "$GPU_KIT/setup.sh"
. "$GPU_KIT/anchor.sh"
set -u
out=$(cd "${OUT:-.}" && pwd)

for each in "${@:-GPT125M}"; do
  cell=${each%%/*} name=${each//\//-} layout=${each#*/} theirs=""
  gpus=${layout: -1}
  data_parallel="--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
  case $layout in
    "$cell") gpus=1 layout="" ;;
    graphs)
      gpus=1 layout="--micro-batch-size 1 --global-batch-size 16 --cuda-graph-impl local"
      theirs="$layout --te-rng-tracker --no-check-for-nan-in-loss-and-grad"
      layout="$layout --optimizer-cuda-graph" ;;
    dp[24]) layout=$data_parallel ;;
    tp[24]) layout="--tensor-model-parallel-size $gpus --sequence-parallel --use-distributed-optimizer" ;;
    pp2) layout="--pipeline-model-parallel-size 2" ;;
    pp4) # two chunks a rank: of equal cost here, of equal numbers of layers there
      theirs="--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2"
      layout="$theirs --pipeline-model-parallel-layout auto" ;;
    cp[24]) layout="--context-parallel-size $gpus $data_parallel" ;;
    ep[24]) layout="--expert-model-parallel-size $gpus $data_parallel" ;;
    *) echo "unknown layout in $each: dp, tp, pp, cp, ep with 2 or 4; graphs" && exit 2 ;;
  esac
  case $each in # where one GPU's batch does not fit the layout
    MOE64/ep4) layout="$layout --num-layers 16 --global-batch-size 64" ;;
    LLAMA8B/dp4 | LLAMA8B/pp4) layout="$layout --global-batch-size 32" ;;
    LLAMA8B/tp4) layout="$layout --global-batch-size 16" ;;
    LLAMA8B/cp4) layout="$layout --seq-length 32768 --max-position-embeddings 32768 --global-batch-size 4" ;;
  esac
  rm -f "$out/ours-$name.json"
  # shellcheck disable=SC2086  # flags are words
  if [ -z "${ANCHOR_ONLY:-}" ]; then
    PYTHONPATH=$root timeout "${LIMIT:-300}" python3 -m torch.distributed.run --standalone --nproc_per_node "$gpus" \
      "$root/tools/bench.py" "$cell" --json "$out/ours-$name.json" $layout ${OURS:-} > "$out/ours-$name.log" 2>&1 ||
      { echo "ours $name: failed" && tail -n 5 "$out/ours-$name.log"; }
    sed -n "/^$cell: /,\$p" "$out/ours-$name.log"
  fi
  [ -z "${OURS_ONLY:-}" ] || continue
  flags=$(PYTHONPATH=$root python3 "$root/tools/bench.py" "$cell" --flags ${theirs:-$layout})
  # shellcheck disable=SC2086
  LIMIT=${LIMIT:-300} anchor "$name" "$gpus" $flags --log-interval 5 ${ANCHOR:-} || echo "anchor $name: no figures"
  [ -n "${ANCHOR_ONLY:-}" ] ||
    python3 "$root/benchmarks/add_row.py" "$each" "$out/ours-$name.json" "$out/$name.log" "$results" \
      --anchor-flags="${ANCHOR:-}" || echo "$each: no ratio"
done
