"""Which models are tried in which layouts: generated, so that none is forgotten.

Models of one family meet the same values. In the first, every pair of values along two dimensions is met by some cell,
the models being a dimension too; in the others, which change single parts of a layer, every model meets every value,
and so does every split of experts. Every larger or special value is met alone; every model meets every value in the
slow half.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from parity.families import FAMILIES, Family
from parity.layouts import DIMENSIONS, PIPELINE_BEFORE_DATA, Choice, Layout, dimension_of, layout
from parity.model_list import MODELS
from parity.models import Model
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

    def pairs(self, family: Family) -> list[Pair]:
        """Every two of its values that the family wants to meet."""
        every = itertools.combinations(sorted(self.values.items()), 2)
        return [(one, other) for one, other in every if family.wants_pair(one, other)]

    @property
    def fits(self) -> bool:
        return self.layout.ranks <= WORLD and self.layout.misfit(self.model) is None

    def __hash__(self) -> int:
        return hash(self.name)


def all_combinations(family: Family) -> Iterator[Cell]:
    """Every model of a family in every layout of its values that eight ranks hold, under each loss."""
    for choices in itertools.product(*family.dimensions.values()):
        whole = Layout(**dict(zip(family.dimensions, choices, strict=True)))
        if whole.ranks > WORLD:
            continue
        for model, loss in itertools.product(family.models, LOSSES):
            cell = Cell(model, whole, loss)
            if cell.fits:
                yield cell


@cache
def covering_cells(family: Family) -> tuple[Cell, ...]:
    """Few cells that meet all pairs: always the one that meets most of what is left, the one of fewest ranks first."""
    candidates = sorted(all_combinations(family), key=lambda cell: (cell.layout.ranks, cell.name))
    bits: dict[Pair, int] = {}
    met = [sum(1 << bits.setdefault(pair, len(bits)) for pair in cell.pairs(family)) for cell in candidates]
    left, chosen = (1 << len(bits)) - 1, []
    while left:
        best = max(range(len(candidates)), key=lambda number: (met[number] & left).bit_count())
        chosen.append(candidates[best])
        left &= ~met[best]
    return tuple(chosen)


def further_cells() -> Iterator[Cell]:
    """The larger and the special values, each alone or as it is most likely to be wrong, with models in turn."""
    for family in FAMILIES:
        yield from cells_of(family, family.further)


def cells_of(family: Family, layouts: Iterable[tuple[str, ...]]) -> Iterator[Cell]:
    """Layouts by the names of their values, the family's models in turn."""
    models = itertools.cycle(family.models)
    losses = itertools.cycle(LOSSES)

    def fitting(*names: str, order: str = Layout.order) -> Cell:
        cells = (Cell(next(models), layout(*names, order=order), next(losses)) for _ in family.models)
        return next(cell for cell in cells if cell.fits)  # the next one begins with the model after it

    for names in layouts:
        order = PIPELINE_BEFORE_DATA if "pp-before-dp" in names else Layout.order
        yield fitting(*(name for name in names if name != "pp-before-dp"), order=order)


def with_each_model(models: Iterable[Model], cells: Iterable[Cell]) -> Iterator[Cell]:
    """The layouts of some cells with all of these models."""
    models = list(models)
    for cell in cells:
        for number, model in enumerate(models):
            other = Cell(model, cell.layout, LOSSES[number % 2])
            if other.fits:
                yield other


def singles_and_pairs(family: Family) -> Iterator[Cell]:
    """Each value alone and every two together that the family wants to meet."""
    values = [value for choices in family.dimensions.values() for value in choices[1:]]
    for value in values:
        yield Cell(family.models[0], layout(value.name))
    for first, second in itertools.combinations(values, 2):
        if dimension_of(first) != dimension_of(second) and family.wants(dimension_of(first), dimension_of(second)):
            yield Cell(family.models[0], layout(first.name, second.name))


@cache
def quick_cells() -> tuple[Cell, ...]:
    """For every run of the tests: what covers all pairs (of the families that change single parts of a layer, as far as
    four ranks hold it), what is special, and what catches each planted bug."""
    whole, *parts = FAMILIES
    covering = [*covering_cells(whole), *(c for f in parts for c in covering_cells(f) if c.layout.ranks <= 4)]
    return tuple(dict.fromkeys([*covering, *further_cells(), *map(cell_of, names_of_catchers())]))


def names_of_catchers() -> list[str]:
    """Cells that are to catch a planted bug, by name."""
    return [mutation.caught_by for mutation in MUTATIONS]


def cell_of(name: str) -> Cell:
    """The cell of a name."""
    model, choices, loss = name.split("/")
    split = () if choices == "one" else choices.split("+")
    return Cell(next(m for m in MODELS if m.name == model), layout(*split), loss)


@cache
def slow_cells() -> tuple[Cell, ...]:
    """The rest: every value and every two values, larger and special ones, with all models of a family."""
    every = [
        cell
        for family in FAMILIES
        for special in [[*family.further, *family.rare]]
        for cell in (
            *covering_cells(family),
            *with_each_model(family.models, [*singles_and_pairs(family), *cells_of(family, special)]),
        )
    ]
    quick = set(quick_cells())
    return tuple(dict.fromkeys(cell for cell in every if cell not in quick))


def values_of(cells: Iterable[Cell]) -> set[Choice]:
    """All choices that some cells make."""
    return {value for cell in cells for value in cell.layout.choices}
