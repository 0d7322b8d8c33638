"""A handler that scripts with a loop of their own ask whether a signal came, on one rank or on any."""

import os
import signal

from support.pool import Pool
from torch import distributed as dist

from megatron.facades.dist_signal_handler import DistributedSignalHandler


def test_a_signal_is_remembered_and_handled_as_before_after_the_release() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with DistributedSignalHandler(signal.SIGUSR1) as handler:
        assert handler.signals_received() == [False]
        os.kill(os.getpid(), signal.SIGUSR1)
        assert handler.signals_received() == [True]
        assert handler.release() and not handler.release()
    assert signal.getsignal(signal.SIGUSR1) == before


def received_of_all() -> list[list[bool]]:
    with DistributedSignalHandler(signal.SIGUSR1) as handler:
        found = [handler.signals_received()]
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return [*found, handler.signals_received()]


def test_all_ranks_learn_of_it() -> None:
    with Pool(2) as pool:
        assert pool.run(received_of_all, 2) == [[[False, False], [False, True]]] * 2
