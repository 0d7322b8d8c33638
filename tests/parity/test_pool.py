"""The pool: calls of some ranks, failures that name themselves, a new world after one, nothing left behind."""

import os
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from support.pool import Pool

from megatron.core.utils.torch_groups import create_group_among_members


@pytest.fixture(scope="module")
def small() -> Iterator[Pool]:
    with Pool(3, seconds=3.0) as pool:
        yield pool


def sum_of_ranks(offset: float) -> tuple[float, int]:
    group = create_group_among_members([0, 1])
    total = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(total, group=group)
    dist.destroy_process_group(group)
    return float(total), os.getpid()


def fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("what rank 1 has to say")
    dist.barrier()  # for which it would wait long


def hang_on_one() -> None:
    if dist.get_rank() == 0:
        time.sleep(60)


def test_processes_live_through_calls(small: Pool) -> None:
    first = small.run(sum_of_ranks, 2, 0.5)
    again = small.run(sum_of_ranks, 2, 1.5)
    assert [total for total, _ in first] == [2.0, 2.0] and [total for total, _ in again] == [4.0, 4.0]
    assert [process for _, process in first] == [process for _, process in again]


def test_a_failure_names_rank_and_cause_and_the_next_call_has_a_new_world(small: Pool) -> None:
    begun = time.monotonic()
    with pytest.raises(AssertionError, match=r"rank 1: Traceback(.|\n)*what rank 1 has to say"):
        small.run(fail_on_one, 3)
    assert time.monotonic() - begun < 20
    starts = small.starts
    assert [total for total, _ in small.run(sum_of_ranks, 2, 0.5)] == [2.0, 2.0]
    assert small.starts == starts + 1


def test_a_hang_is_shown_where_it_is(small: Pool) -> None:
    with pytest.raises(AssertionError, match=r"rank 0: no answer(.|\n)*hang_on_one"):
        small.run(hang_on_one, 2)


def test_closing_leaves_nothing(small: Pool) -> None:
    processes = [process for _, process in small.run(sum_of_ranks, 2, 0.5)]
    small.close()
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
