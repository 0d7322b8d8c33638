"""Hooks that watch the hardware: slow ranks, results that change when computed again, replicas that differ."""

from collections.abc import Sequence

from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.replica_check import differing_units
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


class ReplicaCheck(Hook):
    """Compares checksums of the weights after every `interval`-th step. The comparison waits for the device.

    Raises RuntimeError on each rank of the data parallel group; the error names the weights that differ, and the
    replicas.
    """

    def __init__(self, model: Sequence[DistributedDataParallel], interval: int) -> None:
        self.model = model
        self.interval = interval

    def after_step(self, iteration: int) -> None:
        """Compares the replicas if the interval divides the iteration."""
        if iteration % self.interval:
            return
        found = differing_units(self.model)
        if found:
            more = f" and of {len(found) - 1} more units" if len(found) > 1 else ""
            replicas = ", ".join(map(str, found[0].replicas))
            raise RuntimeError(
                f"after iteration {iteration} the weights of {found[0].unit}{more} differ between data parallel "
                f"replicas: replica {replicas} from most others; the hardware of its rank may be broken"
            )
