"""The hooks that only some runs have, and how several act as one."""

import gc
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megatron.core.exceptions import UserError
from megatron.training.hooks.gc import ManualGarbageCollection
from megatron.training.hooks.hook import Hook, Hooks
from megatron.training.hooks.profiler import NsightProfiler, TorchProfiler, make_profiler


class Recorder(Hook):
    def __init__(self, name, calls, fails=False):
        self.name, self.calls, self.fails = name, calls, fails

    def before_step(self, iteration):
        self.calls.append((self.name, "before_step", iteration))

    def on_exit(self, iteration):
        self.calls.append((self.name, "on_exit", iteration))
        if self.fails:
            raise OSError(self.name)


def test_several_hooks_act_as_one():
    calls = []
    hooks = Hooks([Recorder("a", calls), Recorder("b", calls, fails=True), Recorder("c", calls)])
    hooks.on_start(0)
    hooks.before_step(0)
    hooks.after_step(1)
    hooks.before_evaluate(1)
    hooks.after_evaluate(1)
    hooks.after_save(1)
    with pytest.raises(OSError, match="b"):
        hooks.on_exit(1)
    assert calls == [(name, "before_step", 0) for name in "abc"] + [(name, "on_exit", 1) for name in "cba"]


@pytest.fixture
def collections(monkeypatch):
    calls = []
    monkeypatch.setattr(gc, "collect", lambda generation=2: calls.append(generation))
    yield calls
    gc.enable()


def test_garbage_is_collected_at_the_interval_only(collections):
    hook = ManualGarbageCollection(interval=3, evaluation=False)
    hook.on_start(0)
    assert not gc.isenabled()
    for iteration in range(1, 8):
        hook.before_step(iteration - 1)
        hook.after_step(iteration)
    hook.before_evaluate(7)
    hook.after_evaluate(7)
    assert len(collections) == 1 + 2
    hook.on_exit(7)
    assert gc.isenabled()


def test_garbage_is_collected_around_evaluation(collections):
    hook = ManualGarbageCollection()
    hook.on_start(0)
    hook.after_step(1)
    hook.before_evaluate(1)
    hook.after_evaluate(1)
    assert len(collections) == 3


def test_a_disabled_collector_stays_disabled(collections):
    gc.disable()
    hook = ManualGarbageCollection()
    hook.on_start(0)
    hook.on_exit(0)
    assert not gc.isenabled()


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


@pytest.mark.parametrize(("all_threads", "products"), [(False, 1), (True, 2)])
def test_torch_profiler_records_other_threads_if_asked_to(tmp_path, all_threads, products):
    hook = make_profiler(
        rank=0, ranks=[0], start=0, end=1, use_pytorch_profiler=True, directory=tmp_path, all_threads=all_threads
    )

    def compute():
        torch.ones(8, 8) @ torch.ones(8, 8)

    with ThreadPoolExecutor(1) as other:
        other.submit(compute).result()  # the thread is there before the profiler
        hook.before_step(0)
        compute()
        other.submit(compute).result()
        hook.after_step(1)
    events = json.loads(hook.trace.read_text())["traceEvents"]
    assert sum(event.get("name") == "aten::mm" for event in events) == products


def test_a_run_that_never_gets_there_writes_no_profile(tmp_path):
    hook = TorchProfiler(30, 50, tmp_path, rank=0)
    run_profiled(hook, 0, 3)
    run_profiled(TorchProfiler(3, 5, tmp_path, rank=0), 6, 8)
    assert list(tmp_path.iterdir()) == []


def test_choice_of_profiler(tmp_path):
    flags = {"ranks": [1], "start": 1, "end": 2, "use_pytorch_profiler": True}
    assert make_profiler(rank=0, directory=tmp_path, **flags) is None
    assert isinstance(make_profiler(rank=1, directory=tmp_path, **flags), TorchProfiler)
    with pytest.raises(UserError, match="--use-pytorch-profiler writes into --tensorboard-dir"):
        make_profiler(rank=1, directory=None, **flags)
    with pytest.raises(UserError, match="--profile-step-start 5 --profile-step-end 5"):
        make_profiler(rank=0, directory=None, **{**flags, "start": 5, "end": 5})


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with CUDA can do it")
def test_nsight_without_cuda_names_the_way():
    with pytest.raises(UserError, match=r"--profile .* --use-pytorch-profiler"):
        NsightProfiler(10, 12)
