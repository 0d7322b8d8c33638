"""Layouts with experts in bfloat16 over gloo; tests/gpu/test_layouts.py runs all cells over nccl."""

from collections.abc import Iterator

import pytest
from parity.bfloat16 import BFLOAT16, OF_FORCED_CHOICES, STEPS, TOLERANCE, largest_difference
from parity.cells import Cell
from parity.mutated import mean_losses
from parity.program import train
from support.pool import Pool


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(max(cell.layout.ranks for cell in OF_FORCED_CHOICES)) as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize("cell", OF_FORCED_CHOICES, ids=lambda cell: cell.name)
def test_losses_of_experts_in_bfloat16(pool: Pool, cell: Cell) -> None:
    single = train(cell.alone, STEPS, "cpu", BFLOAT16, lean=True)
    ranks = pool.run(train, cell.layout.ranks, cell, STEPS, "cpu", BFLOAT16, True)
    assert 0 < largest_difference(mean_losses([single]), mean_losses(ranks), cell) < TOLERANCE
    dropped = [report.total > 0 for report in single.steps[0].reports if report.name == "moe_dropped"]
    assert all(dropped) and bool(dropped) == ("capacity" in cell.name)
