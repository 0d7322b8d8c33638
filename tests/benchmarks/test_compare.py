"""benchmarks/compare.sh measures the cells of a number of GPUs over several calls; the runs are stand-ins."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.layouts import cells_of_gpus

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compare.sh"
PYTHON = """#!/bin/bash
case "$*" in
*torch.distributed.run*)
  for word in "$@"; do last=$before before=$word; [ "$last" = --json ] && file=$word; done
  echo "$*" >> "$OUT/ours.txt"
  cp "$OUT/row" "$file"
  echo "LLAMA8B: 100 ms a step" ;;
*bench.py*) shift 2; echo "--model $*" ;;
*) exec {python} -IS "$@" ;;
esac
"""
ANCHOR = """
anchor() {
  name=$1 gpus=$2 log=$OUT/$1.log
  shift 2
  CUDA_DEVICE_MAX_CONNECTIONS=1 timeout 9 bash -c \
    'echo "$0 on $1, $CUDA_DEVICE_MAX_CONNECTIONS: ${*:2}" >> "$OUT/anchor.txt"' "$name" "$gpus" "$@"
  [ "$name" = MOE64-ep4-overlap ] && return 1
  cp "$OUT/log" "$log"
}
"""
LOG = "".join(
    f"iteration {step}/ 8 | elapsed time per iteration (ms): 120.0 | throughput per GPU (TFLOP/s/GPU): 9.0 |\n"
    for step in (2, 4, 6, 8)
)
OURS = dict.fromkeys(("steps", "tokens_per_second", "tflops", "mfu", "peak_memory_gb", "loss", "fastest", "slowest"), 1)
ROW = {
    **OURS,
    "milliseconds": 100.0,
    "timeline": {"step": 100.0},
    "gpus": 4,
    "flags": "",
    "zipf": 1.0,
    "device": "H200",
}
ROW |= dict.fromkeys(("sm_clock_mhz", "torch", "date", "commit"))


def compare(folder: Path, **variables: str) -> str:
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "OUT": str(folder)}
    environment |= {"GPU_KIT": str(folder / "kit"), "RESULTS": str(folder / "rows.json"), "GPUS": "4"} | variables
    done = subprocess.run(["bash", SCRIPT], env=environment, capture_output=True, text=True, timeout=240, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_cells_are_measured_over_several_calls(tmp_path: Path) -> None:
    files = {"bin/python3": PYTHON.replace("{python}", sys.executable), "kit/setup.sh": "", "kit/anchor.sh": ANCHOR}
    for name, text in {**files, "row": json.dumps(ROW), "log": LOG}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "bin/python3").chmod(0o755)
    kept = "dp4", "zero3", "pp4", "pp4-zbv", "ep4-overlap", "ep4-flex-overlap"
    others = [cell for cell in cells_of_gpus(4) if cell.name.partition("/")[2] not in kept]
    done = [{"cell": cell.model, "layout": cell.name.partition("/")[2], "ours": ROW} for cell in others]
    (tmp_path / "rows.json").write_text(json.dumps(done))
    assert "to measure: LLAMA8B/dp4\n" in compare(tmp_path, BUDGET="195")
    printed = compare(tmp_path)
    assert "to measure: LLAMA8B/zero3 LLAMA8B/pp4 LLAMA8B/pp4-zbv MOE64/ep4-overlap MOE64/ep4-flex-overlap\n" in printed
    assert "MOE64/ep4-flex-overlap: ours 1 TFLOP/s (100.0 ms): no ratio: the anchor's log has no line" in printed
    rows: list[dict[str, Any]] = json.loads((tmp_path / "rows.json").read_text())[len(done) :]
    assert [row["ratio"] for row in rows] == [1.2, 1.2, 1.2, 1.2, None, None]
    assert rows[1]["layout"] == "zero3" and rows[1]["anchor"]["reference"] == "LLAMA8B/dp4"
    assert rows[-1]["anchor"] is None and rows[-1]["ours"]["timeline"] == {"step": 100.0}
    ours = (tmp_path / "ours.txt").read_text().splitlines()
    assert "--nproc_per_node 4 " in ours[0] and "--warmup 2 --steps 5 --kernels --use-distributed-optimizer" in ours[0]
    anchor = (tmp_path / "anchor.txt").read_text().splitlines()
    assert anchor[0].startswith("LLAMA8B-dp4 on 4, 1: --model ") and anchor[0].endswith("--log-interval 2")
    # The anchor of dp4 runs again in the second call, for zero3; that of pp4 serves zb-v.
    names = [line.split()[0] for line in anchor]
    assert names == ["LLAMA8B-dp4", "LLAMA8B-dp4", "LLAMA8B-pp4", "MOE64-ep4-overlap"]
    assert anchor[-1].startswith("MOE64-ep4-overlap on 4, 32: ")
    assert compare(tmp_path) == "to measure: nothing\n"
