"""megatron/data/datasets/index_cache.py: whole entries or none, also if a writer dies or has no permission."""

import logging
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support.special_files import SPECIAL_FILES, special_file

from megatron.core.utils.compiled import AST_LOCK
from megatron.data.datasets.index_cache import IndexCache, load_array

NAMES = ["a", "b"]


def arrays():
    return {"a": np.arange(300_000), "b": np.arange(7, dtype=np.uint32)}


def valid(found):
    return found["a"].shape == (300_000,) and found["b"].shape == (7,)


def never():
    raise AssertionError("built although the entry is there")


def test_saved_arrays_come_back_large_ones_mapped(tmp_path):
    cache = IndexCache(tmp_path / "deep" / "cache", "X-train", "description")
    assert cache.load(NAMES) is None
    built = cache.load_or_build(NAMES, valid, arrays)
    for found in (built, cache.load_or_build(NAMES, valid, never)):
        assert isinstance(found["a"], np.memmap)
        assert not isinstance(found["b"], np.memmap)
        assert all(
            np.array_equal(found[name], arrays()[name]) and found[name].dtype == arrays()[name].dtype for name in NAMES
        )
    names = {path.name.split("X-train")[1] for path in (tmp_path / "deep" / "cache").iterdir()}
    assert names == {"-a.npy", "-b.npy", "-description.txt"}


def test_threads_read_one_array_at_a_time(tmp_path):
    """numpy reads the header with Python's parser, which two threads must not use at the same time."""
    np.save(tmp_path / "a.npy", np.arange(3))
    with ThreadPoolExecutor(1) as pool:
        with AST_LOCK:
            reading = pool.submit(load_array, tmp_path / "a.npy")
            with pytest.raises(TimeoutError):
                reading.result(timeout=0.05)
        assert reading.result(timeout=240).tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", ["-a.npy", "-b.npy", "-description.txt", ".lock"])
@pytest.mark.parametrize("kind", SPECIAL_FILES)
def test_what_is_no_file_is_not_read(tmp_path, name, kind):
    cache = IndexCache(tmp_path, "X", "description")
    cache.save(arrays())
    (description,) = tmp_path.glob("*-description.txt")
    path = description.with_name(description.name.removesuffix("-description.txt") + name)
    path.unlink(missing_ok=True)
    if name == ".lock":  # it is opened by who builds
        description.unlink()
    with special_file(path, kind):
        built = cache.load_or_build(NAMES, valid, arrays)
        assert all(np.array_equal(built[name], arrays()[name]) for name in NAMES)


@pytest.mark.parametrize("line", ["[1]", "7", "null", "[" * 5000])
def test_checksums_that_are_none(tmp_path, line):
    cache = IndexCache(tmp_path, "X", "description")
    cache.save(arrays())
    (path,) = tmp_path.glob("*-description.txt")
    path.write_text(f"{path.read_text().rpartition(chr(10))[0]}\n{line}")
    assert cache.load(NAMES) is None and cache.load_or_build(NAMES, valid, arrays)["b"].shape == (7,)
    assert cache.load(NAMES) is not None


def test_another_description_is_another_entry(tmp_path):
    IndexCache(tmp_path, "X", "one").save(arrays())
    assert IndexCache(tmp_path, "X", "two").load(NAMES) is None
    assert IndexCache(tmp_path, "X", "one").load(NAMES) is not None


def test_any_flipped_bit_of_a_header_builds_the_entry_again(tmp_path):
    """numpy reads the header as Python. Some flips change type or order of bytes and leave all bytes as they are."""
    cache = IndexCache(tmp_path, "X", "description")
    small = {"a": np.arange(5, dtype=np.int64)}
    cache.save(small)
    (path,) = tmp_path.glob("*-a.npy")
    content = path.read_bytes()
    for bit in range(0, 8 * (len(content) - 40), 3):  # each bit of a byte in turn
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        found = cache.load(["a"])
        assert found is None or (found["a"].dtype == np.int64 and found["a"].tolist() == [0, 1, 2, 3, 4]), bit


def test_without_a_folder_nothing_is_kept():
    built = IndexCache(None, "X", "one").load_or_build(NAMES, valid, arrays)
    assert np.array_equal(built["a"], np.arange(300_000))


