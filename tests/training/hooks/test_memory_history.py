"""--record-memory-history: snapshots while the run goes on and at its end."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.exceptions import UserError
from megatron.training.hooks.memory_history import MAX_ENTRIES, MemoryHistory, make_memory_history


def test_snapshots_replace_each_other(tmp_path: Path) -> None:
    calls: list[Any] = []

    def dump(path: str) -> None:
        Path(path).write_text(f"snapshot {sum(call == 'dump' for call in calls)}")
        calls.append("dump")

    hook = MemoryHistory(tmp_path / "new/snapshot.pickle", 2, record=calls.append, dump=dump)
    hook.on_start(0)
    for iteration in (1, 2, 3):
        hook.after_step(iteration)
    assert hook.path.read_text() == "snapshot 0"
    hook.on_exit(3)
    assert hook.path.read_text() == "snapshot 1" and list(hook.path.parent.iterdir()) == [hook.path]
    assert calls == [MAX_ENTRIES, "dump", "dump", None]


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--memory-snapshot-path .*file/x: "):
        MemoryHistory(tmp_path / "file/x", 2, record=lambda entries: None).on_start(0)


def test_ranks_have_files_of_their_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert make_memory_history("a/snapshot.pickle", 0, [0], 10) is None
    assert "nothing is recorded" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    hooks = [make_memory_history("a/snapshot.pickle", rank, [1, 3], 10) for rank in range(4)]
    paths = [None if hook is None else str(hook.path) for hook in hooks]
    assert paths == [None, "a/snapshot.pickle", None, "a/snapshot.rank_00003.pickle"]
