#!/usr/bin/env bash
# First call: regression rows, deterministic mode, transformers as an anchor.
cd "$(dirname "$0")"; export PYTHONPATH=$PWD OMP_NUM_THREADS=4 COMMIT=k2
OUT=${OUT:-/tmp/out}; mkdir -p "$OUT"; root=$PWD
say() { echo "== ${SECONDS}s $*"; }
say begin
timeout 50 python3 -m pytest -n 0 -q -p no:cacheprovider tests/gpu/test_attention_on_gpu.py -m gpu \
  -k "equal_in_every_call or other_sums or (in_order and (causal or documents or window))" > "$OUT/attention_tests.txt" 2>&1; say "tests of ordered attention: exit $?"
tail -n 6 "$OUT/attention_tests.txt" | cut -c1-300
cat > /tmp/k2_attention.py <<'P'
import torch
from megatron.core.ops.attention.flash_triton import flash_attention_triton
from megatron.core.ops.attention.sdpa import sdpa_attention_cuda
from megatron.core.ops.attention.unfused import AttentionCall, AttentionVariant
def time(compute, shape, packed=False):
    s, b, a, g, d = shape
    q, k, v = (torch.randn(s, b, h, d, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (a, g, g))
    call = AttentionCall(cu_seqlens=torch.arange(0, s + 1, s // 8, dtype=torch.int32, device="cuda"), max_seqlen=s) if packed else AttentionCall()
    y = compute(q, k, v, AttentionVariant(d**-0.5, True), call)
    dy = torch.randn_like(y)
    for n in (10, 50):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(n):
            torch.autograd.grad(y, (q, k, v), dy, retain_graph=True)
        end.record(); torch.cuda.synchronize()
    return begin.elapsed_time(end) / n
for shape in ((4096, 2, 16, 8, 128), (8192, 1, 32, 8, 128), (4096, 4, 32, 8, 64), (1024, 16, 12, 12, 64)):
    found = []
    for strict in (False, True):
        torch.use_deterministic_algorithms(strict)
        torch.utils.deterministic.fill_uninitialized_memory = False
        found += [time(flash_attention_triton, shape), time(sdpa_attention_cuda, shape)]
    print("backward ms", shape, "ours %.3f torch %.3f; in order: ours %.3f torch %.3f" % tuple(found), flush=True)
for strict in (False, True):
    torch.use_deterministic_algorithms(strict)
    print("packed (8192, 1, 32, 8, 128)", strict, "%.3f" % time(flash_attention_triton, (8192, 1, 32, 8, 128), True), flush=True)
P
timeout 30 python3 /tmp/k2_attention.py 2>&1 | tail -n 12 | tee "$OUT/attention_times.txt"; say "attention times"
for mode in "" "--deterministic-mode"; do
  timeout 40 python3 benchmarks/bench.py ATTENTION1B --warmup 3 --steps 8 --kernels $mode > "$OUT/mode$mode.txt" 2>&1
  say "ATTENTION1B $mode: exit $?"; grep -A26 "^ATTENTION1B" "$OUT/mode$mode.txt" | cut -c1-150 || tail -n 5 "$OUT/mode$mode.txt"
done
python3 benchmarks/recheck.py --warmup 3 --steps 9 --limit 60 --results "$OUT/rows.json" MOE64 \
  "MOE64 --fp8-format hybrid --fp8-recipe tensorwise" LLAMA1B "LLAMA1B --fp8-format hybrid --fp8-recipe tensorwise" \
  LLAMA8B_12L 2>&1; say "regression rows"
(. benchmarks/transformers_kit/anchor.sh; root=$PWD ITERS=10 LIMIT=$((268 - SECONDS)) anchor transformers-LLAMA1B 1 \
  $(python3 benchmarks/bench.py LLAMA1B --flags)); tail -n 4 "$OUT/transformers-LLAMA1B.log"; say "transformers"
