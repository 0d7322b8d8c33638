"""megatron/data/datasets/indexed_dataset.py: what is written is read, golden bytes, damaged files are refused."""

import itertools
import multiprocessing
import pickle
import struct

import numpy as np
import pytest
import torch

from megatron.core.exceptions import UserError
from megatron.data.datasets import indexed_dataset
from megatron.data.datasets.indexed_dataset import (
    DType,
    IndexedDataset,
    IndexedDatasetBuilder,
    get_bin_path,
    get_idx_path,
)

DOCUMENTS = [[[1, 2, 3], [4]], [], [[5, 6, 7, 8, 9]], [[10], [11, 12]]]


@pytest.fixture
def prefix(tmp_path, write_documents):
    return write_documents(tmp_path / "data", DOCUMENTS)


@pytest.fixture(params=[True, False], ids=["mmap", "read"])
def dataset(prefix, request):
    return IndexedDataset(prefix, mmap=request.param)


def test_sequences_and_documents(dataset):
    assert len(dataset) == 5
    assert dataset.dtype == np.uint16
    assert dataset.sequence_lengths.tolist() == [3, 1, 5, 1, 2]
    assert dataset.document_indices.tolist() == [0, 2, 2, 3, 5]
    assert [dataset[i].tolist() for i in range(5)] == [[1, 2, 3], [4], [5, 6, 7, 8, 9], [10], [11, 12]]
    assert [part.tolist() for part in dataset[1:4]] == [[4], [5, 6, 7, 8, 9], [10]]
    assert dataset[-1].tolist() == [11, 12]


def test_parts_of_a_sequence(dataset):
    assert dataset.get(2).tolist() == [5, 6, 7, 8, 9]
    assert dataset.get(2, offset=3).tolist() == [8, 9]
    assert dataset.get(2, 1, 2).tolist() == [6, 7]
    assert dataset.get(2, 5, 0).tolist() == []


@pytest.mark.parametrize("arguments", [(5,), (-6,), (2, 6), (2, -1), (2, 3, 3), (1, 0, 2)])
def test_reads_beyond_a_sequence_are_refused(dataset, arguments):
    with pytest.raises(IndexError, match="requested"):
        dataset.get(*arguments)


@pytest.mark.parametrize(("wrong", "dtype"), [(12, np.uint16), (-1, np.int32), (2**31 - 1, np.int32)])
def test_ids_beyond_the_vocabulary_are_refused(tmp_path, wrong, dtype):
    with IndexedDatasetBuilder(str(tmp_path / "x.bin"), dtype=dtype) as builder:
        builder.add_document([0, 11, 5], [3])
        builder.add_document([1, 2, wrong, 3], [4])
        builder.finalize(str(tmp_path / "x.idx"))
    dataset = pickle.loads(pickle.dumps(IndexedDataset(str(tmp_path / "x"), num_ids=12)))
    assert dataset[0].tolist() == [0, 11, 5] and dataset.get(1, 3).tolist() == [3] and dataset.get(1, 4).tolist() == []
    with pytest.raises(UserError, match=rf"x.bin: id {wrong} at sequence 1, offset 2, but the model has ids 0 to 11"):
        dataset.get(1, 1)
    assert wrong in IndexedDataset(str(tmp_path / "x"))[1]


def test_exists(prefix, tmp_path):
    assert IndexedDataset.exists(prefix)
    assert not IndexedDataset.exists(str(tmp_path / "other"))


def test_documents_can_be_regrouped_and_pickled(dataset):
    dataset.set_document_indices(np.array([0, 5]))
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.get_document_indices().tolist() == [0, 5]
    assert copy[2].tolist() == dataset[2].tolist()
    assert len(pickle.dumps(dataset)) < 2000, "the data itself does not travel"


@pytest.mark.fast("mmap-fork", "read-fork")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes_open_the_files_themselves(dataset, method):
    assert dataset[0].tolist() == [1, 2, 3]
    with multiprocessing.get_context(method).Pool(1 if method == "spawn" else 2) as pool:  # a spawned one takes seconds
        found = pool.map(dataset.get, [0, 1, 2, 3, 4] * 20)
    assert [part.tolist() for part in found] == [dataset[i].tolist() for i in range(5)] * 20


