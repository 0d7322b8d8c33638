"""The data file of one rank: written as safetensors, read in blocks."""

import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron.core.dist_checkpointing import data_file
from megatron.core.dist_checkpointing.data_file import (
    BlockReader,
    LazyTensor,
    TensorEntry,
    aligned_order,
    read_header_crc32,
    write_data_file,
)
from megatron.core.dist_checkpointing.disk import Disk


def entries() -> list[TensorEntry]:
    wide = torch.arange(10, dtype=torch.float64)
    return [
        TensorEntry("wide", (2, 5), wide),
        TensorEntry("lazy", (3,), LazyTensor(torch.float32, 3, lambda: torch.ones(3))),
        TensorEntry("empty", (0,), torch.empty(0)),
        TensorEntry("byte", (), torch.tensor([7], dtype=torch.uint8)),
    ]


@pytest.mark.parametrize("block_bytes", [32, 16 << 20])
def test_safetensors_reads_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    monkeypatch.setattr(data_file, "BLOCK_BYTES", block_bytes)
    path = tmp_path / "data"
    written = write_data_file(Disk(), path, entries())
    content, loaded = path.read_bytes(), load_file(path)
    assert written.size == len(content) and written.header_crc32 == read_header_crc32(path)
    for entry, offset, checksums in zip(entries(), written.offsets, written.checksums, strict=True):
        assert torch.equal(loaded[entry.key], entry.elements().view(entry.shape))
        data = content[offset : offset + entry.nbytes]
        blocks = [data[begin : begin + block_bytes] for begin in range(0, len(data), block_bytes)]
        assert checksums == [zlib.crc32(block) for block in blocks or ([b""] if checksums else [])]


def test_wide_types_come_first_in_stable_order() -> None:
    keys = [entry.key for entry in aligned_order(entries()[::-1])]
    assert keys == ["wide", "empty", "lazy", "byte"]


def test_a_lazy_tensor_must_match_its_description(tmp_path: Path) -> None:
    wrong = TensorEntry("x", (2,), LazyTensor(torch.float32, 2, lambda: torch.ones(3)))
    with pytest.raises(AssertionError, match="x"):
        wrong.elements()


def test_blocks_are_read_by_position(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(name.encode() + bytes(range(10)))
    with BlockReader(pinned=False) as reader:
        assert reader.read(tmp_path / "a", 3, 4).tolist() == [2, 3, 4, 5]
        assert reader.read(tmp_path / "b", 0, 2).tolist() == [98, 0]
        assert reader.read(tmp_path / "b", 10, 1).tolist() == [9]
        with pytest.raises(EOFError, match="2 bytes are missing at byte 11"):
            reader.read(tmp_path / "b", 8, 5)
        with pytest.raises(FileNotFoundError):
            reader.read(tmp_path / "c", 0, 1)


def test_an_impossible_header_length_is_no_checksum(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xff" * 16)
    assert read_header_crc32(tmp_path / "x") == -1
