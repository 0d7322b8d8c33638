"""megatron/data/preparation/shards.py: framing against a plain loop."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.preparation.shards import ShardPaths, StreamCounts, StreamName, StreamWriter, frame_documents
from megatron.data.tokenizer.base import pack_ids

documents = st.lists(st.lists(st.lists(st.integers(1, 99), max_size=4), max_size=4), max_size=8)


def frame_one_by_one(documents, eod):
    sequences, counts = [], []
    for document in documents:
        kept = [list(ids) for ids in document if ids]
        if kept and eod is not None:
            kept[-1].append(eod)
        sequences += kept
        counts.append(len(kept))
    return sequences, counts


@settings(max_examples=200, deadline=None, database=None)
@given(documents, st.sampled_from([None, 7]))
def test_framing(documents, eod):
    texts = [ids for document in documents for ids in document]
    framed = frame_documents(pack_ids(texts), np.array([len(document) for document in documents], np.int64), eod)
    sequences, counts = frame_one_by_one(documents, eod)
    assert framed.ids.tolist() == [i for ids in sequences for i in ids]
    assert framed.sequence_lengths.tolist() == [len(ids) for ids in sequences]
    assert framed.document_lengths.tolist() == counts


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_writer_counts_blocks(tmp_path, dtype):
    paths = ShardPaths.of(tmp_path, 3, StreamName(0, 1))
    framed = frame_documents(pack_ids([[1, 2], [3]]), np.array([1, 0, 1]), eod=9)
    with StreamWriter(paths, dtype) as writer:
        writer.append(framed, special_documents=1)
        assert writer.end_block()[0] == StreamCounts(3, 2, 5, 1)
        assert writer.end_block()[0] == StreamCounts()
        writer.append(framed, special_documents=0)
        assert writer.end_block()[0] == StreamCounts(3, 2, 5, 0)
        assert writer.counts == StreamCounts(6, 4, 10, 1)
    assert np.fromfile(paths.tokens, dtype).tolist() == [1, 2, 9, 3, 9] * 2
    assert np.fromfile(paths.sequence_lengths, np.int32).tolist() == [3, 2] * 2
    assert np.fromfile(paths.document_lengths, np.int32).tolist() == [1, 0, 1] * 2
