"""Documents that are encoded together: written in order, and without those that cannot be encoded."""

from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

from megatron.data.preparation.batches import DocumentBatch
from megatron.data.preparation.messages import Job
from megatron.data.preparation.shards import ShardPaths, StreamCounts, StreamName, StreamWriter
from megatron.data.tokenizer.null import NullTokenizer


class Marked(NullTokenizer):
    """The text "7" is the spelling of a special token."""

    @property
    def special_literals(self) -> tuple[str, ...]:
        return ("7",)


def write(job: Job, *documents: list[list[str]], part: int = 0) -> tuple[dict[int, list[int]], list, list]:
    """Ids of each key, counts of each key, and faults of a batch."""
    with ExitStack() as stack:
        writers = {
            stream: stack.enter_context(StreamWriter(ShardPaths.of(job.folder, 0, stream), job.dtype))
            for stream in job.streams
        }
        batch = DocumentBatch(part, job, writers)
        for line, texts in enumerate(documents):
            batch.add(10 + line, texts, 5)
        assert batch.bytes == 5 * len(documents)
        faults = batch.flush()
        assert batch.bytes == 0 and batch.flush() == []
        streams = [StreamName(key, part) for key in range(len(job.keys))]
        counts = [writers[stream].counts for stream in streams]
    ids = {s.key: np.fromfile(ShardPaths.of(job.folder, 0, s).tokens, job.dtype).tolist() for s in streams}
    return ids, counts, faults


def test_documents_of_each_key_are_written_in_order(make_job: Callable[..., Job]) -> None:
    job = make_job(keys=("a", "b"), eod=50, partitions=2)
    ids, counts, faults = write(job, [["1 2"], ["3"]], [["4", "5"], []], part=1)
    assert ids == {0: [1, 2, 50, 4, 5, 50], 1: [3, 50]} and faults == []
    assert counts == [StreamCounts(2, 3, 6), StreamCounts(2, 1, 2)]


def test_a_document_that_cannot_be_encoded_is_left_out_of_all_keys(make_job: Callable[..., Job]) -> None:
    ids, counts, (fault,) = write(make_job(keys=("a", "b")), [["1"], ["2"]], [["3"], ["x"]], [["5"], ["6"]])
    assert ids == {0: [1, 5], 1: [2, 6]}
    assert [count.documents for count in counts] == [2, 2]
    assert fault.line == 11 and fault.fault == "not encodable" and "x" in fault.message


def test_documents_with_special_spellings_are_counted(make_job: Callable[..., Job]) -> None:
    job = make_job()
    object.__setattr__(job, "tokenizer", Marked(50))
    _, (counts,), _ = write(job, [["1", "2"]], [["7", "7"]], [["3 7"]])
    assert counts.special_documents == 2
