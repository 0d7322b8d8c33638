"""Generates the list of cells: which models are tested in which layouts.

Layouts have dimensions (tensor, pipeline, ...); the model and the loss are dimensions of a cell too. `make test`
(`quick_cells`) runs, for each family of models, cells of up to four ranks that together contain every pair of ways to
split and every model with each split of its tensors, but for values that are alike (`Family.alike`); a cell for each
larger or special value that no other has; some layouts of eight ranks; and the cells that catch the planted bugs.
`make test-all` (`slow_cells`) adds all other pairs of values, the other special layouts, the pairs that need eight
ranks, and every value and every pair of values with all models of a family.
"""

import functools
import itertools
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property

from parity.families import FAMILIES, Family
from parity.layouts import DIMENSIONS, PIPELINE_BEFORE_DATA, Choice, Layout, dimension_of, layout
from parity.model_list import MODELS
from parity.models import FEW_LAYERS, LAYERS, Model
from parity.mutations import MUTATIONS
from parity.text import GLOBAL_BATCH

WORLD = 8
SMALL_WORLD = 4
"""Ranks of the largest cells of `make test`, but for a few of eight ranks."""
LOSSES = ("per-token", "default")
TWO_EVEN_STAGES = ("pp2", "pp2-zb-h1")
"""Pipelines of two stages with the same number of layers. Other values have stages of several layers."""


Pair = tuple[tuple[str, str], tuple[str, str]]
"""Two (dimension, value)."""


@dataclass(frozen=True)
class Cell:
    """A model in a layout with one of the two losses."""

    model: Model
    layout: Layout
    loss: str = "per-token"
    rows: int = 0
    """Samples of a micro-batch. 0 means the model's, or more, so that a rank without a pipeline has no more than two
    micro-batches in a step: these samples are so short that a micro-batch takes the same time with any number. Packed
    rows stay short under context parallelism, because in longer ones no document would cross the ranges of ranks."""

    layers: int = 0
    """Layers of each stack. 0 means `FEW_LAYERS` where a third layer would repeat what the first two show: without a
    pipeline, if the model's layers are alike or of two kinds in turn; in two stages of one chunk, if they are alike.
    Else `LAYERS`. More than two data parallel ranks have `LAYERS` too, so that buckets and gathered units follow one
    another."""

    def __post_init__(self) -> None:
        rows, ranks = self.rows or self.model.rows, self.layout.data.ranks
        split = self.model.packed and self.layout.context.ranks > 1
        fixed = self.rows or split or self.layout.pipeline.ranks > 1
        while not fixed and GLOBAL_BATCH // (rows * ranks) > 2:
            rows *= 2
        object.__setattr__(self, "rows", rows)
        by_layer = isinstance(self.layout.settings.get("cp_comm_type"), list)
        kinds = 1 if self.layout.pipeline.name in TWO_EVEN_STAGES else 2 * (self.layout.pipeline.ranks == 1)
        few = self.model.kinds_of_layers <= kinds and ranks <= 2 and not by_layer
        object.__setattr__(self, "layers", self.layers or (FEW_LAYERS if few else LAYERS))

    @property
    def alone(self) -> "Cell":
        """The cell of one process with this cell's model, loss, micro-batches and layers."""
        return replace(self, layout=Layout())

    @property
    def name(self) -> str:
        return f"{self.model.name}/{self.layout.name}/{self.loss}"

    @property
    def per_token(self) -> bool:
        return self.loss == "per-token"

    @cached_property
    def values(self) -> dict[str, str]:
        """Value of each dimension, model and loss included."""
        own = {dimension: getattr(self.layout, dimension).name for dimension in DIMENSIONS}
        return {**own, "model": self.model.name, "loss": self.loss}

    def pairs(self, family: Family, quick: bool = False) -> list[Pair]:
        """All pairs of values of this cell that the family wants to cover; with `quick` only those of `make test`."""
        every = itertools.combinations(sorted(self.values.items()), 2)
        wanted = [(one, other) for one, other in every if family.wants_pair(one, other)]
        return [pair for pair in wanted if family.is_quick(*pair)] if quick else wanted

    @property
    def fits(self) -> bool:
        averaged = self.loss in losses_of(self.model, self.layout)
        return averaged and self.layout.ranks <= WORLD and self.layout.misfit(self.model) is None

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def cost(self) -> float:
        """Estimated CPU seconds, fitted to measured ones. Tensor and context parallel ranks run as many operations as
        one rank would alone."""
        tensor, context = self.layout.tensor.ranks, self.layout.context.ranks
        layers = self.layers * (2 if self.model.kind == "t5" else 1)
        passes = tensor * context * GLOBAL_BATCH / self.rows * layers * self.model.steps
        harder = 4 * bool(self.model.experts) + 2 * (tensor > 1) + 1.5 * (context > 1)
        return 0.1 * self.layout.ranks + 0.0024 * passes * (1 + harder)


def losses_of(model: Model, layout: Layout) -> tuple[str, ...]:
    """Returns the losses that a model can have in a layout. A mean over micro-batches needs those of one process."""
    return model.losses[:1] if layout.is_dynamic else model.losses


def all_combinations(family: Family, most_ranks: int = WORLD) -> Iterator[Cell]:
    """Yields every model of a family in every layout of its values with at most `most_ranks`, with each loss."""
    for choices in itertools.product(*family.dimensions.values()):
        whole = Layout(**dict(zip(family.dimensions, choices, strict=True)))
        if whole.ranks > most_ranks:
            continue
        for model, loss in itertools.product(family.models, LOSSES):
            cell = Cell(model, whole, loss)
            if cell.fits:
                yield cell


