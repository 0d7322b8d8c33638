"""Damaged files: every one is detected, named, and the next older whole checkpoint is taken instead."""

import hashlib
import json
import random
import shutil

import pytest
import torch
from support.checkpoints import make_chunk, save_as
from support.special_files import SPECIAL_FILES, special_file

from megatron.core.dist_checkpointing.checkpoint_selection import find_checkpoint
from megatron.core.dist_checkpointing.chunk import Chunk
from megatron.core.dist_checkpointing.folders import TRACKER
from megatron.core.dist_checkpointing.manifest import MANIFEST, BrokenCheckpoint, Manifest
from megatron.core.dist_checkpointing.planning import MismatchPolicy
from megatron.core.dist_checkpointing.reading import load
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box


def save_two_ranks(root, step):
    """A checkpoint of two ranks whose values are the iteration."""
    tensors = {"a": ((6, 5), torch.float32), "b": ((9,), torch.bfloat16), "c": ((), torch.int64)}
    ranks = []
    for rank in range(2):
        chunks = []
        for name, (shape, dtype) in tensors.items():
            numel = torch.Size(shape).numel()
            cut = (numel // 2 * rank, numel if rank else numel // 2)
            chunks.append(Chunk(name, shape, Box.whole(shape), cut, torch.full((cut[1] - cut[0],), step, dtype=dtype)))
        ranks.append(chunks)
    return save_as(root, ranks, step)


def wanted():
    return [
        make_chunk("a", (6, 5), empty=True),
        make_chunk("b", (9,), dtype=torch.bfloat16, empty=True),
        make_chunk("c", (), dtype=torch.int64, empty=True),
    ]


def load_values(root, **options):
    targets, said = wanted(), []
    loaded = load(root, targets, log=said.append, **options)
    assert {float(value) for target in targets for value in target.tensor.flatten()} == {loaded.manifest.iteration}
    return loaded.manifest.iteration, said


@pytest.fixture
def root(tmp_path):
    for step in (10, 20):
        save_two_ranks(tmp_path, step)
    return tmp_path


FILES = ["rank_00000.safetensors", "rank_00001.safetensors", "rank_00000.json", "rank_00001.json", MANIFEST]


@pytest.mark.slow_cases("rank_00001.safetensors", "rank_00001.json")
@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere_is_found(root, name):
    """A bit of every third byte of every file: lengths, headers, padding, data, JSON, digests."""
    path = root / "iter_0000020" / name
    content, generator = path.read_bytes(), random.Random(name)
    for position in range(generator.randrange(3), len(content), 3):
        damaged = bytearray(content)
        damaged[position] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        iteration, said = load_values(root)
        assert iteration == 10, f"byte {position} of {name}"
        assert len(said) == 1 and said[0].startswith(f"WARNING: checkpoint {root / 'iter_0000020'} is broken: {path}:")


@pytest.mark.fast(
    "removed-rank_00001.safetensors",
    "removed-rank_00000.json",
    "removed-manifest.json",
    "emptied-rank_00000.safetensors",
    "cut by a byte-rank_00001.safetensors",
    "a byte longer-rank_00000.json",
    "a directory-manifest.json",
)
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["removed", "emptied", "cut by a byte", "a byte longer", "a directory"])
def test_files_that_are_gone_or_of_another_size(root, name, damage):
    path = root / "iter_0000020" / name
    content = path.read_bytes()
    path.unlink()
    if damage == "a directory":
        path.mkdir()
    elif damage != "removed":
        path.write_bytes({"emptied": b"", "cut by a byte": content[:-1], "a byte longer": content + b" "}[damage])
    iteration, said = load_values(root)
    assert iteration == 10 and len(said) == 1 and str(path) in said[0]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", SPECIAL_FILES)
def test_what_is_no_file_neither_blocks_nor_never_ends(root, name, kind):
    path = root / "iter_0000020" / name
    path.unlink()
    with special_file(path, kind):
        iteration, said = load_values(root)
    assert iteration == 10 and len(said) == 1 and f"{path}: it is a" in said[0]


@pytest.mark.parametrize("kind", SPECIAL_FILES)
def test_a_tracker_that_is_no_file(root, kind):
    (root / TRACKER).unlink()
    with special_file(root / TRACKER, kind):
        iteration, said = load_values(root)
    assert iteration == 20 and len(said) == 1 and f"{root / TRACKER}: it is a" in said[0]


TRACKERS = {
    "a word": b"soon",
    "negative": b"-5",
    "a fraction": b"1.5",
    "huge": b"9" * 5000,
    "binary": bytes(range(256)),
    "other digits": "\u0663\u0664".encode(),
    "empty": b"",
    "a power of ten": b"1e3",
    "two numbers": b"20 30",
}


