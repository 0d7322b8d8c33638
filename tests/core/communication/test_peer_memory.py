"""Peer memory without GPUs: what is asked of the CUDA driver, and what is said where memory cannot be shared."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.core.communication import peer_memory
from megatron.core.communication.peer_memory import SymmetricMemory
from megatron.core.exceptions import UserError

RANK, NBYTES = 1, 64
ADDRESSES = [1000, 2000]


class Recorder:
    """Plays torch's handle, streams and the CUDA driver; notes calls of the driver."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.status = 0
        self.rank, self.buffer_ptrs, self.cuda_stream = RANK, ADDRESSES, 7

    def cuStreamWaitValue32_v2(self, *arguments: int) -> int:
        self.calls.append(("wait", *arguments))
        return self.status

    def cuStreamWriteValue32_v2(self, *arguments: int) -> int:
        self.calls.append(("write", *arguments))
        return self.status

    def synchronize(self) -> None:
        self.calls.append(("synchronize", self.own.tolist()))

    def get_buffer(self, rank: int, shape: Any, dtype: torch.dtype, offset: int) -> Any:
        self.calls.append(("view", rank, shape, dtype, offset))
        return torch.empty(shape, dtype=dtype)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()

    def allocate(nbytes: int, device: torch.device) -> Any:
        recorder.own = torch.ones(nbytes, dtype=torch.uint8)
        return recorder.own

    monkeypatch.setattr(peer_memory, "allocate_symmetric_memory", allocate)
    monkeypatch.setattr(
        peer_memory, "share_symmetric_memory", lambda own, group: recorder.calls.append("share") or recorder
    )
    monkeypatch.setattr(peer_memory, "_driver", lambda: recorder)
    monkeypatch.setattr(peer_memory, "holds_on_all_ranks", lambda *_: recorder.calls.append("agree") or True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: recorder)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: recorder)
    return recorder


def test_words_are_zero_on_all_ranks_before_one_is_written(recorder: Recorder) -> None:
    memory = SymmetricMemory(SimpleNamespace(), NBYTES, 4, torch.device("cpu"))
    assert recorder.calls == ["agree", ("synchronize", [1] * NBYTES + [0] * 16), "share", "agree"]
    del memory


def test_words_lie_behind_the_data_of_each_rank(recorder: Recorder) -> None:
    memory = SymmetricMemory(SimpleNamespace(), NBYTES, 4, torch.device("cpu"))
    memory.copies.wait(3, 5)
    memory.signals.write(0, 2, 2**32 + 6)
    waits, writes = ("wait", 7, 2000 + NBYTES + 12, 5, 0), ("write", 7, 1000 + NBYTES + 8, 6, 0)
    assert recorder.calls[4:] == [waits, writes]


def test_memory_can_use_the_streams_of_other_memory(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    first = SymmetricMemory(SimpleNamespace(), NBYTES, 4, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "Stream", None)
    second = SymmetricMemory(SimpleNamespace(), NBYTES, 4, torch.device("cpu"), first)
    assert second.streams is first.streams


def test_a_view_is_made_once(recorder: Recorder) -> None:
    memory = SymmetricMemory(SimpleNamespace(), NBYTES, 4, torch.device("cpu"))
    first = memory.view(0, 32, (2, 3), torch.float32)
    assert memory.view(0, 32, (2, 3), torch.float32) is first
    assert recorder.calls[4:] == [("view", 0, (2, 3), torch.float32, 8)]


def test_an_error_of_the_driver_is_raised(recorder: Recorder) -> None:
    memory = SymmetricMemory(SimpleNamespace(), NBYTES, 4, torch.device("cpu"))
    recorder.status = 1
    with pytest.raises(RuntimeError, match="cuStreamWaitValue32_v2 failed with error 1"):
        memory.copies.wait(0, 1)


def test_gpus_that_cannot_share_memory_are_named(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_memory, "holds_on_all_ranks", lambda value, *_: False)
    with pytest.raises(UserError, match=r"cannot share memory \(another rank says why\); process-group works"):
        SymmetricMemory(SimpleNamespace(), NBYTES, 4, torch.device("cpu"))

    def allocate(*arguments: Any) -> Any:
        raise RuntimeError("no peer access\nand more")

    monkeypatch.setattr(peer_memory, "holds_on_all_ranks", lambda value, *_: value)
    for step in ("share_symmetric_memory", "allocate_symmetric_memory"):
        monkeypatch.setattr(peer_memory, step, allocate)
        recorder.calls.clear()
        with pytest.raises(UserError, match=r"cannot share memory \(no peer access\); process-group works"):
            SymmetricMemory(SimpleNamespace(), NBYTES, 4, torch.device("cpu"))
    assert not recorder.calls  # a rank without memory does not let the others wait for it
