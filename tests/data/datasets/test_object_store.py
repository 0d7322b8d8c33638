"""Data sets in object stores, with fsspec's file system in memory."""

import pickle
from pathlib import Path
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest

from megatron.core.exceptions import UserError
from megatron.data.datasets import object_store
from megatron.data.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

URL = "memory://bucket/corpus"


@pytest.fixture
def local(tmp_path: Path) -> str:
    with IndexedDatasetBuilder(f"{tmp_path}/corpus.bin", dtype=np.uint16) as builder:
        for length in (3, 0, 5, 4000):
            builder.add_document(np.arange(length), [length])
        builder.finalize(f"{tmp_path}/corpus.idx")
    store = fsspec.filesystem("memory")
    for suffix in ("bin", "idx"):
        store.pipe_file(f"/bucket/corpus.{suffix}", (tmp_path / f"corpus.{suffix}").read_bytes())
    return f"{tmp_path}/corpus"


@pytest.mark.parametrize("copies", [False, True])
def test_items_and_digests_are_those_of_files(local: str, tmp_path: Path, copies: bool) -> None:
    folder = str(tmp_path / "copies") if copies else None
    ours, remote = IndexedDataset(local), IndexedDataset(URL, object_storage_config=folder)
    remote = pickle.loads(pickle.dumps(remote))  # as data workers get it
    assert len(remote) == 4 and [remote[i].tolist() for i in range(4)] == [ours[i].tolist() for i in range(4)]
    assert remote.get(3, 10, 4).tolist() == [10, 11, 12, 13]
    assert remote.content_digest(True) == ours.content_digest(True)
    assert np.array_equal(remote.document_indices, ours.document_indices)
    assert [path.name.endswith("-corpus.idx") for path in (tmp_path / "copies").glob("*")] == [True] * copies
    assert IndexedDataset.exists(URL) and not IndexedDataset.exists("memory://bucket/other")
    assert len(IndexedDataset(URL, object_storage_config=SimpleNamespace(path_to_idx_cache=tmp_path / "more"))) == 4


def test_a_changed_index_is_copied_again(local: str, tmp_path: Path) -> None:
    first = object_store.local_copy(f"{URL}.idx", tmp_path / "copies")
    assert object_store.local_copy(f"{URL}.idx", tmp_path / "copies") == first
    fsspec.filesystem("memory").pipe_file("/bucket/corpus.idx", b"another")
    second = object_store.local_copy(f"{URL}.idx", tmp_path / "copies")
    assert second != first and Path(second).read_bytes() == b"another"


@pytest.mark.parametrize("key", ["ETag", "mtime", "LastModified", "md5Hash", "content-md5"])
def test_a_changed_index_of_the_same_size_is_copied_again(
    local: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    store, facts = object_store.file_system(URL), {"size": 7, key: "1"}
    monkeypatch.setattr(store, "info", lambda url: facts)
    store.pipe_file("/bucket/corpus.idx", b"content")
    first = object_store.local_copy(f"{URL}.idx", tmp_path)
    assert object_store.local_copy(f"{URL}.idx", tmp_path) == first
    store.pipe_file("/bucket/corpus.idx", b"another")
    facts[key] = "2"
    assert Path(object_store.local_copy(f"{URL}.idx", tmp_path)).read_bytes() == b"another"


def test_a_store_that_tells_no_version_is_told(
    local: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(object_store.file_system(URL), "info", lambda url: {"size": 7, "ETag": None})
    object_store.local_copy(f"{URL}.idx", tmp_path)
    assert not caplog.text
    object_store.local_copy(f"{URL}.idx", tmp_path)
    assert "corpus.idx: the store tells neither checksum nor time, so" in caplog.text


def test_what_is_missing_or_broken_is_named(local: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"memory://bucket/none.idx: no such object"):
        IndexedDataset("memory://bucket/none")
    store = fsspec.filesystem("memory")
    store.pipe_file("/bucket/corpus.bin", b"12")
    with pytest.raises(UserError, match=r"memory://bucket/corpus.bin: 2 bytes, .* says 8016"):
        IndexedDataset(URL)
    store.pipe_file("/bucket/corpus.idx", b"no index")
    with pytest.raises(UserError, match="not an index of tokens"):
        IndexedDataset(URL)
    with pytest.raises(UserError, match="nostore:// is no kind of store that fsspec knows"):
        IndexedDataset("nostore://bucket/x")

    def fails(*args: object, **options: object) -> None:
        raise ConnectionResetError("the network")

    monkeypatch.setattr(object_store.file_system(URL), "size", fails)
    with pytest.raises(object_store.StoreError, match="cannot be read: ConnectionResetError: the network"):
        IndexedDataset(URL)


def test_tokens_that_a_store_lost_while_they_were_read(local: str) -> None:
    dataset, store = IndexedDataset(URL), fsspec.filesystem("memory")
    store.pipe_file("/bucket/corpus.bin", store.cat_file("/bucket/corpus.bin")[:-2])
    with pytest.raises(UserError, match=r"corpus.bin: was shortened while it was read"):
        dataset[3]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def needs(scheme: str, **options: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.filesystem", needs)
    with pytest.raises(UserError, match=r"reading s3:// needs a package that is not installed \(Install s3fs"):
        object_store.exists("s3://bucket/corpus.idx")


def test_what_is_a_url() -> None:
    assert all(map(object_store.is_url, ("s3://b/k", "GS://b", "file:///x", "memory://a")))
    assert not any(map(object_store.is_url, ("/data/s3", "data", "./a://b", "C:/x")))
