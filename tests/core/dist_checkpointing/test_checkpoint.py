"""Opening a checkpoint folder and verifying its files."""

from pathlib import Path

import pytest
import torch
from support.checkpoints import make_chunk, save_as

from megatron.core.dist_checkpointing.checkpoint import broken_tensors, check_files, open_checkpoint, read_block, verify
from megatron.core.dist_checkpointing.data_file import BlockReader
from megatron.core.dist_checkpointing.manifest import BrokenCheckpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of two ranks with two tensors each."""
    ranks = [
        [make_chunk("a", (4,), flat_range=part), make_chunk("b", (6,), flat_range=part)] for part in ((0, 2), (2, 4))
    ]
    ranks[1][1] = make_chunk("b", (6,), flat_range=(2, 6))
    return save_as(tmp_path, ranks, 20)


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_an_opened_checkpoint_lists_all_stored_chunks(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert checkpoint.manifest.iteration == 20
    assert checkpoint.nbytes == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    stored = {name: [located.chunk.range for located in chunks] for name, chunks in checkpoint.catalogue.items()}
    assert stored == {"a": [(0, 2), (2, 4)], "b": [(0, 2), (2, 6)]}


def test_a_whole_checkpoint_passes(folder: Path) -> None:
    checkpoint, findings = verify(folder)
    assert checkpoint is not None and findings == []


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "No such file"),
        (lambda path: path.write_bytes(path.read_bytes() + b" "), "its index says"),
        (lambda path: flip(path, 9), "header does not match"),
    ],
)
def test_a_damaged_file_is_found_without_reading_tensors(folder: Path, damage, message: str) -> None:
    path = folder / "rank_00001.safetensors"
    damage(path)
    with pytest.raises(BrokenCheckpoint, match=message) as error:
        check_files(open_checkpoint(folder))
    assert error.value.path == path
    assert [finding.path for finding in verify(folder, tensors=False)[1]] == [path]


def test_a_folder_that_cannot_be_opened_is_reported(tmp_path: Path) -> None:
    checkpoint, (finding,) = verify(tmp_path)
    assert checkpoint is None and finding.path.parent == tmp_path


def test_all_broken_tensors_are_listed(folder: Path) -> None:
    path = folder / "rank_00000.safetensors"
    checkpoint = open_checkpoint(folder)
    assert list(broken_tensors(checkpoint)) == []
    for chunk in checkpoint.indexes[0].chunks:
        flip(path, chunk.offset)
    check_files(checkpoint)  # does not read tensors
    assert verify(folder, tensors=False)[1] == []
    assert [finding.path for finding in broken_tensors(checkpoint)] == [path] * 2 == [f.path for f in verify(folder)[1]]


def test_a_block_is_read_and_verified(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    path, chunk = folder / "rank_00001.safetensors", checkpoint.indexes[1].chunks[1]
    with BlockReader(pinned=False) as reader:
        expected = make_chunk("b", (6,), flat_range=(2, 6)).tensor
        assert torch.equal(read_block(reader, path, chunk, 0), expected)
        flip(path, chunk.offset)
        with pytest.raises(BrokenCheckpoint, match=r"b from byte .* do not match"):
            read_block(reader, path, chunk, 0)
