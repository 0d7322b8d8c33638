"""The files of one rank: a data file that safetensors reads, and its index."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import filled, make_chunk

from megatron.core.dist_checkpointing.disk import Disk
from megatron.core.dist_checkpointing.manifest import RankIndex
from megatron.core.dist_checkpointing.rank_file import write_rank
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box


def test_safetensors_reads_what_is_written(tmp_path: Path) -> None:
    chunks = [
        make_chunk("half", (3,), dtype=torch.bfloat16),
        make_chunk("scalar", ()),
        make_chunk("wide", (5,), dtype=torch.float64),
        make_chunk("grid", (4, 6), Box((0, 3), (4, 3))),
        make_chunk("rest", (4, 6), Box((0, 0), (4, 6)), (1, 24)),
    ]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    write_rank(Disk(), temporary, 0, chunks)
    tensors = load_file(temporary / "rank_00000.safetensors")
    expected = {"half": 0, "scalar": 1, "wide": 2, "grid[0:4,3:6]": 3, "rest[0:4,0:6](1:24)": 4}
    assert set(tensors) == set(expected)
    for key, index in expected.items():
        assert torch.equal(tensors[key].flatten(), filled(chunks[index])), key
    assert tensors["grid[0:4,3:6]"].shape == (4, 3)


def test_the_index_describes_every_chunk(tmp_path: Path) -> None:
    chunks = [make_chunk("half", (3,), dtype=torch.bfloat16), make_chunk("grid", (4, 6), Box((0, 3), (4, 3)))]
    write_rank(Disk(), tmp_path, 2, chunks)
    path = tmp_path / "rank_00002.json"
    index, content = RankIndex.from_bytes(path.read_bytes(), path), (tmp_path / "rank_00002.safetensors").read_bytes()
    assert index.data_file == "rank_00002.safetensors" and index.data_size == len(content)
    assert [stored.name for stored in index.chunks] == ["grid", "half"]  # widest type first
    for stored, chunk in zip(index.chunks, chunks[::-1], strict=True):
        assert (stored.global_shape, stored.box, stored.range) == (chunk.global_shape, chunk.box, chunk.range)
        data = torch.frombuffer(bytearray(content[stored.offset :][: stored.nbytes]), dtype=stored.dtype)
        assert torch.equal(data, filled(chunk))


def test_a_write_that_fails_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rank_00000\.safetensors"):
        write_rank(Disk(), tmp_path / "missing", 0, [make_chunk("a", (4,))])


def test_a_chunk_must_not_be_listed_twice(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="listed twice"):
        write_rank(Disk(), tmp_path, 0, [make_chunk("a", (4,)), make_chunk("a", (4,))])
