"""Predicts peak memory without a GPU:   python benchmarks/peak_memory.py LLAMA8B/dp4

The prediction is that of `--dry-run` (megatron.diagnosis.memory), for cells of compare.sh. `--record` predicts the
newest row of each cell in results/h200.json and writes the result beside the measured peak.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench import read_options
from benchmarks.bench_cells import COMMON
from benchmarks.layouts import find_cell
from benchmarks.page import read_rows
from megatron.diagnosis.memory.peak import peaks_of_ranks
from megatron.training.arguments import configure
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.settings import LaunchEnvironment

H200 = 139 * 2**30
"""Bytes of an H200 that its driver reports as 139 GiB."""
RECORDED = Path(__file__).parent / "results/h200.json"


def configured(name: str) -> PretrainConfig:
    """Returns the config of our side of a cell, on as many GPUs as it needs. Raises ConfigurationError."""
    cell = find_cell(name)
    _, flags = read_options([cell.model, *cell.ours.split()])
    return configure(flags, launch_environment=LaunchEnvironment(cell.layout.gpus, has_cuda=True))


def config_of_row(row: Mapping[str, Any]) -> PretrainConfig:
    """Returns the config of a recorded row. Some rows have only the flags of their model."""
    flags = row["flags"] if "--lr" in row["flags"] else f"{COMMON} {row['flags']} --bf16 --train-iters 9"
    return configure(flags.split(), launch_environment=LaunchEnvironment(row["gpus"], has_cuda=True))


def peak_memory(config: PretrainConfig) -> int:
    """Returns the bytes that the fullest rank allocates, with what CUDA and NCCL take outside torch's allocator."""
    return max(peak.allocated + peak.context for peak in peaks_of_ranks(config))


def record() -> None:
    """Writes the predicted peak of the newest row of each cell into results/h200.json."""
    rows = json.loads(RECORDED.read_text("utf-8"))
    for newest in read_rows():
        peak = max(peak.allocated for peak in peaks_of_ranks(config_of_row(newest)))
        rows[rows.index(newest)]["ours"]["predicted_peak_memory_gb"] = round(peak / 1e9, 2)
    RECORDED.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")


def main(words: Sequence[str] | None = None) -> int:
    """Prints the prediction of each cell; returns 1 if one does not fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", metavar="CELL")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args(words)
    if options.record:
        record()
    peaks = {name: peak_memory(configured(name)) for name in options.cells}
    for name, peak in peaks.items():
        print(f"{name}: about {peak / 1e9:.1f} GB, {peak / H200:.0%} of an H200")
    return int(max(peaks.values(), default=0) > H200)


if __name__ == "__main__":
    raise SystemExit(main())
