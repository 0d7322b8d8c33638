"""Profiles of chosen steps on chosen ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.exceptions import UserError
from megatron.training.config.log import LoggingConfig
from megatron.training.hooks.profiler import (
    MAX_ENTRIES,
    MemoryHistory,
    NsightProfiler,
    TorchProfiler,
    make_memory_history,
    make_profiler,
    nvtx_marks,
)


def flags(start, end, use_pytorch_profiler=True, **others):
    return LoggingConfig(
        profile_step_start=start, profile_step_end=end, use_pytorch_profiler=use_pytorch_profiler, **others
    )


def run_profiled(hook, first, last):
    for iteration in range(first, last):
        hook.before_step(iteration)
        with torch.profiler.record_function(f"step {iteration}"):
            torch.ones(8, 8) @ torch.ones(8, 8)
        hook.after_step(iteration + 1)
    hook.on_exit(last)


def steps_in(trace):
    events = json.loads(trace.read_text())["traceEvents"]
    return {event["name"] for event in events if str(event.get("name", "")).startswith("step ")}


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [(0, 8, {"step 3", "step 4"}), (4, 8, {"step 4"}), (0, 4, {"step 3"}), (2, 8, {"step 3", "step 4"})],
    ids=["whole", "resumed inside", "ends inside", "resumed at the warm-up"],
)
def test_torch_profiler_records_the_steps_asked_for(tmp_path, first, last, expected):
    hook = TorchProfiler(3, 5, tmp_path / "profiles", rank=2)
    run_profiled(hook, first, last)
    assert hook.trace is not None
    assert list((tmp_path / "profiles").iterdir()) == [hook.trace]
    assert hook.trace.name.startswith("rank_00002.")
    assert steps_in(hook.trace) == expected


def test_an_execution_trace_has_the_operators_of_the_recorded_steps(tmp_path):
    """--pytorch-profiler-collect-chakra"""
    hook = make_profiler(flags(1, 2, pytorch_profiler_collect_chakra=True), 0, tmp_path)
    run_profiled(hook, 0, 3)
    nodes = json.loads(hook.execution_trace.read_text())["nodes"]
    assert [node["name"] for node in nodes].count("aten::mm") == 1
    assert {node["name"] for node in nodes if node["name"].startswith("step ")} == {"step 1"}
    plain = make_profiler(flags(1, 2), 0, tmp_path / "plain")
    run_profiled(plain, 0, 3)
    assert plain.execution_trace is None and list((tmp_path / "plain").iterdir()) == [plain.trace]


def test_a_run_that_never_gets_there_writes_no_profile(tmp_path):
    hook = TorchProfiler(30, 50, tmp_path, rank=0)
    run_profiled(hook, 0, 3)
    run_profiled(TorchProfiler(3, 5, tmp_path, rank=0), 6, 8)
    assert list(tmp_path.iterdir()) == []


def test_choice_of_profiler(tmp_path):
    assert make_profiler(flags(1, 2), 1, tmp_path) is None
    assert isinstance(make_profiler(flags(1, 2), 0, tmp_path), TorchProfiler)
    with pytest.raises(UserError, match="--use-pytorch-profiler writes into --tensorboard-dir"):
        make_profiler(flags(1, 2), 0, None)
    with pytest.raises(UserError, match="--profile-step-start 5 --profile-step-end 5"):
        make_profiler(flags(5, 5), 1, None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with CUDA can do it")
def test_nsight_without_cuda_names_the_way(capsys):
    """A command written for GPUs also runs on a CPU."""
    with pytest.raises(UserError, match=r"--profile .* --use-pytorch-profiler"):
        NsightProfiler(10, 12)
    assert make_profiler(flags(1, 2, use_pytorch_profiler=False), 0, None) is None
    assert "--profile: nothing is recorded" in capsys.readouterr().out


def test_nvtx_ranges_where_nsight_records_them(monkeypatch, capsys):
    """--nvtx-ranges needs CUDA and Nsight Systems, and says so once."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert nvtx_marks(wanted=True, use_pytorch_profiler=False, notes=True) is torch.cuda.nvtx.range
    assert nvtx_marks(wanted=False, use_pytorch_profiler=False, notes=True) is None
    assert capsys.readouterr().out == ""
    assert nvtx_marks(wanted=True, use_pytorch_profiler=True, notes=True) is None
    assert "--nvtx-ranges: no ranges are made, since PyTorch's profiler" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert nvtx_marks(wanted=True, use_pytorch_profiler=False, notes=True) is None
    assert capsys.readouterr().out == "--nvtx-ranges: no ranges are made, since they need CUDA\n"
    assert nvtx_marks(wanted=True, use_pytorch_profiler=False, notes=False) is None
    assert capsys.readouterr().out == ""


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
