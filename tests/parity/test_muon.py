"""Layouts of models that Muon trains with its default --muon-tp-mode, against one process in float64; and a bug that
they notice."""

import pytest
from parity.cells import Cell, cell_of
from parity.compare import TOLERANCE, Verdict, judge
from parity.layouts import layout
from parity.program import Precision, train
from support.pool import Pool

from megatron.core.optimizer import muon

MUON = Precision({}, {"optimizer": "muon", "muon_extra_scale_factor": 0.2, "lr": 1e-3})
LLAMA = cell_of("llama-gqa/one/per-token").model
EXPERTS = cell_of("moe-aux/one/per-token").model
STEPS = 3

CELLS = [
    Cell(LLAMA, layout("sp2", "dp2-optim")),
    Cell(EXPERTS, layout("pp2", "dp2-optim_grads_params", "ep2")),
]
SLOW_CELLS = [
    Cell(LLAMA, layout("tp2", "pp2-interleaved", "dp2-optim_grads")),
    Cell(LLAMA, layout("cp2-p2p", "dp4-hybrid")),
    Cell(EXPERTS, layout("sp2", "dp2-optim", "etp2")),
]


def compare(pool: Pool, cell: Cell, planted: bool = False) -> Verdict:
    (expected,) = pool.run(train, 1, cell.alone, STEPS, "cpu", MUON)
    function = train_with_a_bug if planted else train
    return judge(expected, pool.run(function, cell.layout.ranks, cell, STEPS, "cpu", MUON))


def train_with_a_bug(*args: object) -> object:
    """Sends the parts of matrices to their owners in another order than the owners expect."""
    owned = muon._owned
    muon._owned = lambda items, rank: owned(items, rank)[::-1]  # type: ignore[assignment]
    try:
        return train(*args)  # type: ignore[arg-type]
    finally:
        muon._owned = owned


@pytest.mark.parametrize(
    "cell",
    [*CELLS, *(pytest.param(cell, marks=pytest.mark.slow) for cell in SLOW_CELLS)],
    ids=lambda cell: cell.name,
)
def test_layout(pool: Pool, cell: Cell) -> None:
    assert not compare(pool, cell).beyond(TOLERANCE)


def test_a_planted_bug_is_noticed(pool: Pool) -> None:
    assert compare(pool, CELLS[0], planted=True).beyond(TOLERANCE)
