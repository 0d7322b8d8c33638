"""All layouts, numbers of workers and micro-batch sizes train on the same stream of samples."""

from pathlib import Path

import pytest
from support.runs import TINY, stream, train_all_on_ranks, write_documents

BASE = TINY.replace("--num-layers 2", "--num-layers 4").replace("--global-batch-size 4", "--global-batch-size 8")
TP2, PP2, CP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--context-parallel-size 2"

RUNS = {
    1: ["", "--num-workers 2", "--micro-batch-size 4", "--micro-batch-size 8 --num-workers 1"],
    4: [
        "--micro-batch-size 2 --num-workers 1",
        f"{TP2} {CP2} --micro-batch-size 2",
        f"{PP2} --num-layers-per-virtual-pipeline-stage 1 --num-workers 1",
        f"{CP2} --use-distributed-optimizer --micro-batch-size 4 --num-workers 1",
        f"{PP2} --use-tp-pp-dp-mapping --micro-batch-size 2",
    ],
}
"""Flags of the runs, by number of ranks. All have the same global batch size. Schedules and shards that no sampler
reads are in tests/training/test_layouts.py, which compares the samples too."""


@pytest.mark.slow
def test_all_runs_read_the_same_samples(tmp_path: Path) -> None:
    corpus = write_documents(tmp_path / "text")
    seen = {}
    for world_size, flags in RUNS.items():
        runs = [f"--data-path {corpus} --train-iters 2 --eval-iters 0 {each}" for each in flags]
        for each, ranks in zip(flags, zip(*train_all_on_ranks(runs, world_size, base=BASE), strict=True), strict=True):
            seen[world_size, each] = stream(ranks)
    straight = seen[1, ""]
    assert len(straight) == 2 * 8 and len(set(straight)) > 12
    assert {run: ids for run, ids in seen.items() if ids != straight} == {}
