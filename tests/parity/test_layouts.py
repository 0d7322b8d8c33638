"""Every cell computes what one process computes, in float64."""

import pytest
import torch
from parity.cells import Cell, cell_of, quick_cells, slow_cells
from parity.compare import TOLERANCE, judge
from parity.program import Precision, train
from parity.reference import reference
from support.pool import Pool


def disagreements(pool: Pool, cell: Cell, steps: int) -> list[str]:
    """Returns the differences between a cell and one process; empty if the cell is right."""
    ranks = pool.run(train, cell.layout.ranks, cell, steps)
    return judge(
        reference(cell.model, cell.per_token, steps, rows_of_reference(cell), layers=cell.layers), ranks
    ).beyond(TOLERANCE)


def rows_of_reference(cell: Cell) -> int:
    """Returns the rows of the reference's micro-batches. With the per-token loss they do not matter, so all cells of a
    model have one reference; that of packed rows has one sample in a row."""
    if not cell.per_token or cell.model.couples_tokens:
        return cell.rows
    return 1 if cell.model.packed else cell.model.rows


@pytest.mark.parametrize("cell", quick_cells(), ids=lambda cell: cell.name)
def test_layout(pool: Pool, cell: Cell) -> None:
    assert not disagreements(pool, cell, cell.model.steps)


IN_FLOAT32 = [
    "llama-gqa/tp2/per-token",
    "gemma/cp2-p2p/default",
    "moe-aux/dp2+ep2/default",
    "deepseek/sp2+recompute-latents/default",
]
SLOW_IN_FLOAT32 = [
    "mla-packed/tp2/default",
    "moe-bias/sp2/default",
    "moe-capacity/cp2-p2p/per-token",
    "mtp-packed/cp2-p2p/default",
]
LR = 3e-4
"""Small enough that steps do not amplify rounding."""


@pytest.mark.parametrize(
    "name", [*IN_FLOAT32, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_IN_FLOAT32)]
)
def test_layout_in_float32(pool: Pool, name: str) -> None:
    cell, precision = cell_of(name), Precision({"params_dtype": torch.float32}, {"lr": LR})
    ranks = pool.run(train, cell.layout.ranks, cell, 3, "cpu", precision)
    # Initial values are float32 here and float64 in the reference, so they are not compared to the bit.
    expected = reference(cell.model, cell.per_token, rows=cell.rows, lr=LR, layers=cell.layers)
    assert not judge(expected, ranks, to_the_bit=False).beyond(1e-5)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Finds the cells of `test_slow_layout`, which takes seconds, unless slow tests are left out."""
    if metafunc.function is test_slow_layout:
        cells = () if "not slow" in metafunc.config.getoption("-m") else slow_cells()
        metafunc.parametrize("cell", cells, ids=lambda cell: cell.name)


@pytest.mark.slow
def test_slow_layout(pool: Pool, cell: Cell) -> None:
    assert not disagreements(pool, cell, steps=3)