@pytest.mark.parametrize(
    "damage",
    [
        *("short", "empty", "object", "shape", "huge", "zeros", "a bit", "cut description", "no array"),
        *("no description", "a pipe", "a description of another kind"),
    ],
)
def test_damaged_entries_are_built_again(tmp_path, damage, caplog):
    cache = IndexCache(tmp_path, "X", f"description {damage}")
    cache.save(arrays())
    path = next(tmp_path.glob("*-a.npy"))
    if damage == "short":
        path.write_bytes(path.read_bytes()[:-5])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "object":
        np.save(path, np.array([Payload(tmp_path / "executed")], dtype=object), allow_pickle=True)
    elif damage == "shape":
        np.save(path, np.arange(299_999))
    elif damage == "huge":
        small = next(tmp_path.glob("*-b.npy"))
        with small.open("wb") as file:
            np.lib.format.write_array_header_1_0(file, {"descr": "<i8", "fortran_order": False, "shape": (10**15,)})
    elif damage == "a bit":  # of an array that is mapped, not read
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "zeros":
        small = next(tmp_path.glob("*-b.npy"))
        small.write_bytes(small.read_bytes()[:-28] + bytes(28))
    elif damage == "a pipe":
        path.unlink()
        os.mkfifo(path)
    elif damage == "a description of another kind":
        text = next(tmp_path.glob("*-description.txt"))
        text.write_text(text.read_text().rpartition("\n")[0] + "\n[]")
    elif damage == "cut description":
        text = next(tmp_path.glob("*-description.txt"))
        text.write_text(text.read_text()[:-3])
    elif damage == "no array":
        path.unlink()
    else:
        next(tmp_path.glob("*-description.txt")).unlink()
    found = cache.load_or_build(NAMES, valid, arrays)
    assert np.array_equal(found["a"], np.arange(300_000))
    assert np.array_equal(cache.load_or_build(NAMES, valid, never)["a"], np.arange(300_000))
    assert bool(caplog.records) == (damage not in ("no array", "no description"))
    assert not (tmp_path / "executed").exists()


class Payload:
    """Unpickling it creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def _build_and_report(folder, barrier, builds, results, seconds):
    def build():
        with builds.get_lock():
            builds.value += 1
        time.sleep(seconds)
        return arrays()

    barrier.wait()
    found = IndexCache(folder, "X", "description").load_or_build(NAMES, valid, build)
    results.put(int(found["a"].sum()) + int(found["b"].sum()))


@pytest.mark.fast("True")
@pytest.mark.parametrize("folder_is_writable", [True, False])
def test_many_processes_race_for_one_entry(tmp_path, folder_is_writable):
    count = 12
    context = multiprocessing.get_context("fork")
    barrier, builds, results = context.Barrier(count), context.Value("i", 0), context.Queue()
    if not folder_is_writable:
        (tmp_path / "cache").write_text("a file where the folder should be")
    processes = [
        context.Process(target=_build_and_report, args=(tmp_path / "cache", barrier, builds, results, 0.3))
        for _ in range(count)
    ]
    for process in processes:
        process.start()
    expected = sum(int(array.sum()) for array in arrays().values())
    assert [results.get(timeout=240) for _ in range(count)] == [expected] * count
    for process in processes:
        process.join(240)
        assert process.exitcode == 0
    assert builds.value == (1 if folder_is_writable else count)


def _hold_the_lock(folder, holding, seconds):
    def build():
        holding.set()
        time.sleep(seconds)
        return arrays()

    IndexCache(folder, "X", "description").load_or_build(NAMES, valid, build)


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "stuck"])
def test_nobody_waits_for_a_builder_that_does_not_finish(tmp_path, killed):
    context = multiprocessing.get_context("fork")
    holding = context.Event()
    builder = context.Process(target=_hold_the_lock, args=(tmp_path, holding, 600))
    builder.start()
    try:
        assert holding.wait(240)
        if killed:
            os.kill(builder.pid, signal.SIGKILL)
            builder.join()
        started = time.monotonic()
        patience = 500 if killed else 0.5
        found = IndexCache(tmp_path, "X", "description", patience).load_or_build(NAMES, valid, arrays)
        assert np.array_equal(found["a"], np.arange(300_000))
        assert time.monotonic() - started < 240
    finally:
        builder.kill()
        builder.join()
    assert not list(tmp_path.glob("*.tmp"))


@pytest.fixture
def read_only():
    """A folder that this process may read and not write; superusers become another user for that."""
    # Not within tmp_path: pytest closes the folders above it to others.
    outer = Path(tempfile.mkdtemp())
    outer.chmod(0o755)
    folder = outer / "cache"
    folder.mkdir()
    user = os.geteuid()
    yield folder
    if os.geteuid() != user:
        os.seteuid(user)
    folder.chmod(0o755)
    shutil.rmtree(outer)


def _lock_out(folder):
    folder.chmod(0o555)
    if os.geteuid() == 0:
        os.seteuid(65534)
    assert not os.access(folder, os.W_OK, effective_ids=True)


def test_a_read_only_folder_is_said_once_and_serves_what_it_has(read_only, caplog):
    IndexCache(read_only, "X", "there").save(arrays())
    _lock_out(read_only)
    with caplog.at_level(logging.WARNING):
        IndexCache(read_only, "X", "there").load_or_build(NAMES, valid, never)
        assert caplog.records == []
        for _ in range(3):
            found = IndexCache(read_only, "X", "not there").load_or_build(NAMES, valid, arrays)
            assert np.array_equal(found["a"], np.arange(300_000))
    assert len(caplog.records) == 1
    assert f"{read_only}: cannot be written (Permission denied)" in caplog.records[0].message
    assert len(list(read_only.iterdir())) == 3


def test_a_damaged_entry_of_a_read_only_folder_is_built_in_memory(read_only):
    IndexCache(read_only, "X", "there").save({"a": np.arange(3), "b": np.arange(7)})  # intact, but of other shapes
    _lock_out(read_only)
    found = IndexCache(read_only, "X", "there").load_or_build(NAMES, valid, arrays)
    assert np.array_equal(found["a"], np.arange(300_000))
