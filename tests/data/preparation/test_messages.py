"""Messages between processes: streams of a job, and the order of blocks."""

import itertools
import pickle
from pathlib import Path

import numpy as np

from megatron.data.preparation.blocks import Plan
from megatron.data.preparation.messages import BlockReport, Job, LineFault, block_number
from megatron.data.preparation.shards import StreamCounts, StreamName
from megatron.data.tokenizer.null import NullTokenizer


def test_a_worker_writes_a_stream_per_key_and_part() -> None:
    plan = Plan((), (), 1)
    job = Job(NullTokenizer(9), ("a", "b"), 3, None, "stop", 100, np.uint16, Path("x"), plan)
    assert job.streams == [StreamName(key, part) for key in (0, 1) for part in (0, 1, 2)]


def test_block_numbers_are_in_the_order_of_the_input() -> None:
    places = [(0, 0), (0, 1), (0, 1 << 39), (1, 0), (2, 5), (1000, 0)]
    assert all(a < b for a, b in itertools.pairwise(block_number(*place) for place in places))


def test_reports_can_be_sent() -> None:
    report = BlockReport(1, 2, 3, lines=4, faults=[LineFault(0, "not JSON", "x")])
    report.dropped["not JSON"] += 1
    report.streams[StreamName(0, 0)] = StreamCounts(1, 2, 3)
    assert pickle.loads(pickle.dumps(report)) == report
    assert BlockReport(0, 0, 0).dropped["not JSON"] == 0  # each report has counts of its own
