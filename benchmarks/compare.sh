#!/usr/bin/env bash
# Compares the speed of this project with that of an anchor, another training program. Both train the same models in turn
# on the same GPUs. Prints the ratio of their speeds, and appends a row to $RESULTS (benchmarks/results/h200.json):
#
#   GPU_KIT=FOLDER benchmarks/compare.sh GPT125M LLAMA1B LLAMA1B/tp2 ...
#   GPU_KIT=FOLDER GPUS=4 BUDGET=540 benchmarks/compare.sh
#
# An argument is a cell: a model, or a model and a layout of benchmarks/layouts.py after a slash, such as dp2 or ep4-flex.
# With GPUS=N and no cell, all cells of N GPUs that have no row with a timeline in $RESULTS are measured, or as many as
# are expected to take BUDGET seconds. The next call continues with the others. These rows measure 5 steps of this
# project after 2 that are not measured and before one that is traced, and 8 of the anchor. STEPS, WARMUP and ITERS change
# these numbers. Cells of a call that compare with the same run of the anchor share it.
#
# FOLDER contains setup.sh, which installs the anchor, and anchor.sh, which defines the function `anchor NAME GPUS
# FLAGS...`. benchmarks/stand_in is such a folder for trying this script: its anchor is this project. TINY=1 makes all
# models tiny, so that this runs on CPUs.
#
#   OUT        folder of the logs (default: the current one)
#   OURS       more flags of this project, such as OURS="--kernels" for the time of each kernel
#   ANCHOR     more flags of the anchor
#   ITERS      iterations of the anchor
#   LIMIT      seconds that one run may take
#   OURS_ONLY=1, ANCHOR_ONLY=1    runs one side only, and prints no ratio
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
      "$root/benchmarks/bench.py" "$cell" --json "$out/ours-$name.json" $measurement $ours ${OURS:-} \
      > "$out/ours-$name.log" 2>&1 || { echo "ours $name: failed" && tail -n 5 "$out/ours-$name.log"; }
    sed -n "/^$cell: /,\$p" "$out/ours-$name.log"
  fi
  [ -z "${OURS_ONLY:-}" ] || continue
  # shellcheck disable=SC2086,SC2154
  if [[ $measured != *" $reference "* ]]; then
    flags=$(PYTHONPATH=$root python3 "$root/benchmarks/bench.py" "$cell" --flags $theirs)
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
