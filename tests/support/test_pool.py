"""The pool runs calls on some ranks, reports failures by rank, starts anew after one, and leaves nothing behind."""

import os
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from support.pool import Pool
from support.processes import run_on_ranks

from megatron.core.utils.torch_groups import create_group_among_members


@pytest.fixture(scope="module")
def small() -> Iterator[Pool]:
    with Pool(3, patience=3.0) as pool:
        yield pool


def sum_of_ranks(offset: float) -> tuple[float, int]:
    group = create_group_among_members([0, 1])
    total = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(total, group=group)
    dist.destroy_process_group(group)
    return float(total), os.getpid()


def fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("message of rank 1")
    dist.barrier()  # rank 1 never calls it


def die_on_one() -> None:
    if dist.get_rank() == 1:
        os._exit(3)


def hang_on_one() -> None:
    if dist.get_rank() == 0:
        threading.Event().wait()


def test_processes_are_kept_between_calls(small: Pool) -> None:
    first = small.run(sum_of_ranks, 2, 0.5)
    again = small.run(sum_of_ranks, 2, 1.5)
    assert [total for total, _ in first] == [2.0, 2.0] and [total for total, _ in again] == [4.0, 4.0]
    assert [process for _, process in first] == [process for _, process in again]


def test_a_failure_names_rank_and_cause_and_the_next_call_has_a_new_world() -> None:
    with Pool(3, patience=0.3) as pool:
        before = pool.run(sum_of_ranks, 2, 0.5)
        with pytest.raises(AssertionError, match=r"rank 1: Traceback(.|\n)*message of rank 1"):
            pool.run(fail_on_one, 3)
        starts = pool.starts
        after = pool.run(sum_of_ranks, 2, 0.5)
        assert [total for total, _ in after] == [2.0, 2.0] and pool.starts == starts + 1
    assert not {process for _, process in before} & {process for _, process in after}


def test_a_rank_that_ends_is_named_with_its_exit_code(small: Pool) -> None:
    with pytest.raises(AssertionError, match="rank 1: ended without an answer, exit code 3"):
        small.run(die_on_one, 2)


def test_a_hang_is_reported_with_its_stack() -> None:
    with Pool(2, seconds=0.3) as pool, pytest.raises(AssertionError, match=r"rank 0: no answer(.|\n)*hang_on_one"):
        pool.run(hang_on_one, 2)


def change_everything() -> None:
    os.environ["LEFT_BY_A_TEST"] = "1"
    os.chdir("/")
    sys.argv = ["left"]
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)


def look_around() -> tuple[object, ...]:
    variables = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return variables, os.getcwd(), sys.argv, torch.get_default_dtype(), torch.initial_seed(), threading.active_count()


def test_a_new_world_does_not_inherit_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    before = run_on_ranks(look_around, 2)
    run_on_ranks(change_everything, 2)
    monkeypatch.setenv("LEFT_BY_A_TEST", "1")  # processes get the environment of the session
    assert run_on_ranks(look_around, 2) == before


def tensors() -> list[torch.Tensor]:
    grid = torch.arange(6.0).view(2, 3)
    kinds = [grid.to(dtype) for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.bool)]
    return [*kinds, grid.T, grid[:, 1:], torch.tensor(2.5), torch.empty(0, 3), grid.clone().requires_grad_()]


def test_tensors_are_returned_unchanged() -> None:
    (found,) = run_on_ranks(tensors, 1)
    for tensor, expected in zip(found, tensors(), strict=True):
        assert torch.equal(tensor, expected) and tensor.dtype == expected.dtype
        assert tensor.requires_grad == expected.requires_grad
