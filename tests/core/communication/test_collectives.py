"""Collectives: nothing to do for a group of one, and pending results."""

import weakref

import pytest
import torch
from support.processes import run_on_ranks

from megatron.core.communication.collectives import (
    HostCopy,
    Pending,
    PlannedGroup,
    all_gather,
    all_reduce,
    all_to_all_rows,
    averages_in_collective,
    barrier,
    broadcast,
    gather_rows,
    group_rank,
    group_ranks,
    group_size,
    numbers_of_ranks,
    reduce_scatter_rows,
    start_gather_rows,
    start_reduce_scatter_rows,
)
from megatron.core.communication.traffic import recorded


def test_a_group_of_none_is_this_rank_alone() -> None:
    assert (group_size(None), group_rank(None), group_ranks(None)) == (1, 0, (0,))
    x = torch.arange(6.0).view(3, 2)
    with recorded() as traffic:
        assert all_reduce(x, None) is x and broadcast(x, None) is x
        assert gather_rows(x, None) is x and reduce_scatter_rows(x, None) is x and all_to_all_rows(x, None) is x
        assert all_gather(x, None) == [x]
        barrier()
    assert traffic == [] and not averages_in_collective(x, None)


def test_a_group_of_none_writes_to_the_output() -> None:
    x, out = torch.arange(4.0), torch.zeros(4)
    assert start_gather_rows(x, None, out).wait() is out and torch.equal(out, x)
    out.zero_()
    assert start_reduce_scatter_rows(x, None, out).wait() is out and torch.equal(out, x)
    assert start_gather_rows(x, None, x).wait() is x


def test_a_planned_group_knows_its_ranks_and_does_not_communicate() -> None:
    group = PlannedGroup((2, 5, 7), 1)
    assert (group_size(group), group_rank(group), group_ranks(group)) == (3, 1, (2, 5, 7))
    with pytest.raises(AssertionError, match="cannot communicate"):
        all_reduce(torch.ones(1), group)
    x = torch.ones(1)
    assert all_reduce(x, PlannedGroup((4,), 0)) is x


class Work:
    """A communication that ends when it is told to, or fails."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        if self.fails:
            raise RuntimeError("Connection closed by peer")


@pytest.mark.parametrize("fails", [False, True])
def test_a_pending_result_keeps_its_inputs_until_it_was_waited_for(fails: bool) -> None:
    result, inputs = torch.ones(3), torch.ones(3)
    alive = weakref.ref(inputs)
    pending = Pending(result, Work(fails), inputs)  # type: ignore[arg-type]
    del inputs
    assert alive() is not None and not pending.is_done()
    if fails:
        with pytest.raises(RuntimeError, match="closed by peer"):
            pending.wait()
        return
    assert pending.wait() is result and pending.is_done() and alive() is None
    assert pending.wait() is result


def test_a_result_without_work_is_there() -> None:
    x = torch.ones(1)
    assert Pending(x, None).is_done() and Pending(x, None).wait() is x


def test_a_host_copy_of_a_host_tensor_is_the_tensor() -> None:
    x = torch.arange(3)
    assert HostCopy(x).wait() is x


def numbers_on_rank() -> list[list[float]]:
    rank = torch.distributed.get_rank()
    return numbers_of_ranks([rank + 0.5, 1e-300 * rank])


def test_numbers_of_all_ranks() -> None:
    assert numbers_of_ranks([1.5]) == [[1.5]]
    assert run_on_ranks(numbers_on_rank, 3) == [[[0.5, 0.0], [1.5, 1e-300], [2.5, 2e-300]]] * 3
