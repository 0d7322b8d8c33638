"""The straggler detector: one object, nothing measured while it is off, ranks compared in the report."""

import re
import time
from collections.abc import Iterator

import pytest
from support.processes import run_on_ranks

from megatron.core.exceptions import UserError
from megatron.core.utils import StragglerDetector


@pytest.fixture
def detector() -> Iterator[StragglerDetector]:
    yield StragglerDetector()
    StragglerDetector().configure(1, 0)


def test_it_is_off_until_it_is_enabled(detector: StragglerDetector) -> None:
    assert detector is StragglerDetector() and not detector.enabled
    with detector(bdata=True):
        pass
    with pytest.raises(KeyError), detector:  # an exception passes through
        raise KeyError
    assert detector.report() is None and detector.elapsed() == (0.0, 0.0)
    with pytest.raises(UserError, match="straggler_minmax_count 0"):
        detector.configure(2, 0, mmcnt=0)


def test_it_averages_forward_steps_and_fetches(detector: StragglerDetector) -> None:
    detector.configure(1, 0, enabled=True)
    assert detector.report() == "stragglers: nothing was measured"
    for _ in range(2):
        with detector:
            with detector(bdata=True):
                time.sleep(0.01)
            with detector:  # a part of the outer one
                time.sleep(0.01)
    forward, fetch = detector.elapsed()
    assert forward >= 0.02 and 0.01 <= fetch < forward and len(detector._measured.forward) == 2
    line = detector.report(total_flops=10.0, log_interval=5)
    assert line is not None and "forward step: fastest rank 0" in line and "2.000e+00 floating point" in line
    assert detector.elapsed() == (0.0, 0.0)


def _slow_rank() -> str | None:
    import torch.distributed as dist

    detector = StragglerDetector()
    detector.configure(dist.get_world_size(), dist.get_rank(), enabled=True)
    with detector:
        time.sleep(0.3 * dist.get_rank())
    return detector.report()


def test_the_slow_rank_is_named() -> None:
    line, other = run_on_ranks(_slow_rank, 2)
    assert other is None and line is not None and "fastest rank 0" in line
    slowest = re.search(r"slowest rank 1 ([\d.]+) ms", line)
    assert slowest is not None and float(slowest[1]) >= 300  # more on a busy machine
