"""Measures tools/dedup.py and tools/filter_data.py on one core, and datatrove's MinHash on the same file if it is
installed (pip install datatrove spacy orjson).

python benchmarks/bench_cleaning.py --megabytes 30

The text is that of bench_preprocess.py. Prints rows of a table for docs/benchmarks.md.
"""

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":  # before the imports that take seconds
    from megatron.interrupts import exit_quietly, run_main

    exit_quietly()

from benchmarks.bench_preprocess import run_tool, write_corpus


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--megabytes", type=int, default=30, help="largest amount of text, in MB")
    size = parser.parse_args(argv).megabytes * 1_000_000
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "in").mkdir()
        write_corpus(work / "in" / "corpus.jsonl", size)
        ours = ["--input", work / "in", "--workers", 1, "--output"]
        measure(work, "`tools/dedup.py --method minhash`", lambda: run_tool("dedup.py", *ours, work / "kept"))
        rules = ["--quality-rules", "gopher", "gopher-repetition"]
        measure(
            work,
            "`tools/filter_data.py --quality-rules gopher gopher-repetition`",
            lambda: run_tool("filter_data.py", *ours, work / "good", *rules),
        )
        if importlib.util.find_spec("datatrove") is not None:
            measure(work, "datatrove's MinHash, its four stages", lambda: run_datatrove(work))
        report = json.loads((work / "kept" / "report.json").read_text())
        print(f"tools/dedup.py keeps {report['kept_rows']} of {report['rows']} rows")
        if (work / "theirs").exists():
            kept = sum(len(path.read_bytes().splitlines()) for path in (work / "theirs").rglob("*.jsonl"))
            print(f"datatrove keeps {kept} rows")
    return 0


def measure(work: Path, what: str, action: Callable[[], object]) -> None:
    """Prints the row of one way to clean the text; its start and the compilation of kernels count."""
    megabytes = (work / "in" / "corpus.jsonl").stat().st_size / 1e6
    began = time.perf_counter()
    action()
    seconds = time.perf_counter() - began
    print(f"| {what} | {megabytes:.0f} MB in {seconds:.1f} s | {megabytes / seconds:.1f} MB/s |", flush=True)


def run_datatrove(work: Path) -> None:
    """Runs the stages one after the other in this process: signatures, buckets, clusters, and the kept rows."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline import dedup
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers.jsonl import JsonlWriter

    config = dedup.minhash.MinhashConfig(n_grams=5, num_buckets=14, hashes_per_bucket=8)
    signatures, buckets, removed = (str(work / name) for name in ("signatures", "buckets", "removed"))
    read = JsonlReader(str(work / "in"))
    write = JsonlWriter(str(work / "theirs"), output_filename="${rank}.jsonl", compression=None)
    stages: list[tuple[list[Any], int]] = [
        ([read, dedup.MinhashDedupSignature(signatures, config=config)], 1),
        ([dedup.MinhashDedupBuckets(signatures, buckets, config=config)], config.num_buckets),
        ([dedup.MinhashDedupCluster(buckets, removed, config=config)], 1),
        ([read, dedup.MinhashDedupFilter(removed), write], 1),
    ]
    for number, (pipeline, tasks) in enumerate(stages):
        LocalPipelineExecutor(pipeline, tasks=tasks, workers=1, logging_dir=str(work / f"logs-{number}")).run()


if __name__ == "__main__":
    run_main(main)
