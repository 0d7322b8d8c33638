"""Times cells of the speed table once more, beside their newest recorded rows:

    python benchmarks/recheck.py MOE64 "LLAMA1B --fp8-format hybrid --fp8-recipe tensorwise"

An argument is a cell, and more flags of benchmarks/bench.py. A change that loses speed shows at the end of a line.
Times of different calls differ by 3%, and those of cells that wait for their host by more.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.add_row import row
from benchmarks.page import Row, cell_of, read_rows


def measure(cell: str, steps: int, warmup: int, limit: float) -> Row | None:
    """Returns the row of a cell with flags, measured in a process of its own; None, after the last lines of its output,
    if that fails or runs longer than `limit` seconds."""
    bench = Path(__file__).with_name("bench.py")
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "row.json", Path(folder) / "log"
        words = [*shlex.split(cell), "--warmup", str(warmup), "--steps", str(steps), "--json", str(result)]
        with log.open("w") as output:
            try:
                subprocess.run([sys.executable, str(bench), *words], stdout=output, stderr=output, timeout=limit)
            except subprocess.TimeoutExpired:
                print(f"{cell}: stopped after {limit:.0f} s")
        if not result.exists():
            print(f"{cell}: no result", *log.read_text().splitlines()[-5:], sep="\n  ", flush=True)
            return None
        return row(shlex.split(cell)[0], json.loads(result.read_text()), None)


def compared(found: Row, recorded: Row | None) -> str:
    """Returns a line with the figures of both rows, and how much longer the new step is."""
    name, precision, details = cell_of(found)
    ours = found["ours"]
    line = f"{name}{details}, {precision}: {ours['milliseconds']:.1f} ms, {ours['peak_memory_gb']} GB"
    if recorded is None:
        return f"{line}; no recorded row"
    before = recorded["ours"]
    longer = ours["milliseconds"] / before["milliseconds"] - 1.0
    figures = f"{before['milliseconds']:.1f} ms, {before['peak_memory_gb']} GB"
    return f"{line}; recorded {recorded['date']}: {figures}; {longer:+.1%}"


def main(words: Sequence[str] | None = None) -> None:
    """Measures the cells that the command line names, and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="+", metavar="CELL", help="a cell of bench_cells.py, and more flags")
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    parser.add_argument("--warmup", type=int, default=4, help="steps before them")
    parser.add_argument("--limit", type=float, default=120.0, metavar="SECONDS", help="time of one cell")
    parser.add_argument("--results", type=Path, metavar="FILE", help="write the new rows there, as h200.json has them")
    args = parser.parse_args(words)
    recorded, rows = {cell_of(found): found for found in read_rows()}, []
    for cell in args.cells:
        found = measure(cell, args.steps, args.warmup, args.limit)
        if found is not None:
            rows.append(found)
            print(compared(found, recorded.get(cell_of(found))), flush=True)
            if args.results is not None:
                args.results.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
