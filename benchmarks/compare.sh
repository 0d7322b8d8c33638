#!/usr/bin/env bash
# Trains models of the speed table with this project and with an anchor, in turn on the same GPUs, prints the ratio of
# their speeds and appends a row to $RESULTS (default: benchmarks/results/h200.json):
#
#   GPU_KIT=FOLDER benchmarks/compare.sh GPT125M LLAMA1B LLAMA1B/tp2 ...
#   GPU_KIT=FOLDER GPUS=4 BUDGET=540 benchmarks/compare.sh
#
# After a slash stands a layout of benchmarks/layouts.py, such as dp2, tp4 or ep4-flex. With GPUS=N and no cell all cells
# of N GPUs are measured that have no row with a timeline in $RESULTS, as far as they fit into BUDGET seconds (default: no
# limit); the next call goes on with the others. Such rows come from 5 steps of ours after 2, one traced step, and 8 of the
# anchor; STEPS, WARMUP and ITERS change that. A run of the anchor serves all cells of a call that refer to it.
#
# FOLDER holds setup.sh, which unpacks the anchor, and anchor.sh, which defines the function `anchor NAME GPUS FLAGS...`;
# benchmarks/stand_in is such a folder whose anchor is this project, to rehearse. TINY=1 makes all models tiny, so that
# the rehearsal runs on CPUs. Logs go to ${OUT:-.}. OURS and ANCHOR are more flags of one side (OURS="--kernels": where a
# step goes), ITERS the anchor's iterations, LIMIT the seconds of one run. ANCHOR_ONLY=1 and OURS_ONLY=1 run one side, and
# print no ratio.
set -euo pipefail
: "${GPU_KIT:?name the folder of the anchor kit}"
root=$(cd "$(dirname "$0")/.." && pwd)
results=${RESULTS:-$root/benchmarks/results/h200.json}
measurement="" interval=5 keep=""
if [ $# = 0 ] && [ -n "${GPUS:-}" ]; then
  measurement="--warmup ${WARMUP:-2} --steps ${STEPS:-5} --kernels" interval=2 keep="--keep-ours"
  ITERS=${ITERS:-8}
  # shellcheck disable=SC2046  # names are words
  set -- $(python3 "$root/benchmarks/layouts.py" --gpus "$GPUS" --budget "${BUDGET:-1e9}" --results "$results" \
    --steps $((${WARMUP:-2} + ${STEPS:-5} + 1)) --iterations "$ITERS")
  echo "to measure: ${*:-nothing}"
  [ $# -gt 0 ] || exit 0
fi
export ITERS=${ITERS:-20}
set +u
. "$GPU_KIT/setup.sh"
. "$GPU_KIT/anchor.sh"
set -u
out=$(cd "${OUT:-.}" && pwd)
budget=${BUDGET:-1000000} measured=" "

timeout() { # the anchor sets CUDA_DEVICE_MAX_CONNECTIONS=1, which some of its layouts refuse
  CUDA_DEVICE_MAX_CONNECTIONS=${connections:-1} command timeout "$@"
}
limit() { # seconds that one run may take
  local left=$((budget - SECONDS)) most=${LIMIT:-300}
  echo $((left < 1 ? 1 : left < most ? left : most))
}

for each in "${@:-GPT125M}"; do
  assignments=$(python3 "$root/benchmarks/layouts.py" "$each" ${TINY:+--tiny})
  eval "$assignments" # cell, gpus, ours, reference, theirs, connections
  # shellcheck disable=SC2154
  name=${each//\//-} log=${reference//\//-}
  rm -f "$out/ours-$name.json"
  # shellcheck disable=SC2086,SC2154  # flags are words
  if [ -z "${ANCHOR_ONLY:-}" ]; then
    PYTHONPATH=$root command timeout "$(limit)" python3 -m torch.distributed.run --standalone --nproc_per_node "$gpus" \
      "$root/tools/bench.py" "$cell" --json "$out/ours-$name.json" $measurement $ours ${OURS:-} \
      > "$out/ours-$name.log" 2>&1 || { echo "ours $name: failed" && tail -n 5 "$out/ours-$name.log"; }
    sed -n "/^$cell: /,\$p" "$out/ours-$name.log"
  fi
  [ -z "${OURS_ONLY:-}" ] || continue
  # shellcheck disable=SC2086,SC2154
  if [[ $measured != *" $reference "* ]]; then
    flags=$(PYTHONPATH=$root python3 "$root/tools/bench.py" "$cell" --flags $theirs)
    rm -f "$out/$log.log"
    # in a shell of its own, since kits set variables
    (LIMIT=$(limit) anchor "$log" "$gpus" $flags --log-interval "$interval" ${ANCHOR:-}) || echo "anchor $log: no figures"
    measured="$measured$reference "
  fi
  # shellcheck disable=SC2086
  [ -n "${ANCHOR_ONLY:-}" ] || [ ! -e "$out/ours-$name.json" ] ||
    python3 "$root/benchmarks/add_row.py" "$each" "$out/ours-$name.json" "$out/$log.log" "$results" $keep \
      --reference "$reference" --anchor-flags="${ANCHOR:-}" || echo "$each: no ratio"
done