def covering_cells(family: Family, most_ranks: int, given: Iterable[Cell] = ()) -> tuple[Cell, ...]:
    """Returns cells that cover those pairs of a family that fit into `most_ranks` and that no `given` cell covers. With
    `SMALL_WORLD` they are the pairs of `make test`.

    A greedy algorithm picks the cell that covers most for its cost; at the end superfluous cells are dropped.
    """
    candidates = sorted(all_combinations(family, most_ranks), key=lambda cell: (cell.layout.ranks, cell.name))
    bits: dict[Pair, int] = {}
    quick = most_ranks == SMALL_WORLD
    met = [sum(1 << bits.setdefault(pair, len(bits)) for pair in cell.pairs(family, quick)) for cell in candidates]
    worth = [cell.cost**-0.5 for cell in candidates]
    known = {pair for cell in given if cell.model in family.models for pair in cell.pairs(family)}
    wanted = left = sum(1 << bit for pair, bit in bits.items() if pair not in known)
    chosen: list[int] = []
    while left:
        best = max(range(len(candidates)), key=lambda number: (met[number] & left).bit_count() * worth[number])
        chosen.append(best)
        left &= ~met[best]
    for number in sorted(chosen, key=lambda number: worth[number]):
        if not wanted & ~functools.reduce(operator.or_, (met[other] for other in chosen if other != number), 0):
            chosen.remove(number)
    return tuple(candidates[number] for number in chosen)


def special_cells(given: Iterable[Cell] = ()) -> Iterator[Cell]:
    """Yields the cells of `make test` with larger and special values: for each family those of its further layouts that
    have a value which neither a `given` cell of the family nor an earlier one has, and the layouts of eight ranks."""
    given = list(given)
    for family in FAMILIES:
        met = values_of(cell for cell in given if cell.model in family.models)
        for cell in cells_of(family, family.further):
            if cell.layout.ranks <= SMALL_WORLD and not met.issuperset(cell.layout.choices):
                met.update(cell.layout.choices)
                yield cell
        yield from cells_of(family, family.eight)


def cells_of(family: Family, layouts: Iterable[tuple[str, ...]]) -> Iterator[Cell]:
    """Yields a cell for each layout, given by the names of its values. Models and losses take turns."""
    models = itertools.cycle(family.models)
    losses = itertools.cycle(LOSSES)

    def fitting(*names: str, order: str = Layout.order) -> Cell:
        cells = (cell(next(models), layout(*names, order=order), next(losses)) for _ in family.models)
        return next(cell for cell in cells if cell.fits)  # the next one begins with the model after it

    def cell(model: Model, whole: Layout, loss: str) -> Cell:
        losses = losses_of(model, whole)
        return Cell(model, whole, loss if loss in losses else losses[0])

    for names in layouts:
        order = PIPELINE_BEFORE_DATA if "pp-before-dp" in names else Layout.order
        yield fitting(*(name for name in names if name != "pp-before-dp"), order=order)


def with_each_model(models: Iterable[Model], cells: Iterable[Cell]) -> Iterator[Cell]:
    """Yields each cell's layout with every one of these models."""
    models = list(models)
    for cell in cells:
        for number, model in enumerate(models):
            losses = losses_of(model, cell.layout)
            other = Cell(model, cell.layout, losses[number % len(losses)])
            if other.fits:
                yield other


def singles_and_pairs(family: Family) -> Iterator[Cell]:
    """Yields a cell for each value alone and for each pair of values that the family wants to cover."""
    values = [value for choices in family.dimensions.values() for value in choices[1:]]
    for value in values:
        yield Cell(family.models[0], layout(value.name), family.models[0].losses[0])
    for first, second in itertools.combinations(values, 2):
        if dimension_of(first) != dimension_of(second) and family.wants(dimension_of(first), dimension_of(second)):
            yield Cell(family.models[0], layout(first.name, second.name), family.models[0].losses[0])


@cache
def quick_cells() -> tuple[Cell, ...]:
    """Returns the cells of `make test`."""
    catchers = list(map(cell_of, names_of_catchers()))
    given = dict.fromkeys([*special_cells(catchers), *catchers])
    covering = [cell for family in FAMILIES for cell in covering_cells(family, SMALL_WORLD, given)]
    return tuple(dict.fromkeys([*given, *covering]))


def names_of_catchers() -> list[str]:
    """Returns the names of the cells that catch the planted bugs."""
    return [mutation.caught_by for mutation in MUTATIONS]


def cell_of(name: str) -> Cell:
    """Returns the cell with this name."""
    model, choices, loss = name.split("/")
    split = () if choices == "one" else choices.split("+")
    return Cell(next(m for m in MODELS if m.name == model), layout(*split), loss)


@cache
def slow_cells() -> tuple[Cell, ...]:
    """Returns the further cells of `make test-all`: each value and each pair of values with all models of a family."""
    every = [
        cell
        for family in FAMILIES
        for special in [[*family.further, *family.eight, *family.rare]]
        for cell in (
            *covering_cells(family, WORLD, quick_cells()),
            *with_each_model(family.models, [*singles_and_pairs(family), *cells_of(family, special)]),
        )
    ]
    quick = set(quick_cells())
    return tuple(dict.fromkeys(cell for cell in every if cell not in quick))


def values_of(cells: Iterable[Cell]) -> set[Choice]:
    """Returns all values of dimensions that occur in these cells."""
    return {value for cell in cells for value in cell.layout.choices}
