"""What a save leaves on disk: files that safetensors reads, equal shares, retention, and errors that leave no trace."""

import json
import subprocess

import pytest
import torch
from support.checkpoints import filled, load_as, make_chunk, save_as
from support.programs import python

from megatron.core.dist_checkpointing.chunk import Chunk, model_chunks
from megatron.core.dist_checkpointing.disk import Disk
from megatron.core.dist_checkpointing.folders import TRACKER, folder_name, read_tracker
from megatron.core.dist_checkpointing.manifest import MANIFEST, BrokenCheckpoint
from megatron.core.dist_checkpointing.reading import load
from megatron.core.dist_checkpointing.writing import save, save_streamed
from megatron.core.exceptions import UserError
from megatron.core.initializers import Constant
from megatron.core.parameters import Box, declare, name_parameters

EMPTY = {"config": {}, "layout": {}}


def save_step(root, step, **options):
    return save(root, [make_chunk("a", (4,))], step=step, common={"iteration": step}, **EMPTY, **options)


def names(root):
    return sorted(path.name for path in root.iterdir())


def folders_of(*steps):
    return [folder_name(step) for step in steps]


def test_the_files_of_a_checkpoint(tmp_path):
    saved = save_step(tmp_path, 10)
    assert saved.folder == tmp_path / "iter_0000010" and saved.nbytes == sum(
        path.stat().st_size for path in saved.folder.glob("*.safetensors")
    )
    assert names(saved.folder) == ["manifest.json", "rank_00000.json", "rank_00000.safetensors"]
    assert (tmp_path / TRACKER).read_bytes() == b"10"
    manifest = json.loads((saved.folder / MANIFEST).read_text())
    assert manifest["format_version"] == 1 and manifest["iteration"] == 10
    assert manifest["common"] == {"iteration": 10} and manifest["layout"] == {"world_size": 1}


def test_two_copies_on_one_rank_are_written_once_and_both_read(tmp_path):
    """A tied weight whose two ends of the pipeline are on one rank; whole, and as ranges of two ranks."""
    whole = [make_chunk("tied", (4, 3), holders=(0, 1)), make_chunk("tied", (4, 3), holders=(0, 1))]
    ranges = [(0, 7), (7, 12)]
    ranks = [[*whole, *(make_chunk("state", (4, 3), flat_range=each) for _ in range(2))] for each in ranges]
    folder = save_as(tmp_path, ranks)  # checks that every element is stored exactly once
    empty = [make_chunk("tied", (4, 3), empty=True), make_chunk("tied", (4, 3), empty=True)]
    load_as(folder, empty)
    assert all(torch.equal(chunk.tensor, filled(chunk)) for chunk in empty)


def test_ranks_that_list_different_chunks_are_found_out(tmp_path):
    chunks = [make_chunk("a", (4,), holders=(0, 1)), make_chunk("b", (4,), holders=(0, 1))]
    big = torch.zeros(1 << 19)
    extra = Chunk("0", (1 << 19,), Box.whole((1 << 19,)), None, big, (0, 1))
    with pytest.raises(BrokenCheckpoint):
        save_as(tmp_path, [chunks, [extra, *chunks]])
    assert not (tmp_path / "iter_0000010").exists()


def test_padding_is_in_no_chunk():
    module = torch.nn.Linear(3, 8, bias=False)
    module.weight = declare(torch.nn.Parameter(torch.randn(8, 3)), Constant(0.0), global_shape=(7, 3))
    name_parameters(module)
    (chunk,) = model_chunks(module, lambda info: (0, 1))
    assert chunk.name == "weight" and chunk.tensor.numel() == 21 and chunk.holders == (0, 1)
    assert chunk.tensor.data_ptr() == module.weight.data_ptr()


def test_saving_an_iteration_again_replaces_it(tmp_path):
    save_step(tmp_path, 10)
    changed = Chunk("a", (4,), Box.whole((4,)), None, torch.full((4,), 7.0))
    save(tmp_path, [changed], step=10, common={}, **EMPTY)
    target = make_chunk("a", (4,), empty=True)
    load(tmp_path, [target])
    assert (target.tensor == 7).all() and names(tmp_path) == ["iter_0000010", TRACKER]


# ---------------------------------------------------------------------------------------------------------------------
# Retention


def test_keep_last(tmp_path):
    for step in (10, 20, 30, 40):
        saved = save_step(tmp_path, step, keep_last=2)
    assert names(tmp_path) == ["iter_0000030", "iter_0000040", TRACKER]
    assert saved.notes == ["deleted iter_0000020 (--keep-last 2)"]


