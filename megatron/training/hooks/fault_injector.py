"""--fault-injector-fault-types: injects a fault on some ranks after some time."""

import ctypes
import os
import random
import signal
import threading
import time
from collections.abc import Callable

from megatron.training.config.resilience import FaultInjectorConfig
from megatron.training.hooks.hook import Hook

_SIGNALS = {
    "crash": signal.SIGABRT,
    "segfault": signal.SIGSEGV,
    "sigint": signal.SIGINT,
    "sigterm": signal.SIGTERM,
    "sigkill": signal.SIGKILL,
    "sigstop": signal.SIGSTOP,
}


class FaultInjector(Hook):
    """Injects one fault into this process if its rank is among those that get the fault. All ranks draw the same random
    numbers. `exception` and `hang` take effect when the current step ends, the other faults at once.
    """

    def __init__(self, flags: FaultInjectorConfig, rank: int, world_size: int, seed: int) -> None:
        draw = random.Random(flags.fault_injector_seed if flags.fault_injector_seed is not None else seed)
        self.fault = draw.choices(flags.faults, flags.weights)[0]
        count = min(flags.fault_injector_num_ranks or 1, world_size)
        self.ranks = flags.ranks or tuple(sorted(draw.sample(range(world_size), count)))
        mean, fixed = flags.fault_injector_mtti_seconds, flags.fault_injector_fault_delay
        drawn = draw.expovariate(1.0 / mean) if mean else 0.0
        self.delay = fixed if fixed is not None else drawn + (flags.fault_injector_offset_seconds or 0.0)
        self.start_iteration = flags.fault_injector_delay_start_iteration
        self.rank = rank
        self._timer: threading.Timer | None = None
        self._in_training_thread: Callable[[], None] | None = None

    def on_start(self, iteration: int) -> None:
        """Starts the timer of the fault, unless a later iteration starts it."""
        if self.start_iteration is None:
            self._begin(iteration)

    def after_step(self, iteration: int) -> None:
        """Starts the timer of the fault at its iteration. Raises or hangs if such a fault is due."""
        if self._in_training_thread is not None:
            self._in_training_thread()
        if iteration == self.start_iteration:
            self._begin(iteration)

    def _begin(self, iteration: int) -> None:
        if self.rank in self.ranks and self._timer is None:
            text = (
                f"fault injector: rank {self.rank}: {self.fault} {self.delay:.1f} seconds after iteration {iteration}"
            )
            print(text, flush=True)
            self._timer = threading.Timer(self.delay, self._inject)
            self._timer.daemon = True
            self._timer.start()

    def _inject(self) -> None:
        print(f"fault injector: rank {self.rank}: {self.fault} now", flush=True)
        if self.fault in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[self.fault])
        elif self.fault == "lock_gil":
            ctypes.PyDLL(None).sleep(1 << 30)  # a call through PyDLL keeps the lock
        else:
            self._in_training_thread = _hang if self.fault == "hang" else _fail

    def on_exit(self, iteration: int) -> None:
        """Cancels a fault that has not been injected yet."""
        if self._timer is not None:
            self._timer.cancel()


def _fail() -> None:
    raise RuntimeError("--fault-injector-fault-types exception: injected on purpose")


def _hang() -> None:
    while True:
        time.sleep(3600.0)
