"""Which models are tried in which layouts: generated, so that none is forgotten.

Every pair of values along two dimensions is met by some cell, the models being a dimension too; every larger or special
value is met alone; every model meets every value in the slow half.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from parity.layouts import DIMENSIONS, FURTHER, PIPELINE_BEFORE_DATA, Choice, Layout, dimension_of, layout
from parity.models import MODELS, Model
from parity.mutations import MUTATIONS

WORLD = 8
LOSSES = ("per-token", "default")
"""Sum over sum of the global batch, or mean over micro-batches."""


Pair = tuple[tuple[str, str], tuple[str, str]]
"""Two dimensions and a value along each."""


@dataclass(frozen=True)
class Cell:
    """A model in a layout, under one of the two losses."""

    model: Model
    layout: Layout
    loss: str = "per-token"

    @property
    def name(self) -> str:
        return f"{self.model.name}/{self.layout.name}/{self.loss}"

    @property
    def per_token(self) -> bool:
        return self.loss == "per-token"

    @property
    def values(self) -> dict[str, str]:
        """What it has along each dimension, model and loss included."""
        own = {dimension: getattr(self.layout, dimension).name for dimension in DIMENSIONS}
        return {**own, "model": self.model.name, "loss": self.loss}

    @property
    def pairs(self) -> list[Pair]:
        """Every two of its values."""
        return list(itertools.combinations(sorted(self.values.items()), 2))

    @property
    def fits(self) -> bool:
        return self.layout.ranks <= WORLD and self.layout.misfit(self.model) is None

    def __hash__(self) -> int:
        return hash(self.name)


def all_combinations() -> Iterator[Cell]:
    """Every model in every layout of the dimensions that eight ranks hold, under each loss."""
    for choices in itertools.product(*DIMENSIONS.values()):
        whole = Layout(*choices)
        for model, loss in itertools.product(MODELS, LOSSES):
            cell = Cell(model, whole, loss)
            if cell.fits:
                yield cell


@cache
def covering_cells() -> tuple[Cell, ...]:
    """Few cells that meet all pairs: always the one that meets most of what is left, the one of fewest ranks first."""
    candidates = sorted(all_combinations(), key=lambda cell: (cell.layout.ranks, cell.name))
    bits: dict[Pair, int] = {}
    met = [sum(1 << bits.setdefault(pair, len(bits)) for pair in cell.pairs) for cell in candidates]
    left, chosen = (1 << len(bits)) - 1, []
    while left:
        best = max(range(len(candidates)), key=lambda number: (met[number] & left).bit_count())
        chosen.append(candidates[best])
        left &= ~met[best]
    return tuple(chosen)


def further_cells() -> Iterator[Cell]:
    """The larger and the special values, each alone or as it is most likely to be wrong, with models in turn."""
    models = itertools.cycle(MODELS)
    losses = itertools.cycle(LOSSES)

    def fitting(*names: str, order: str = Layout.order) -> Cell:
        cells = (Cell(next(models), layout(*names, order=order), next(losses)) for _ in MODELS)
        return next(cell for cell in cells if cell.fits)

    for choices in FURTHER.values():
        for value in choices:
            yield fitting(value.name)
    for names in FURTHER_TOGETHER:
        yield fitting(*names)
    yield fitting("tp2", "pp2", "dp2", order=PIPELINE_BEFORE_DATA)
    yield fitting("cp2-p2p", "pp2", "dp2-optim", order=PIPELINE_BEFORE_DATA)


FURTHER_TOGETHER = [
    ("sp2", "pp2", "cp2-p2p"),
    ("tp2", "pp2-interleaved", "cp2-a2a"),
    ("sp2", "pp2-zb-h1", "cp2-all_gather"),
    ("sp2", "cp4-levels"),
    ("tp2", "cp4-a2a"),
    ("tp4", "cp2-p2p"),
    ("sp4", "pp2-zb-v"),
    ("pp4-layout", "dp2-optim_grads_params"),
    ("tp2", "dp4-optim"),
    ("pp4", "cp2-p2p"),
    ("pp2-zb-v", "cp4-p2p"),
    ("sp2", "pp4-zb-h1"),
    ("sp2", "cp2-p2p", "recompute-all-parts"),
    ("pp2-zb-h1", "dp2-optim_grads_params", "recompute-all-parts"),
    ("tp2", "dp2-optim_grads_params", "recompute-norms"),
    ("cp2-by-layer", "dp4-hybrid"),
    ("pp4-zb-v", "dp2-optim_grads"),
    ("pp2-variable", "sp2", "cp2-a2a"),
]


def with_each_model(cells: Iterable[Cell]) -> Iterator[Cell]:
    """The layouts of some cells with all models."""
    for cell in cells:
        for number, model in enumerate(MODELS):
            other = Cell(model, cell.layout, LOSSES[number % 2])
            if other.fits:
                yield other


def singles_and_pairs() -> Iterator[Cell]:
    """Each value alone and every two together."""
    values = [value for choices in DIMENSIONS.values() for value in choices[1:]]
    for value in values:
        yield Cell(MODELS[0], layout(value.name))
    for first, second in itertools.combinations(values, 2):
        if dimension_of(first) != dimension_of(second):
            yield Cell(MODELS[0], layout(first.name, second.name))


@cache
def quick_cells() -> tuple[Cell, ...]:
    """For every run of the tests: what covers all pairs, what is special, and what catches each planted bug."""
    return tuple(dict.fromkeys([*covering_cells(), *further_cells(), *map(cell_of, names_of_catchers())]))


def names_of_catchers() -> list[str]:
    """Cells that are to catch a planted bug, by name."""
    return [mutation.caught_by for mutation in MUTATIONS]


def cell_of(name: str) -> Cell:
    """The cell of a name."""
    model, choices, loss = name.split("/")
    return Cell(next(m for m in MODELS if m.name == model), layout(*choices.split("+")), loss)


@cache
def slow_cells() -> tuple[Cell, ...]:
    """The rest: every value and every two values, larger and special ones, with all models."""
    every = with_each_model([*singles_and_pairs(), *further_cells()])
    quick = set(quick_cells())
    return tuple(dict.fromkeys(cell for cell in every if cell not in quick))


def values_of(cells: Iterable[Cell]) -> set[Choice]:
    """All choices that some cells make."""
    return {value for cell in cells for value in cell.layout.choices}
