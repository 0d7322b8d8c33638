"""Any layout, the same model: every cell against one process, in float64."""

import pytest
from parity.cells import Cell, quick_cells, slow_cells
from parity.compare import TOLERANCE, judge
from parity.program import train
from parity.reference import reference
from support.pool import Pool

# One process of the test runner has the pool; loadgroup sends them all to it.
pytestmark = pytest.mark.xdist_group("parity")


def disagreements(pool: Pool, cell: Cell, steps: int = 3) -> list[str]:
    """In what a cell differs from one process; nothing where it is right."""
    ranks = pool.run(train, cell.layout.ranks, cell, steps)
    # Under the loss per token it does not matter how samples are cut into micro-batches: the reference has one each.
    rows = 1 if cell.per_token else cell.model.rows
    return judge(reference(cell.model, cell.per_token, steps, rows), ranks).beyond(TOLERANCE)


@pytest.mark.parametrize("cell", quick_cells(), ids=lambda cell: cell.name)
def test_layout(pool: Pool, cell: Cell) -> None:
    assert not disagreements(pool, cell)


@pytest.mark.slow
@pytest.mark.parametrize("cell", slow_cells(), ids=lambda cell: cell.name)
def test_layout_of_the_whole_product(pool: Pool, cell: Cell) -> None:
    assert not disagreements(pool, cell)
