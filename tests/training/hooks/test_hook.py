"""Several hooks as one."""

import pytest

from megatron.training.hooks.hook import Hook, Hooks


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