def test_retain_interval(tmp_path):
    """--save-retain-interval: multiples stay, and the newest until a newer one is complete."""
    for step in (10, 15, 20, 25, 30, 35):
        saved = save_step(tmp_path, step, keep_every=20)
    assert names(tmp_path) == ["iter_0000020", "iter_0000035", TRACKER]
    assert saved.notes == ["deleted iter_0000030 (--save-retain-interval 20)"]
    for step in (40, 45, 50):
        save_step(tmp_path, step, keep_last=2, keep_every=20)
    assert names(tmp_path) == ["iter_0000020", "iter_0000040", "iter_0000045", "iter_0000050", TRACKER]


def test_a_checkpoint_that_was_moved_to_another_disk(tmp_path):
    """A link stands in its place. Once it is old, the link goes, and what it points to stays."""
    root, moved = tmp_path / "root", tmp_path / "moved"
    save_step(root, 10)
    (root / "iter_0000010").rename(moved)
    (root / "iter_0000010").symlink_to(moved)
    save_step(root, 20, keep_last=1)
    save_step(root, 30)
    assert names(root) == ["iter_0000020", "iter_0000030", TRACKER] and (moved / MANIFEST).exists()
    (root / "iter_0000040").symlink_to(moved)
    save_step(root, 40)
    assert not (root / "iter_0000040").is_symlink() and (moved / MANIFEST).exists()


def test_a_pointer_that_cannot_be_written(tmp_path):
    """The checkpoint is complete by then, and the message says so."""

    def fail(operation, path):
        if TRACKER in path.name:
            raise OSError(28, "No space left on device")

    save_step(tmp_path, 10)
    with pytest.raises(UserError, match=r"iter_0000020 is complete, and a load finds it, but this file does not"):
        save_step(tmp_path, 20, disk=Disk(fail))
    loaded = load(tmp_path, [make_chunk("a", (4,), empty=True)])
    assert loaded.manifest.iteration == 20


@pytest.mark.parametrize(("count", "every"), [(1, None), (2, None), (None, 30)])
def test_the_newest_checkpoint_with_finite_weights_is_kept(tmp_path, count, every):
    for step, finite in ((10, True), (20, True), (30, False), (40, False), (50, False), (60, False)):
        saved = save_step(tmp_path, step, keep_last=count, keep_every=every, weights_finite=finite)
    newest = {1: [60], 2: [50, 60], None: [30, 60]}[count]
    assert names(tmp_path) == [*folders_of(20, *newest), TRACKER]
    assert "kept iter_0000020: weights of newer checkpoints are not finite" in saved.notes
    save_step(tmp_path, 70, keep_last=count, keep_every=every, weights_finite=True)
    assert names(tmp_path) == [*folders_of(*{1: [70], 2: [60, 70], None: [30, 60, 70]}[count]), TRACKER]


def test_a_damaged_checkpoint_does_not_stay_for_its_finite_weights(tmp_path):
    for step in (10, 20):
        save_step(tmp_path, step, weights_finite=True)
    (tmp_path / "iter_0000020" / "rank_00000.safetensors").write_bytes(b"")
    save_step(tmp_path, 30, keep_last=1, weights_finite=False)
    assert names(tmp_path) == [*folders_of(10, 30), TRACKER]


def test_keep_last_does_not_count_broken_ones(tmp_path):
    for step in (10, 20, 30):
        save_step(tmp_path, step)
    (tmp_path / "iter_0000030" / "rank_00000.json").write_text("{}")
    save_step(tmp_path, 40, keep_last=2)
    assert names(tmp_path) == ["iter_0000020", "iter_0000030", "iter_0000040", TRACKER]


def test_keep_last_keeps_what_was_just_saved_and_leaves_the_future_alone(tmp_path):
    """The run was rolled back from 40 to 10 and saves 20."""
    for step in (10, 30, 40):
        save_step(tmp_path, step)
    save_step(tmp_path, 20, keep_last=1)
    assert names(tmp_path) == ["iter_0000020", "iter_0000030", "iter_0000040", TRACKER]


def test_keep_last_leaves_other_folders_alone(tmp_path):
    foreign = tmp_path / "iter_0000001" / "mp_rank_00"
    foreign.mkdir(parents=True)
    (foreign / "model_optim_rng.pt").write_bytes(b"")
    save_step(tmp_path, "release")
    for step in (10, 20):
        save_step(tmp_path, step, keep_last=1)
    assert names(tmp_path) == ["iter_0000001", "iter_0000020", TRACKER, "release"]


# ---------------------------------------------------------------------------------------------------------------------
# Errors