def test_golden_files_are_read_and_rewritten_to_the_byte(golden, tmp_path):
    for name in ("gpt2_eod_text_document", "bert_body_document"):
        source = str(golden / "corpus" / "pp" / name)
        dataset = IndexedDataset(source)
        ends = dataset.document_indices
        with IndexedDatasetBuilder(f"{tmp_path}/{name}.bin", dataset.dtype.type) as builder:
            for begin, end in itertools.pairwise(ends):
                for i in range(begin, end):
                    builder.add_item(torch.from_numpy(dataset[int(i)].astype(np.int64)))
                builder.end_document()
            builder.finalize(f"{tmp_path}/{name}.idx")
        for suffix in (".bin", ".idx"):
            assert (tmp_path / (name + suffix)).read_bytes() == (
                golden / "corpus" / "pp" / (name + suffix)
            ).read_bytes()


def test_encoding_with_the_tokenizers_library_gives_the_golden_bytes(golden, blend_prefixes):
    for suffix in (".bin", ".idx"):
        name = "gpt2_eod_text_document" + suffix
        assert (blend_prefixes / name).read_bytes() == (golden / "corpus" / "pp" / name).read_bytes()


def test_add_index_appends_documents(prefix, tmp_path, write_documents):
    other = write_documents(tmp_path / "other", [[100, 101], []])
    with IndexedDatasetBuilder(f"{tmp_path}/both.bin", np.uint16) as builder:
        builder.add_index(prefix)
        builder.add_index(other)
        builder.finalize(f"{tmp_path}/both.idx")
    both = IndexedDataset(f"{tmp_path}/both")
    assert both.document_indices.tolist() == [0, 2, 2, 3, 5, 6, 6]
    assert [part.tolist() for part in both[4:]] == [[11, 12], [100, 101]]
    with IndexedDatasetBuilder(f"{tmp_path}/wide.bin", np.int32) as wide, pytest.raises(UserError, match="uint16"):
        wide.add_index(prefix)


def test_multimodal_items_have_modes(tmp_path):
    prefix = f"{tmp_path}/modes"
    with IndexedDatasetBuilder(get_bin_path(prefix), np.int32, multimodal=True) as builder:
        builder.add_document(torch.tensor([1, 2, 3]), [2, 1], modes=[0, 1])
        builder.add_item(torch.tensor([4]), mode=2)
        builder.end_document()
        builder.finalize(get_idx_path(prefix))
    dataset = IndexedDataset(prefix, multimodal=True)
    assert dataset.sequence_modes.tolist() == [0, 1, 2]
    tokens, mode = dataset.get(1)
    assert (tokens.tolist(), mode) == ([3], 1)
    parts, modes = dataset[0:2]
    assert ([part.tolist() for part in parts], modes.tolist()) == ([[1, 2], [3]], [0, 1])
    with IndexedDatasetBuilder(f"{tmp_path}/more.bin", np.int32, multimodal=True) as more:
        more.add_index(prefix)
        more.finalize(f"{tmp_path}/more.idx")
    assert (tmp_path / "more.idx").read_bytes() == (tmp_path / "modes.idx").read_bytes()


def test_multimodal_is_refused_where_no_modes_are(prefix):
    with pytest.raises(UserError, match="contains no modes"):
        IndexedDataset(prefix, multimodal=True)


def test_tokens_that_do_not_fit_are_refused(tmp_path):
    with IndexedDatasetBuilder(f"{tmp_path}/x.bin", np.uint16) as builder:
        with pytest.raises(ValueError, match="70000 does not fit uint16"):
            builder.add_item(np.array([1, 70000]))
        with pytest.raises(ValueError, match="2 tokens for lengths"):
            builder.add_document(np.array([1, 2]), [1])
        builder.abort()
    assert list(tmp_path.iterdir()) == []


def test_a_failed_build_leaves_the_former_files(prefix, tmp_path):
    before = (tmp_path / "data.bin").read_bytes()
    with pytest.raises(RuntimeError), IndexedDatasetBuilder(get_bin_path(prefix), np.uint16) as builder:
        builder.add_item(np.array([9, 9, 9]))
        raise RuntimeError
    assert (tmp_path / "data.bin").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.bin", "data.idx"]


