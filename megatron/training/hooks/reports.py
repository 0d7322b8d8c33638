"""Hooks that print reports: slow ranks, and results that change when they are computed again."""

from megatron.core.health.rerun_state_machine import get_rerun_state_machine
from megatron.core.health.straggler_detector import StragglerDetector
from megatron.training.hooks.hook import Hook


class StragglerReport(Hook):
    """--log-straggler: compares the ranks every `interval` iterations."""

    def __init__(self, interval: int) -> None:
        self.interval = interval

    def after_step(self, iteration: int) -> None:
        """Prints the comparison on the first rank. Waits for the device."""
        if iteration % self.interval == 0 and StragglerDetector().enabled:
            line = StragglerDetector().report()
            if line is not None:
                print(f"iteration {iteration}: {line}", flush=True)


class RerunReport(Hook):
    """--rerun-mode report_stats: prints at the end which results changed."""

    def on_exit(self, iteration: int) -> None:
        """Prints the lines of this rank."""
        for line in get_rerun_state_machine().report():
            print(line, flush=True)
