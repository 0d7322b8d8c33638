"""Garbage collection by hand."""

import gc

import pytest

from megatron.training.hooks.gc import ManualGarbageCollection


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
    assert len(collections) == 1 + 1 + 2  # at the start, after the first step, after 3 and 6
    hook.on_exit(7)
    assert gc.isenabled()


def test_garbage_is_collected_around_evaluation(collections):
    hook = ManualGarbageCollection()
    hook.on_start(0)
    hook.after_step(1)
    hook.before_evaluate(1)
    hook.after_evaluate(1)
    assert collections == [2, 2, 0, 0]


def test_a_disabled_collector_stays_disabled(collections):
    gc.disable()
    hook = ManualGarbageCollection()
    hook.on_start(0)
    hook.on_exit(0)
    assert not gc.isenabled()
