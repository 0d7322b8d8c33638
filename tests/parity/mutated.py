"""Runs a cell with the `megatron` package that is first on the path, a copy with a planted bug.

    python -m parity.mutated CELL

prints a JSON object: the results of one process, those of the cell's ranks, and the differences between them.
"""

import json
import multiprocessing
import sys
from typing import Any

import torch
from parity.cells import Cell, cell_of
from parity.compare import TOLERANCE, judge
from parity.evidence import Evidence
from parity.program import FLOAT64, train
from parity.reference import reference
from support.pool import Pool

LONG = 6
"""Number of steps within which the loss must fall."""


def mean_losses(ranks: list[Evidence]) -> list[float]:
    """Returns the loss per token of each step with tokens, over all ranks that have a loss."""
    means = []
    for steps in zip(*([*rank.steps, *rank.further] for rank in ranks), strict=True):
        sums = torch.stack([part for step in steps for part in step.losses.values()]).sum(0)
        if sums[1] > 0:
            means.append(float(sums[0] / sums[1]))
    return means


def examine(cell: Cell) -> dict[str, Any]:
    """Trains one process and the cell's ranks with the package on the path, and compares both with the reference."""
    torch.set_num_threads(1)
    steps = cell.model.steps
    with Pool(cell.layout.ranks, context=multiprocessing.get_context("fork")) as pool:
        ranks = pool.run(train, cell.layout.ranks, cell, steps, "cpu", FLOAT64, False, LONG - steps)
    expected = reference(cell.model, cell.per_token, steps, cell.rows, layers=cell.layers)
    single = train(cell.alone, steps)
    return {
        "product": [m.__file__ for name, m in sys.modules.items() if name.startswith("megatron.") and m.__file__],
        "one process": judge(expected, [single]).beyond(TOLERANCE),
        "norms of one process": [step.norm for step in single.steps],
        "losses of one process": mean_losses([single]),
        "losses": mean_losses(ranks),
        "finite": all(rank.is_finite for rank in ranks),
        "differences": judge(expected, ranks).beyond(TOLERANCE),
    }


if __name__ == "__main__":
    print(json.dumps(examine(cell_of(sys.argv[1]))))