def _overwrite(path, offset, content):
    data = bytearray(path.read_bytes())
    data[offset : offset + len(content)] = content
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda p: (p / "data.bin").write_bytes((p / "data.bin").read_bytes()[:-2]),
            r"data\.bin: 22 bytes, .* says 24",
        ),
        (lambda p: (p / "data.bin").write_bytes((p / "data.bin").read_bytes() + b"\0\0"), r"data\.bin: 26 bytes"),
        (lambda p: (p / "data.bin").write_bytes((p / "data.bin").read_bytes() + b"\0"), r"data\.bin: 25 bytes"),
        (lambda p: (p / "data.bin").unlink(), r"data\.bin"),
        (lambda p: (p / "data.idx").unlink(), r"data\.idx"),
        (lambda p: (p / "data.idx").write_bytes((p / "data.idx").read_bytes()[:-9]), r"data\.idx: too short"),
        (lambda p: (p / "data.idx").write_bytes(b""), r"data\.idx"),
        (lambda p: _overwrite(p / "data.idx", 0, b"X"), r"data\.idx"),
        (lambda p: _overwrite(p / "data.idx", 9, struct.pack("<Q", 2)), r"data\.idx: index version 2"),
        (lambda p: _overwrite(p / "data.idx", 17, b"\x63"), r"data\.idx: unknown token type code 99"),
        (lambda p: _overwrite(p / "data.idx", 34, struct.pack("<i", 4)), r"data\.bin: 24 bytes, .* says 26"),
        (lambda p: _overwrite(p / "data.idx", 34, struct.pack("<i", -3)), r"data\.idx: corrupt: sequence 0"),
        (lambda p: _overwrite(p / "data.idx", 34 + 12 * 5 + 8 * 4, struct.pack("<q", 4)), "do not cover"),
    ],
)
def test_damaged_files_are_named(prefix, tmp_path, damage, message):
    damage(tmp_path)
    with pytest.raises(UserError, match=message):
        IndexedDataset(prefix)


@pytest.mark.parametrize("position", [1 << 40, -2, 1, 2])
@pytest.mark.parametrize("sequence", range(5))
@pytest.mark.parametrize("checked_at_once", [1, 2, 100])
def test_a_sequence_at_another_place_is_named(monkeypatch, prefix, tmp_path, sequence, position, checked_at_once):
    """Its tokens would be those of other documents."""
    monkeypatch.setattr(indexed_dataset, "_CHECKED_AT_ONCE", checked_at_once)
    IndexedDataset(prefix)
    _overwrite(tmp_path / "data.idx", 34 + 4 * 5 + 8 * sequence, struct.pack("<q", position))
    with pytest.raises(UserError, match=rf"data\.idx: corrupt: sequence {sequence} does not begin where"):
        IndexedDataset(prefix)


def test_documents_that_go_back_are_named(prefix, tmp_path):
    _overwrite(tmp_path / "data.idx", 34 + 12 * 5 + 8, struct.pack("<q", 4))
    with pytest.raises(UserError, match="do not cover"):
        IndexedDataset(prefix)


def test_beliefs_are_checked(prefix):
    IndexedDataset(prefix, fast_cache_load=True, sequences_per_dataset=(5, 5), dtype_code=DType.uint16.value)
    with pytest.raises(UserError, match=r"has \(5, 5\)"):
        IndexedDataset(prefix, sequences_per_dataset=(4, 5))
    with pytest.raises(UserError, match="contains uint16"):
        IndexedDataset(prefix, dtype_code=DType.int32.value)


def test_the_digest_tells_contents_apart(prefix, tmp_path, write_documents):
    digest = IndexedDataset(prefix).content_digest()
    assert IndexedDataset(prefix, mmap=False).content_digest() == digest
    # The same tokens under other boundaries, and another token under the same boundaries: sizes do not change.
    write_documents(tmp_path / "data", [[[1, 2], [3, 4]], [], [[5, 6, 7, 8, 9]], [[10], [11, 12]]])
    other_lengths = IndexedDataset(prefix).content_digest()
    write_documents(tmp_path / "data", [*DOCUMENTS[:-1], [[10], [11, 13]]])
    other_token = IndexedDataset(prefix).content_digest()
    assert len({digest, other_lengths, other_token}) == 3
    write_documents(tmp_path / "data", DOCUMENTS)
    assert IndexedDataset(prefix).content_digest() == digest


def test_documents_in_the_digest(prefix):
    dataset = IndexedDataset(prefix)
    plain, grouped = dataset.content_digest(), dataset.content_digest(with_documents=True)
    dataset.set_document_indices(np.array([0, 5]))
    assert dataset.content_digest() == plain
    assert dataset.content_digest(with_documents=True) != grouped


def test_an_empty_dataset(tmp_path, write_documents):
    dataset = IndexedDataset(write_documents(tmp_path / "none", [[], []]))
    assert len(dataset) == 0
    assert dataset.document_indices.tolist() == [0, 0, 0]
    dataset.content_digest()
