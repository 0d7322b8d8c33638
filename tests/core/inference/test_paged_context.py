"""Pages: what rows see, what padding writes, what is cleared. `test_engine` has states in slots."""

import pytest
import torch

from megatron.core.exceptions import UserError
from megatron.core.inference.paged_context import PagedInferenceContext, RowPart

CPU = torch.device("cpu")


def numbered(length: int, rows: int, first: int = 0) -> torch.Tensor:
    """[s, b, 1, 1] with distinct numbers."""
    return (torch.arange(length * rows) + first + 1).view(length, rows, 1, 1).float()


def test_rows_see_their_own_pages_in_order() -> None:
    context = PagedInferenceContext(8, 2, 3, 6)
    rows = [RowPart(0, 0, (1,), (5,)), RowPart(2, 0, (2, 3, 4), (3, 1))]
    tokens, positions = context.begin(rows, CPU)
    assert tokens.tolist() == [[1, 0, 0], [2, 3, 4]] and positions.tolist() == [[0, 1, 2]] * 2
    assert context.padding.tolist() == [[False, True, True], [False] * 3]
    key = numbered(3, 2)
    seen = context.extend(1, key, key + 100)
    assert seen.key is key and seen.query_positions is None
    assert context.select_last(key[:, :, 0]).flatten().tolist() == [1, 6]
    tokens, positions = context.begin([RowPart(2, 3, (9,), (3, 1)), RowPart(0, 1, (8,), (5,))], CPU)
    assert positions.tolist() == [[3], [1]]
    seen = context.extend(1, numbered(1, 2, 50), numbered(1, 2, 150))
    assert seen.query_positions is not None and seen.query_positions.tolist() == [[3], [1]]
    assert seen.key[:, 0].flatten().tolist() == [2, 4, 6, 51]
    assert seen.key[:, 1].flatten().tolist() == [1, 52, 0, 0], "page 0 stands for what a row does not have"
    assert seen.value[3, 0].item() == 151


def test_parts_of_prompts_beside_single_tokens() -> None:
    context = PagedInferenceContext(8, 2, 3, 6)
    context.begin([RowPart(0, 0, (1, 2), (1,))], CPU)
    context.extend(1, numbered(2, 1), numbered(2, 1))
    _, positions = context.begin([RowPart(0, 2, (3,), (1, 2)), RowPart(1, 0, (4, 5, 6), (3, 4))], CPU)
    assert positions.tolist() == [[2, 2, 2], [0, 1, 2]], "positions of padding are positions of the model"
    seen = context.extend(1, numbered(3, 2, 10), numbered(3, 2, 10))
    assert seen.key[:, 0].flatten().tolist() == [1, 2, 11] and seen.key[:, 1].flatten().tolist() == [12, 14, 16]
    assert int((context._pools[1, "attention"][0] != 0).sum()) == 6, "padding was written"


def test_pages_are_cleared() -> None:
    context = PagedInferenceContext(4, 2, 2, 4)
    context.begin([RowPart(0, 0, (1, 2, 3), (1, 3))], CPU)
    context.extend(1, numbered(3, 1) * float("nan"), numbered(3, 1))
    context.clear_pages([3, 1])
    keys, values = context._pools[1, "attention"]
    assert not keys.any() and not values.any() and context.bytes_per_token == 8


def test_masks_are_refused() -> None:
    with pytest.raises(UserError, match="leave it out"):
        PagedInferenceContext(4, 2, 2, 4).mask_of_call(torch.zeros(1, dtype=torch.bool))