@pytest.mark.parametrize("kind", TRACKERS)
def test_a_tracker_that_names_no_iteration(root, kind):
    (root / TRACKER).write_bytes(TRACKERS[kind])
    iteration, said = load_values(root)
    assert iteration == 20 and len(said) == 1 and "\n" not in said[0]
    assert (
        said[0].startswith(f"WARNING: {root / TRACKER} contains '")
        and "which is not an iteration: looking for" in said[0]
    )
    assert len(said[0].replace(str(root), "")) < 400


@pytest.mark.parametrize("kind", TRACKERS)
def test_a_tracker_that_names_no_iteration_and_no_checkpoint(tmp_path, kind):
    """There were checkpoints here once, so a new run must not begin."""
    (tmp_path / TRACKER).write_bytes(TRACKERS[kind])
    with pytest.raises(UserError, match=rf"which is not an iteration, and {tmp_path} contains no checkpoint"):
        load(tmp_path, wanted())


@pytest.mark.parametrize("name", ["n" * 256, "n/" * 3000])
def test_a_folder_name_that_is_too_long(tmp_path, name):
    for ask in (load, find_checkpoint):
        with pytest.raises(UserError, match=r"n(/n)*: File name too long"):
            ask(tmp_path / name, *([wanted()] if ask is load else []))


def test_the_oldest_whole_one_is_reached_and_every_broken_one_named(root):
    for step in (30, 40):
        save_two_ranks(root, step)
    for step in (20, 30, 40):
        (root / f"iter_{step:07d}" / "rank_00001.safetensors").unlink()
    iteration, said = load_values(root)
    assert iteration == 10 and [f"iter_{step:07d}" in note for step, note in zip((40, 30, 20), said, strict=True)]


def test_a_tensor_that_a_broken_checkpoint_spoilt_is_not_called_untouched(root):
    """The newer one holds a key that the older lacks; its own data is bad. The key may not keep what was half read."""
    save_as(root, [[make_chunk("new", (4,)), *wanted()]], 30)
    path = root / "iter_0000030" / "rank_00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="already overwritten new"):
        load(root, [make_chunk("new", (4,), empty=True), *wanted()], policy=MismatchPolicy(missing=True))


def test_a_hole_between_files_that_are_each_whole_is_found(root):
    """The manifest forgets a rank: all digests agree, but elements are missing."""
    path = root / "iter_0000020" / MANIFEST
    manifest = Manifest.from_bytes(path.read_bytes(), path)
    forgetful = Manifest(
        20, {"rank_00000.json": manifest.indexes["rank_00000.json"]}, manifest.common, manifest.config, manifest.layout
    )
    path.write_bytes(forgetful.to_bytes())
    iteration, said = load_values(root)
    assert iteration == 10 and "elements of a are in no file" in said[0]


# ---------------------------------------------------------------------------------------------------------------------
# The tracker, and asking for one


def test_asking_for_a_broken_one_is_an_error(root):
    (root / "iter_0000020" / "rank_00000.json").unlink()
    with pytest.raises(UserError, match=r"no complete checkpoint in .*rank_00000\.json: No such file"):
        load(root, wanted(), step=20, log=lambda note: None)


# ---------------------------------------------------------------------------------------------------------------------
# Files of other programs and other releases


@pytest.mark.parametrize(
    "files",
    [["mp_rank_00/model_optim_rng.pt"], ["__0_0.distcp", ".metadata", "common.pt", "metadata.json"], ["common.pt"]],
)
def test_another_programs_checkpoint_is_one_clear_error(tmp_path, files):
    for name in files:
        path = tmp_path / "iter_0000005" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\x80")
    (tmp_path / TRACKER).write_text("5")
    with pytest.raises(UserError, match=r"iter_0000005 is another program's checkpoint") as error:
        load(tmp_path, wanted())
    assert not isinstance(error.value, BrokenCheckpoint)


def test_a_newer_format_is_not_passed_over(root):
    path = root / "iter_0000020" / MANIFEST
    fields = json.loads(path.read_bytes())
    content = path.read_bytes().replace(b'"format_version": 1', b'"format_version": 2')
    blank = content.replace(fields["sha256"].encode(), b"0" * 64)
    path.write_bytes(blank.replace(b"0" * 64, hashlib.sha256(blank).hexdigest().encode(), 1))
    with pytest.raises(UserError, match='version 2; this release reads "megatron safetensors" version 1'):
        load(root, wanted())


def test_a_folder_that_was_copied_elsewhere_loads(root, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    shutil.copytree(root / "iter_0000010", other / "iter_0000010")
    assert load_values(other)[0] == 10
