"""A sharded tensor says where it is, and refuses to contradict itself."""

import pytest
import torch

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.exceptions import UserError

WHOLE = torch.arange(4 * 6).view(4, 6)


def part(row: int, column: int, rows: int = 2, columns: int = 3, **fields) -> ShardedTensor:
    data = WHOLE[row * rows : (row + 1) * rows, column * columns : (column + 1) * columns]
    return ShardedTensor.from_rank_offsets("w", data, (0, row, 4 // rows), (1, column, 6 // columns), **fields)


def test_a_part_of_a_grid():
    sharded = part(1, 0)
    assert (sharded.local_shape, sharded.global_shape, sharded.global_offset) == ((2, 3), (4, 6), (2, 0))
    assert sharded.axis_fragmentations == (2, 2) and sharded.has_regular_grid
    assert torch.equal(WHOLE[sharded.global_slice()], sharded.data)
    assert sharded.local_chunk_offset_in_global() == (1, 0) and sharded.max_allowed_chunks() == (2, 2)


def test_prepended_axes_stand_before_the_local_ones():
    stacked = torch.arange(5 * 2 * 3).view(5, 2, 3)
    sharded = ShardedTensor.from_rank_offsets("w", stacked[3], (0, 3, 5), prepend_axis_num=1)
    assert (sharded.local_shape, sharded.global_shape, sharded.global_offset) == ((2, 3), (5, 2, 3), (3, 0, 0))
    assert sharded.global_slice()[0] == 3 and torch.equal(stacked[sharded.global_slice()], stacked[3])
    assert sharded.local_chunk_offset_in_global() == (3, 0, 0) and sharded.max_allowed_chunks() == (5, 1, 1)


def test_parts_without_a_grid_are_counted_by_size():
    sharded = ShardedTensor("w", None, torch.float32, (3,), (10,), (3,), None)
    assert not sharded.has_regular_grid and sharded.max_allowed_chunks() == (4,)
    uneven = ShardedTensor("w", None, torch.float32, (3,), (10,), (7,), None)
    with pytest.raises(UserError, match=r"\(7,\) is not a multiple of the size \(3,\)"):
        uneven.local_chunk_offset_in_global()


def test_without_and_with_data():
    empty = part(0, 1).without_data()
    assert empty.data is None and empty.global_offset == (0, 3)
    empty.init_data("cpu", torch.zeros)
    assert empty.data.shape == (2, 3) and empty.data.dtype == torch.int64
    ranged = ShardedTensor("w", None, torch.float32, (2, 3), (2, 3), (0, 0), None, flattened_range=slice(1, 5))
    ranged.init_data("cpu")
    assert ranged.data.shape == (4,)


def test_narrowing_narrows_the_whole_alike():
    first, second = (part(row, 1).narrow(0, 1, 1)[0] for row in (0, 1))
    narrowed = WHOLE[1::2]  # the second row of each part
    for sharded in (first, second):
        assert sharded.global_shape == (2, 6) and torch.equal(narrowed[sharded.global_slice()], sharded.data)
    columns = part(1, 1).narrow(1, 0, 2)[0]
    assert columns.global_shape == (4, 4) and columns.global_offset == (2, 2) and columns.data.shape == (2, 2)


def test_narrowing_a_flattened_range():
    local = WHOLE[2:4]  # 2 rows of 6
    sharded = ShardedTensor.from_rank_offsets(
        "w", local.reshape(-1)[4:11], (0, 1, 2), flattened_range=slice(4, 11), local_shape=(2, 6)
    )
    (lower,) = sharded.narrow(0, 1, 1)
    assert lower.flattened_range == slice(0, 5) and torch.equal(lower.data, WHOLE[3, :5])
    assert (lower.global_shape, lower.global_offset) == ((2, 6), (1, 0))
    assert (
        ShardedTensor("w", None, torch.int64, (2, 6), (4, 6), (0, 0), None, flattened_range=slice(0, 5)).narrow(0, 1, 1)
        == []
    )
    with pytest.raises(UserError, match="in its first dimension only"):
        sharded.narrow(1, 0, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"global_offset": (3, 0)}, "not inside"),
        ({"global_offset": (0,)}, "different lengths"),
        ({"axis_fragmentations": (2,)}, "axis_fragmentations"),
        ({"data": torch.zeros(3, 2)}, r"data has shape \(3, 2\), not \(2, 3\)"),
        ({"data": torch.zeros(2, 3, dtype=torch.float64)}, "data has dtype"),
        ({"flattened_range": slice(0, 7)}, "not inside 6 elements"),
        ({"flattened_range": slice(0, 4, 2)}, "no step"),
    ],
)
def test_contradictions_are_named(fields, message):
    whole = {"data": None, "dtype": torch.float32, "local_shape": (2, 3), "global_shape": (4, 6)}
    with pytest.raises(UserError, match=f"ShardedTensor w: .*{message}"):
        ShardedTensor("w", **(whole | {"global_offset": (2, 0), "axis_fragmentations": None} | fields))
