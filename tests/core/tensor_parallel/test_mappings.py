"""Moves between ranks that hold parts and ranks that hold all, and data for all of a group, by definition."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.pool import Pool
from torch import Tensor

from megatron.core import tensor_parallel as tp
from megatron.core.communication.collectives import PlannedGroup
from megatron.core.exceptions import UserError


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2) as pool:
        yield pool


def of(rank: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def parts(tensor: Tensor, dim: int, sizes: list[int] | None = None) -> tuple[Tensor, ...]:
    return tensor.split(sizes, dim) if sizes else tensor.chunk(2, dim)


def split(dim: int, sizes: list[int] | None = None) -> Callable[[int, list[Tensor]], Tensor]:
    return lambda rank, all_: parts(all_[rank], dim, sizes)[rank]


def joined(dim: int) -> Callable[[int, list[Tensor]], Tensor]:
    return lambda rank, all_: torch.cat(all_, dim)


def summed_part(dim: int, sizes: list[int] | None = None) -> Callable[[int, list[Tensor]], Tensor]:
    return lambda rank, all_: parts(sum(all_), dim, sizes)[rank]


def same(rank: int, all_: list[Tensor]) -> Tensor:
    return all_[rank]


def total(rank: int, all_: list[Tensor]) -> Tensor:
    return sum(all_)


UNEVEN = [1, 3]
# name: (move, what a rank gets of all ranks' tensors, what it gets of their gradients, rows of each rank's tensor)
MOVES: dict[str, tuple[Callable[..., Tensor], Any, Any, list[int]]] = {
    "copy": (tp.copy_to_tensor_model_parallel_region, same, total, [4, 4]),
    "reduce": (tp.reduce_from_tensor_model_parallel_region, total, same, [4, 4]),
    "scatter": (tp.scatter_to_tensor_model_parallel_region, split(-1), joined(-1), [4, 4]),
    "gather": (tp.gather_from_tensor_model_parallel_region, joined(-1), split(-1), [4, 4]),
    "gather, summed gradient": (
        tp.all_gather_last_dim_from_tensor_parallel_region,
        joined(-1),
        summed_part(-1),
        [4, 4],
    ),
    "scatter rows": (tp.scatter_to_sequence_parallel_region, split(0), joined(0), [4, 4]),
    "gather rows": (tp.gather_from_sequence_parallel_region, joined(0), summed_part(0), [4, 4]),
    "gather rows, whole gradient": (
        lambda x, group: tp.gather_from_sequence_parallel_region(x, False, group),
        joined(0),
        split(0),
        [4, 4],
    ),
    "gather uneven rows": (
        lambda x, group: tp.gather_from_sequence_parallel_region(x, True, group, UNEVEN),
        joined(0),
        summed_part(0, UNEVEN),
        UNEVEN,
    ),
    "gather uneven rows, whole gradient": (
        lambda x, group: tp.gather_from_sequence_parallel_region(x, False, group, UNEVEN),
        joined(0),
        split(0, UNEVEN),
        UNEVEN,
    ),
    "reduce-scatter rows": (tp.reduce_scatter_to_sequence_parallel_region, summed_part(0), joined(0), [4, 4]),
    "reduce-scatter uneven rows": (
        lambda x, group: tp.reduce_scatter_to_sequence_parallel_region(x, group, UNEVEN),
        summed_part(0, UNEVEN),
        joined(0),
        [4, 4],
    ),
    "all to all": (
        lambda x, group: tp.all_to_all(group, x),
        lambda rank, all_: torch.cat([part.chunk(2)[rank] for part in all_]),
        lambda rank, all_: torch.cat([part.chunk(2)[rank] for part in all_]),
        [4, 4],
    ),
    "all to all, uneven": (  # rank 0 sends 1 and 3 rows, rank 1 sends 2 and 2
        lambda x, group: tp.all_to_all(group, x, *(([1, 2], [1, 3]) if dist.get_rank() == 0 else ([3, 2], [2, 2]))),
        lambda rank, all_: torch.cat([all_[0].split([1, 3])[rank], all_[1].split([2, 2])[rank]]),
        lambda rank, all_: torch.cat([all_[0].split([1, 2])[rank], all_[1].split([3, 2])[rank]]),
        [4, 4],
    ),
}


def moved(name: str) -> str | None:
    move, expected, expected_gradient, rows = MOVES[name]
    rank = dist.get_rank()
    inputs = [of(r, rows[r], 3, 4) for r in range(2)]
    x = inputs[rank].clone().requires_grad_()
    output = move(x, group=dist.group.WORLD)
    want = [expected(r, inputs) for r in range(2)]
    gradients = [of(5 + r, *want[r].shape) for r in range(2)]
    (output * gradients[rank]).sum().backward()
    if not torch.equal(x.detach(), inputs[rank]):
        return "the input was changed"
    if not torch.allclose(output, want[rank], rtol=1e-14, atol=1e-14):
        return f"{output} is not {want[rank]}"
    wanted = expected_gradient(rank, gradients)
    if not torch.allclose(x.grad, wanted, rtol=1e-14, atol=1e-14):
        return f"gradient {x.grad} is not {wanted}"
    return None


@pytest.mark.parametrize("name", MOVES)
def test_move_and_its_gradient(name: str, pool: Pool) -> None:
    for rank, wrong in enumerate(pool.run(moved, 2, name)):
        assert wrong is None, (rank, wrong)


def test_uneven_shapes_are_named() -> None:
    with pytest.raises(UserError, match=r"a dimension of 3 \(shape \(3, 2\)\) is not divisible by 2 ranks"):
        tp.scatter_to_sequence_parallel_region(torch.zeros(3, 2), PlannedGroup((0, 1), 0))
    with pytest.raises(UserError, match="3 rows are not divisible by 2 ranks"):
        tp.reduce_scatter_to_sequence_parallel_region(torch.zeros(3, 2), PlannedGroup((0, 1), 0))


# ---------------------------------------------------------------------------------------------------------------------


def shared_data(right_type: bool) -> dict[str, Any]:
    rank = dist.get_rank()
    data = {"a": torch.arange(6).view(2, 3), "b": torch.arange(4) + 100, "scalar": torch.tensor(7)}
    if not right_type:
        data["b"] = data["b"].float()
    try:
        got = tp.broadcast_data(list(data), data if rank == 0 else None, torch.int64, dist.group.WORLD)
    except UserError as error:
        return {"error": str(error)}
    return {key: value.cpu().tolist() for key, value in got.items()}


def test_broadcast_data(pool: Pool) -> None:
    expected = {"a": [[0, 1, 2], [3, 4, 5]], "b": [100, 101, 102, 103], "scalar": 7}
    assert pool.run(shared_data, 2, True) == [expected] * 2
    assert pool.run(shared_data, 2, False) == [{"error": "not torch.int64: b"}] * 2  # nobody waits for ever


@pytest.mark.parametrize("name", [name for name in MOVES if "uneven" not in name])
def test_moves_are_the_identity(name: str) -> None:
    move = MOVES[name][0]
    x = torch.arange(12.0).view(3, 4).requires_grad_()
    move(x, group=None).sum().backward()
    assert torch.equal(move(x, group=None), x) and x.grad is not None and (x.grad == 1).all()
