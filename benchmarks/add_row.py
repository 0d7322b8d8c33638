"""Compares a run of bench.py with an anchor's log and appends the pair to a list of rows (see compare.sh)."""

import argparse
import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SPEED = re.compile(r"elapsed time per iteration \(ms\): ([0-9.]+) \| throughput per GPU \(TFLOP/s/GPU\): ([0-9.]+)")
_ITERATION = re.compile(r"iteration +([0-9]+)/ *([0-9]+)")
_LOSS = re.compile(r"lm loss: ([0-9.E+-]+)")
_OURS = ("milliseconds", "fastest", "slowest", "steps", "tokens_per_second", "tflops", "mfu", "peak_memory_gb", "loss")
_FURTHER = ("floor_milliseconds", "floor_parts", "floor_communication", "timeline")
"""Entries of this project's figures that only `benchmarks/bench.py --floor` or `--kernels` writes."""
_MEMORY = re.compile(r"max allocated: ([0-9.]+)")


def read_anchor(log: str) -> dict[str, Any]:
    """Returns the median of an anchor's iterations or intervals, its memory and its last loss. The first one does not
    count, and of the others only the later half: an anchor that compiles needs several to become fast. Raises
    SystemExit if the log's run did not end: its few slow first intervals would flatter the ratio.
    """
    done = _ITERATION.findall(log)
    last, whole = done[-1] if done else ("", "")
    if last != whole:
        raise SystemExit(f"the anchor stopped after iteration {last} of {whole}: give it more time by LIMIT")
    speeds = [(float(ms), float(tflops)) for ms, tflops in _SPEED.findall(log)][1:]
    if not speeds:
        raise SystemExit("the anchor's log has no line of speed after its first")
    speeds = speeds[len(speeds) // 2 :]
    losses, memory = _LOSS.findall(log), _MEMORY.findall(log)
    return {
        "milliseconds": statistics.median(ms for ms, _ in speeds),
        "tflops": statistics.median(tflops for _, tflops in speeds),
        "peak_memory_gb": round(float(memory[-1]) * 2**20 / 1e9, 2) if memory else None,
        "loss": float(losses[-1]) if losses else None,
    }


def row(
    name: str, ours: dict[str, Any], anchor: dict[str, Any] | None, anchor_flags: str = "", reference: str = ""
) -> dict[str, Any]:
    """Returns one row of the results: `ratio` is the anchor's time over ours for the same batch. Without an anchor it
    is None. `reference` is the cell that the anchor ran, if it is another one."""
    cell, _, layout = name.partition("/")
    tokens = ours["tokens_per_second"] * ours["milliseconds"] / 1000
    ratio = None
    if anchor is not None:
        ratio = round(anchor["milliseconds"] / ours["milliseconds"], 3)
        anchor = anchor | {"tokens_per_second": round(tokens / anchor["milliseconds"] * 1000, 1), "flags": anchor_flags}
        anchor |= {"reference": reference} if reference not in ("", name) else {}
    return {
        "cell": cell,
        "gpus": ours["gpus"],
        "layout": layout or "1",
        "precision": "fp8" if "--fp8-format" in ours["flags"] else "bf16",
        "ratio": ratio,
        "ours": {name: ours[name] for name in _OURS} | {name: ours[name] for name in _FURTHER if name in ours},
        "anchor": anchor,
        "zipf": ours["zipf"],
        "documents": ours.get("documents"),
        "flags": ours["flags"],
        "device": ours["device"],
        "sm_clock_mhz": ours["sm_clock_mhz"],
        "torch": ours["torch"],
        "date": ours["date"],
        "commit": ours["commit"],
    }


def main(words: Sequence[str] | None = None) -> None:
    """Adds a row to a list of results and prints it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="cell, or cell/layout")
    parser.add_argument("ours", type=Path, help="what benchmarks/bench.py --json wrote")
    parser.add_argument("anchor", type=Path, help="the anchor's log")
    parser.add_argument("results", type=Path, help="a JSON list, made if it is not there")
    parser.add_argument("--anchor-flags", default="", help="more flags of the anchor, to be recorded")
    parser.add_argument("--reference", default="", help="the cell that the anchor ran, if it is another one")
    parser.add_argument("--keep-ours", action="store_true", help="add our figures alone if the anchor has none")
    args = parser.parse_args(words)
    ours = json.loads(args.ours.read_text())
    anchor, reason = None, ""
    try:
        anchor = read_anchor(args.anchor.read_text() if args.anchor.exists() else "")
    except SystemExit as error:
        if not args.keep_ours:
            raise
        reason = f": {error}"
    found = row(args.name, ours, anchor, args.anchor_flags, args.reference)
    rows = json.loads(args.results.read_text()) if args.results.exists() else []
    args.results.write_text(json.dumps([*rows, found], indent=1) + "\n")
    sides = [(side, found[side]) for side in ("ours", "anchor") if found[side] is not None]
    pair = ", ".join(f"{side} {entry['tflops']} TFLOP/s ({entry['milliseconds']} ms)" for side, entry in sides)
    print(f"{args.name}: {pair}: " + (f"no ratio{reason}" if found["ratio"] is None else f"ratio {found['ratio']}"))


if __name__ == "__main__":
    main()