def test_disk_full_is_one_clear_error_and_leaves_no_trace(tmp_path):
    """A real process that may not write files of more than 64 KiB."""
    save_step(tmp_path, 10)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    code = f"""
import resource, torch
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
from pathlib import Path
from megatron.core.dist_checkpointing.chunk import Chunk
from megatron.core.dist_checkpointing.writing import save
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box
chunk = Chunk("a", (100000,), Box.whole((100000,)), None, torch.zeros(100000))
try:
    save(Path({str(tmp_path)!r}), [chunk], step=20, common={{}}, config={{}}, layout={{}})
except UserError as error:
    print(error)
"""
    done = subprocess.run([python(), "-c", code], capture_output=True, text=True, check=True)
    assert "rank_00000.safetensors: File too large; this checkpoint is not written, earlier ones are" in done.stdout
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert names(tmp_path) == ["iter_0000010", TRACKER]


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file"):
        save_step(tmp_path / "file", 10)


def test_leftovers_of_killed_saves_are_removed_and_told(tmp_path):
    for name in ("iter_0000010.tmp-00ff", "iter_0000005.deleted-0a", "iter_0000007.replaced-0b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank_00000.safetensors").write_bytes(b"x")
    saved = save_step(tmp_path, 20)
    assert names(tmp_path) == ["iter_0000007", "iter_0000020", TRACKER]  # 7 had no successor: it got its name back
    assert len(saved.notes) == 1 and "iter_0000010.tmp-00ff" in saved.notes[0]


class _WithASecondWriter(Disk):
    """Another run cleans the folder up before the manifest is written."""

    def write_file(self, path, content, *args, **options):
        super().write_file(path, content, *args, **options)
        if path.name == "rank_00000.json":
            path.unlink()


def test_a_file_that_vanishes_makes_a_second_writer_suspect(tmp_path):
    with pytest.raises(UserError, match="rank 0 wrote it, and rank 0 does not see it: a second run that writes into"):
        save_step(tmp_path, 10, disk=_WithASecondWriter())


def test_memory_beyond_the_tensors_is_bounded(tmp_path):
    """Saving and loading 256 MB must not take a copy of it."""
    count = 1 << 26
    code = f"""
import resource, torch
from pathlib import Path
from megatron.core.dist_checkpointing.chunk import Chunk
from megatron.core.dist_checkpointing.reading import load
from megatron.core.dist_checkpointing.writing import save
from megatron.core.parameters import Box
chunk = Chunk("a", ({count},), Box.whole(({count},)), None, torch.ones({count}))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
save(Path({str(tmp_path)!r}), [chunk], step=1, common={{}}, config={{}}, layout={{}})
load(Path({str(tmp_path)!r}), [chunk])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    done = subprocess.run([python(), "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 64  # MiB


def test_streamed_tensors_are_asked_for_as_their_turn_comes(tmp_path):
    """In order, once each, and those of a file only when the file before is written."""
    chunks = [make_chunk("a", (300, 1000)), make_chunk("b", (4, 3), Box((0, 0), (2, 3)), dtype=torch.bfloat16)]
    chunks.append(make_chunk("b", (4, 3), Box((2, 0), (2, 3)), dtype=torch.bfloat16))
    values = {chunk: chunk.flat.clone() for chunk in chunks}
    places = {Chunk(c.name, c.global_shape, c.box, None, c.tensor.to("meta")): c for c in chunks}
    first, *others = places
    asked = []

    def values_of(chunk):
        asked.append((chunk.name, len(list((tmp_path / "streamed").glob("*.tmp-*/rank_*.json")))))
        return values[places[chunk]]

    saved = save_streamed(
        tmp_path / "streamed", [[first], others], values_of, step="release", common={"note": 1}, config={"x": 2}
    )
    assert asked == [("a", 0), ("b", 1), ("b", 1)]
    assert names(saved.folder) == [
        MANIFEST,
        *(f"rank_{n:05d}.{end}" for n in range(2) for end in ("json", "safetensors")),
    ]
    assert read_tracker(tmp_path / "streamed").step == "release"
    wanted = [make_chunk("a", (300, 1000), empty=True), make_chunk("b", (4, 3), dtype=torch.bfloat16, empty=True)]
    loaded = load(tmp_path / "streamed", wanted)
    assert loaded.manifest.common == {"note": 1} and loaded.manifest.config == {"x": 2}
    assert all(torch.equal(chunk.flat, filled(chunk)) for chunk in wanted)


def test_a_stream_that_breaks_leaves_nothing(tmp_path):
    save_step(tmp_path, 3)
    before = names(tmp_path)

    def values_of(chunk):
        raise BrokenCheckpoint("x.safetensors", "cut short")

    chunk = make_chunk("a", (4,))
    with pytest.raises(BrokenCheckpoint, match="cut short"):
        save_streamed(tmp_path, [[chunk]], values_of, step="release", common={}, config={})
    with pytest.raises(BrokenCheckpoint, match="2 elements of a are in no file"):
        half = make_chunk("a", (4,), Box((0,), (2,)))
        save_streamed(tmp_path, [[half]], lambda chunk: chunk.flat, step="release", common={}, config={})
    assert names(tmp_path) == before
