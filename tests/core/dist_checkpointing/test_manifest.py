"""Indexes and manifests: written, read, and refused if a byte differs."""

from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing import data_file
from megatron.core.dist_checkpointing.manifest import (
    BrokenCheckpoint,
    FileDigest,
    Manifest,
    RankIndex,
    StoredChunk,
    read_index,
    read_manifest,
)
from megatron.core.parameters import Box

CHUNK = StoredChunk("w", (4, 6), Box((2, 0), (2, 6)), (3, 9), torch.bfloat16, "w[x]", 128, (1,))


def test_an_index_comes_back(tmp_path: Path) -> None:
    index = RankIndex("rank_00000.safetensors", 140, 7, (CHUNK,))
    path = tmp_path / "rank_00000.json"
    path.write_bytes(index.to_bytes())
    digest = FileDigest.of(index.to_bytes())
    assert read_index(path, digest) == index
    path.write_bytes(index.to_bytes().replace(b"140", b"141"))
    with pytest.raises(BrokenCheckpoint, match="does not match the sha256"):
        read_index(path, digest)
    path.write_bytes(index.to_bytes() + b" ")
    with pytest.raises(BrokenCheckpoint, match="bytes, the manifest says"):
        read_index(path, digest)


def test_blocks_of_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_file, "BLOCK_BYTES", 8)
    assert CHUNK.nbytes == 12
    assert [CHUNK.block_position(block) for block in (0, 1)] == [(128, 8), (136, 4)]
    assert [(part.begin, part.end) for part in map(CHUNK.block_part, (0, 1))] == [(3, 7), (7, 9)]


def test_a_manifest_comes_back() -> None:
    manifest = Manifest(5, {"rank_00000.json": FileDigest(3, "ab")}, {"a": 1}, {}, {"tp": 2})
    assert Manifest.from_bytes(manifest.to_bytes(), Path("m")) == manifest


def test_a_folder_named_after_another_iteration_is_refused(tmp_path: Path) -> None:
    content = Manifest(4, {}, {}, {}, {}).to_bytes()
    for name, fits in {"iter_0000004": True, "anything": True, "release": True, "iter_0000008": False}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_bytes(content)
        if fits:
            assert read_manifest(tmp_path / name).iteration == 4
        else:
            said = "the checkpoint of iteration 4, but its folder is iter_0000008; rename the folder to iter_0000004"
            with pytest.raises(BrokenCheckpoint, match=said):
                read_manifest(tmp_path / name)


@pytest.mark.parametrize("name", ["../rank_00000.json", "/etc/passwd", "a/b", "..", ""])
def test_names_that_lead_out_of_the_folder(name: str) -> None:
    """Digests do not protect names: a file that was changed on purpose has a new digest too."""
    manifest = Manifest(5, {name: FileDigest(3, "ab")}, {}, {}, {})
    index = RankIndex(name, 140, 7, (CHUNK,))
    for file, content in ((Manifest, manifest.to_bytes()), (RankIndex, index.to_bytes())):
        with pytest.raises(BrokenCheckpoint, match="is not the name of a file in this folder"):
            file.from_bytes(content, Path("m"))
