#!/usr/bin/env bash
# Last call: both modes of attention, the price of exact sums, DELTA1B's memory, regression rows, new cells.
cd "$(dirname "$0")"; export PYTHONPATH=$PWD OMP_NUM_THREADS=4 COMMIT=${COMMIT:-k2}
OUT=${OUT:-/tmp/out}; mkdir -p "$OUT"; root=$PWD; BUDGET=${BUDGET:-196}
say() { echo "== ${SECONDS}s $*"; }
left() { echo $((BUDGET - SECONDS < 1 ? 1 : BUDGET - SECONDS)); }
limit() { local most=$1; [ "$(left)" -lt "$most" ] && left || echo "$most"; }
bench() { # NAME FLAGS...
  local name=$1; shift
  [ "$(left)" -gt 12 ] || { say "$name: no time"; return; }
  timeout "$(limit 45)" python3 benchmarks/bench.py "$@" --json "$OUT/$name.row" > /tmp/$name.txt 2>&1; local rc=$?
  say "$name: exit $rc"; grep -A18 "ms a step" /tmp/$name.txt | cut -c1-130 || tail -n 6 /tmp/$name.txt | cut -c1-300
  [ $rc = 0 ] || { tail -n 6 /tmp/$name.txt | cut -c1-300; }
}
say begin
bench plain ATTENTION1B --warmup 3 --steps 8 --kernels
bench strict ATTENTION1B --warmup 3 --steps 8 --deterministic-mode
python3 benchmarks/recheck.py --warmup 2 --steps 6 --limit 40 --results "$OUT/rows.json" LLAMA8B_12L MOE64 \
  "MOE64 --fp8-format hybrid --fp8-recipe tensorwise" LLAMA1B "LLAMA1B --fp8-format hybrid --fp8-recipe tensorwise" 2>&1
say "regression rows"
bench delta DELTA1B --warmup 2 --steps 6
bench exact ATTENTION1B --warmup 2 --steps 6 --deterministic-mode --exact-data-parallel-sums
[ "$(left)" -gt 14 ] && timeout "$(limit 25)" python3 -m pytest -n 0 -q -p no:cacheprovider tests/gpu/test_attention_on_gpu.py -m gpu \
  -k "equal_in_every_call or other_sums" 2>&1 | tail -n 3 | cut -c1-200 && say "equal in every call"
for cell in QWEN4B12L QWEN3_NEXT NEMOTRON_30B_A3B NEMOTRON_H; do bench "$cell" "$cell" --warmup 2 --steps 5; done
python3 - "$OUT" <<'P'
import json, pathlib, sys
out = pathlib.Path(sys.argv[1])
rows = {path.stem: json.loads(path.read_text()) for path in sorted(out.glob("*.row"))}
(out / "bench_rows.json").write_text(json.dumps(rows, indent=1))
for path in out.glob("*.row"):
    path.unlink()
P
say end
