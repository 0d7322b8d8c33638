"""Chunks: ranges of canonical elements and the tensors that hold them."""

import pytest
import torch

from megatron.core.dist_checkpointing.chunk import Chunk, is_optimizer_state, optimizer_state_name
from megatron.core.parameters import Box


def test_a_part_is_a_view_of_the_tensor() -> None:
    tensor = torch.arange(6.0)
    chunk = Chunk("w", (4, 6), Box((2, 0), (2, 6)), (3, 9), tensor)
    part = chunk.part(1, 3)
    assert part.range == (4, 6) and part.flat.tolist() == [1.0, 2.0]
    part.flat.zero_()
    assert tensor.tolist() == [0.0, 0.0, 0.0, 3.0, 4.0, 5.0]
    assert Chunk("w", (4, 6), Box((2, 0), (2, 6)), None, torch.zeros(2, 6)).range == (0, 12)


@pytest.mark.parametrize(
    ("box", "flat_range", "elements"), [(Box((3, 0), (2, 6)), None, 12), (Box((0, 0), (1, 6)), (0, 7), 7)]
)
def test_a_chunk_lies_inside_its_tensor(box: Box, flat_range: tuple[int, int] | None, elements: int) -> None:
    with pytest.raises(AssertionError):
        Chunk("w", (4, 6), box, flat_range, torch.zeros(elements))


def test_names_of_optimizer_state() -> None:
    name = optimizer_state_name("exp_avg", "a.weight")
    assert name == "optimizer.exp_avg.a.weight" and is_optimizer_state(name) and not is_optimizer_state("a.weight")
