"""A scratch file: checked bytes, a folder that can be used, files of dead and of living processes."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.core.exceptions import UserError
from megatron.core.utils import scratch_file
from megatron.core.utils.scratch_file import BLOCK, ScratchFile, aligned_memory, checksum, file_system_of

PROCESS = """
import fcntl, os, sys, time
file = open(f"{sys.argv[1]}/optimizer-state-rank{sys.argv[2]}-pid{os.getpid()}-01234567.scratch", "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("ready", flush=True)
time.sleep(60)
"""
"""Holds a file as a run does, without the seconds that torch takes to start."""


def other_process(folder: Path, rank: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROCESS, str(folder), str(rank)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_bytes_come_back(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path, 0)
    memory, found = aligned_memory(3 * BLOCK), aligned_memory(3 * BLOCK)
    memory.random_(256)
    offset = file.reserve(3 * BLOCK)
    file.write(offset, memory)
    file.read(offset, found)
    assert torch.equal(found, memory)
    os.truncate(file.path, offset + BLOCK)
    with pytest.raises(UserError, match=f"has been cut at {offset + BLOCK:,} bytes"):
        file.read(offset, found)
    path = file.path
    assert path.read_bytes().startswith(b"Optimizer state of a training run.")
    file.close()
    assert not path.exists()


def test_checksum() -> None:
    memory = torch.zeros(3 * BLOCK, dtype=torch.uint8).random_(256)
    whole = checksum(memory)
    for place in (0, 9, BLOCK, 3 * BLOCK - 1):
        changed = memory.clone()
        changed[place] ^= 128
        assert checksum(changed) != whole
    assert checksum(torch.cat([memory[BLOCK:], memory[:BLOCK]])) != whole
    assert checksum(memory.clone()) == whole


def test_a_file_that_another_process_removes_before_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks that begin at the same time: one takes the new file of the other for a dead process's."""
    lock, removed = scratch_file.fcntl.flock, []

    def after_another(descriptor: int, operation: int) -> None:
        if not removed:
            (path,) = tmp_path.iterdir()
            removed.append(path)
            path.unlink()
        lock(descriptor, operation)

    monkeypatch.setattr(scratch_file.fcntl, "flock", after_another)
    file = ScratchFile(tmp_path, 0)
    assert removed != [file.path] == list(tmp_path.iterdir())


def test_files_of_dead_and_of_living_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of killed processes are removed, of other ranks too. A living one of the same rank is another run."""
    (tmp_path / "optimizer-state-of-mine.txt").touch()
    killed = [other_process(tmp_path, rank) for rank in (0, 7)]
    for process in killed:
        process.kill()
        process.wait()
    left = set(tmp_path.iterdir())
    assert len(left) == 3
    file, second = ScratchFile(tmp_path, 0), ScratchFile(tmp_path, 0)  # another model of the same process
    assert {path.name for path in tmp_path.iterdir()} == {
        "optimizer-state-of-mine.txt",
        file.path.name,
        second.path.name,
    }
    second.close()
    monkeypatch.setattr(scratch_file, "_SECONDS", 0.2)
    living = other_process(tmp_path, 1)
    try:
        told = f"another run uses this folder .process {living.pid}, rank 1, .*give each run a folder of its own"
        with pytest.raises(UserError, match=told):
            ScratchFile(tmp_path, 1)
        assert len(list(tmp_path.iterdir())) == 3
    finally:
        living.kill()
        living.wait()


def test_folders_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no_folder: there is no such folder: make it on a local disk"):
        ScratchFile(tmp_path / "no_folder", 0)
    with pytest.raises(UserError, match="--optimizer-nvme-offload-path /proc: cannot create a file there"):
        ScratchFile("/proc", 0)
    monkeypatch.setattr(scratch_file, "file_system_of", lambda folder: "nfs4")
    with pytest.raises(UserError, match=r"on a network file system \(nfs4\): give a folder on a local disk"):
        ScratchFile(tmp_path, 0)
    assert not list(tmp_path.iterdir())


def test_file_system() -> None:
    assert file_system_of(Path("/proc")) == "proc"
    assert file_system_of(Path("/proc/self")) == "proc"
    local, network = (
        ("ext4", "xfs", "overlay", "tmpfs", "btrfs", "zfs", "fuseblk", ""),
        ("nfs", "nfs4", "lustre", "cifs"),
    )
    assert not any(scratch_file._NETWORK.fullmatch(kind) for kind in local)
    assert all(scratch_file._NETWORK.fullmatch(kind) for kind in (*network, "fuse.sshfs", "smb3"))


def test_a_full_disk(tmp_path: Path) -> None:
    """Space is taken when the run begins. A limit of the size of files stands for the disk."""
    file = ScratchFile(tmp_path, 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(
            UserError, match=r"this rank has 4,096 bytes and needs 2,097,152 more, .* are free; --dry-run"
        ):
            file.reserve(2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
