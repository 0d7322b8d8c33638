"""Optimizer state in a file: no bit of the numbers changes, failures of the disk are told, checkpoints do not know."""

import functools
import gc
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from core.optimizer.test_host_state import BF16, SETTINGS, assert_equal, built, trained
from support.processes import run_on_ranks
from support.sharding import backward

from megatron.core.exceptions import UserError
from megatron.core.optimizer import FlatOptimizer, host_state
from megatron.core.optimizer.nvme_state import BUFFERS, FileStream, buffer_bytes, piece_bytes
from megatron.core.utils import scratch_file


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces end within parameters, and there are more than buffers."""
    monkeypatch.setattr(host_state, "PIECE", 64)


def step(ddp: Any, optimizer: FlatOptimizer, number: int = 0) -> None:
    ddp.zero_grad_buffer()
    backward(ddp, number, 1)
    ddp.finish_grad_sync()
    optimizer.step_on_device(torch.tensor(True))


def backing_of(optimizer: FlatOptimizer) -> FileStream:
    assert isinstance(optimizer._host_stream.backing, FileStream)
    return optimizer._host_stream.backing


@pytest.mark.parametrize(("settings", "fraction"), [({}, 0.5), *((one, 1.0) for one in SETTINGS[2:8])], ids=str)
def test_no_bit_changes(settings: dict[str, Any], fraction: float, tmp_path: Path) -> None:
    found = trained(fraction, **settings, optimizer_nvme_offload_path=str(tmp_path))
    assert_equal(found, trained(None, **settings))


def test_buffered_where_the_file_system_has_no_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = trained(None)
    monkeypatch.setattr(os, "O_DIRECT", 0)
    assert_equal(trained(1.0, optimizer_nvme_offload_path=str(tmp_path)), plain)


def sharded(name: str, folder: str) -> bool:
    host_state.PIECE = 64
    found = trained(1.0, BF16, name, 2, optimizer_nvme_offload_path=folder)
    assert_equal(found, trained(None, BF16, name, 2))
    return True


@pytest.mark.parametrize("name", ["optim", "optim_grads_params"])
def test_no_bit_changes_with_sharded_state(name: str, tmp_path: Path) -> None:
    """Both ranks use one folder."""
    assert run_on_ranks(sharded, 2, name, str(tmp_path)) == [True, True]


@pytest.mark.parametrize("settings", [{}, SETTINGS[5], SETTINGS[7]], ids=str)
def test_state_can_be_loaded_and_reloaded(settings: dict[str, Any], tmp_path: Path) -> None:
    """Chunks have the types of a run without a file, so checkpoints are the same."""
    ddp, optimizer = built(1.0, **settings, optimizer_nvme_offload_path=str(tmp_path))
    plain_ddp, plain = built(None, **settings)
    step(plain_ddp, plain)
    for mine, other in zip(optimizer.state_chunks(), plain.state_chunks(), strict=True):
        assert mine.tensor.dtype == other.tensor.dtype
        mine.load(other.values())
    with torch.no_grad():
        for unit, other_unit in zip(optimizer.units, plain.units, strict=True):
            unit.weight_shard.copy_(other_unit.weight_shard)
    optimizer.load_common_state(plain.common_state())
    for number in (1, 2):
        step(ddp, optimizer, number)
        step(plain_ddp, plain, number)
    for mine, other in zip(optimizer.state_chunks(), plain.state_chunks(), strict=True):
        assert torch.equal(mine.values(), other.values()), mine
    with torch.no_grad():
        for unit in optimizer.units:
            unit.weight_shard.fill_(0.5)
    optimizer.reload_model_params()
    assert all((state.weights.decode() == 0.5).all() for state in optimizer.states)


def test_memory_is_a_few_buffers(tmp_path: Path) -> None:
    _, optimizer = built(1.0, optimizer_nvme_offload_path=str(tmp_path))
    backing = backing_of(optimizer)
    assert len(backing.pieces) > BUFFERS
    assert {tensor.device.type for s in optimizer.states for tensor in s.moments["exp_avg"].movable} == {"meta"}
    sizes = [
        size
        for state in optimizer.states
        for size in piece_bytes([state.weights, *state.moments.values()], state.unit.weight_shard.numel())
    ]
    assert sum(buffer.untyped_storage().nbytes() for buffer in backing.buffers) == buffer_bytes(sizes)
    assert backing.file.path.stat().st_size == scratch_file.BLOCK + sum(sizes)


def test_other_bytes_are_told(tmp_path: Path) -> None:
    """The state is not read and not saved any more."""
    ddp, optimizer = built(1.0, optimizer_nvme_offload_path=str(tmp_path))
    step(ddp, optimizer)
    optimizer._host_stream.finish()
    path = backing_of(optimizer).file.path
    with open(path, "r+b") as file:
        file.seek(scratch_file.BLOCK + 5)
        was = file.read(1)
        file.seek(scratch_file.BLOCK + 5)
        file.write(bytes([was[0] ^ 1]))
    told = "--optimizer-nvme-offload-path .* does not hold the bytes that were written at 4,096: .* last checkpoint"
    with pytest.raises(UserError, match=told):
        step(ddp, optimizer)
    with pytest.raises(UserError, match=told):
        list(optimizer.state_chunks())


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_failing_disk_is_told(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last piece of an update fails: its step may end, but its state is not saved."""
    ddp, optimizer = built(1.0, optimizer_nvme_offload_path=str(tmp_path))
    last = backing_of(optimizer)._transfers[-1][-1].offset
    real = getattr(os, call)

    def failing(descriptor: int, buffers: Any, offset: int) -> int:
        if offset == last:
            raise OSError(5, os.strerror(5))
        return int(real(descriptor, buffers, offset))

    monkeypatch.setattr(os, call, failing)
    verb = {"preadv": "read", "pwritev": "written"}[call]
    told = re.escape(f"{tmp_path}: ") + f".* cannot be {verb}: Input/output error. Resume from the last checkpoint"
    with pytest.raises(UserError, match=told):
        step(ddp, optimizer)
        list(optimizer.state_chunks())
    monkeypatch.setattr(os, call, real)
    for use in (functools.partial(step, ddp, optimizer), lambda: list(optimizer.state_chunks())):
        with pytest.raises(UserError, match=told):
            use()


def test_the_file_goes_with_the_optimizer(tmp_path: Path) -> None:
    ddp, optimizer = built(1.0, optimizer_nvme_offload_path=str(tmp_path))
    step(ddp, optimizer)
    optimizer._host_stream.finish()  # its threads hold the file until then
    assert len(list(tmp_path.iterdir())) == 1
    del ddp, optimizer
    gc.collect()
    assert not list(tmp_path.iterdir())
