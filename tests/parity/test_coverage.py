"""The generated cells cover every value, every pair of values and every model."""

import itertools

import pytest
from parity.cells import SMALL_WORLD, WORLD, Cell, all_combinations, quick_cells, slow_cells, special_cells, values_of
from parity.families import FAMILIES, Family
from parity.layouts import DIMENSIONS, FURTHER, Choice, choice, dimension_of, layout
from parity.model_list import MODELS
from parity.models import Model


def choices(*tables: dict[str, list[Choice]]) -> list[Choice]:
    return [choice for table in tables for row in table.values() for choice in row]


def test_make_test_covers_every_value() -> None:
    """`make test` has every value except those of eight ranks, of which it has the same with four ranks."""
    every = set(choices(DIMENSIONS, FURTHER))
    eight = {value for value in every if value.ranks == WORLD}
    assert len(eight) == 6 and every - values_of(quick_cells()) == eight
    assert every == values_of((*quick_cells(), *slow_cells()))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("most_ranks", [SMALL_WORLD, WORLD])
def test_every_pair_of_values_is_covered(family: Family, most_ranks: int) -> None:
    """`make test` covers all pairs that fit into four ranks, but for those of values that are alike; `make test-all`
    covers those that fit into eight."""
    cells = quick_cells() if most_ranks == SMALL_WORLD else (*quick_cells(), *slow_cells())
    met = {pair for cell in cells if cell.model in family.models for pair in cell.pairs(family)}
    possible = {pair for cell in all_combinations(family, most_ranks) for pair in cell.pairs(family)}
    dimensions = {**family.dimensions, "model": family.models}
    missing, wanted = [], 0
    for (one, firsts), (other, seconds) in itertools.combinations(sorted(dimensions.items()), 2):
        for first, second in itertools.product(firsts, seconds):
            pair = ((one, first.name), (other, second.name))
            left_to_all = most_ranks == SMALL_WORLD and not family.is_quick(*pair)
            if family.wants_pair(*pair) and pair in possible and not left_to_all:
                wanted += 1
                if pair not in met:
                    missing.append((first.name, second.name))
    assert wanted and not missing


def test_make_test_has_few_cells_of_eight_ranks() -> None:
    large = [cell for cell in quick_cells() if cell.layout.ranks > SMALL_WORLD]
    assert len(large) <= 10 and {cell.layout.ranks for cell in large} == {WORLD}
    # The value dp4-hybrid, which needs four ranks, is combined with each kind of parallelism.
    met = {d for cell in large if cell.layout.data.name == "dp4-hybrid" for d in DIMENSIONS if _splits(cell, d)}
    assert met == {"data", "tensor", "pipeline", "context"}


def _splits(cell: Cell, dimension: str) -> bool:
    return getattr(cell.layout, dimension).ranks > 1


def _has(cell: Cell, dimension: str, value: Choice | Model) -> bool:
    return cell.values[dimension] == value.name


def test_any_two_values_fit_into_eight_ranks() -> None:
    for first, second in itertools.combinations(choices(DIMENSIONS), 2):
        assert first.ranks * second.ranks <= WORLD or dimension_of(first) == dimension_of(second)


def test_every_model_is_tested_with_every_value() -> None:
    met = {(cell.model.name, value.name) for cell in (*quick_cells(), *slow_cells()) for value in cell.layout.choices}
    for family in FAMILIES:
        alone = [choice(names[0]) for names in family.further if len(names) == 1]
        values = {value for row in family.dimensions.values() for value in row} | set(alone)
        for model, value in itertools.product(family.models, values):
            if any(_has(cell, dimension_of(value), value) for cell in _alone_or_with_another(family, model, value)):
                assert (model.name, value.name) in met, (model.name, value.name)


def _alone_or_with_another(family: Family, model: Model, value: Choice) -> list[Cell]:
    """Returns cells with this value and at most one other. Splits of experts need the ranks of another value."""
    others = [other for row in family.dimensions.values() for other in row]
    splits = [(value.name,), *((value.name, o.name) for o in others if dimension_of(o) != dimension_of(value))]
    cells = [Cell(model, layout(*names), model.losses[0]) for names in splits]
    return [cell for cell in cells if cell.fits]


def test_some_cells_combine_three_kinds_of_parallelism() -> None:
    """Some cells have TP 2 x PP 2 x CP 2, and some have DP 2 in place of one of them."""
    sizes = {
        tuple(cell.layout.__getattribute__(d).ranks for d in ("tensor", "pipeline", "context", "data"))
        for cell in quick_cells()
    }
    assert {(2, 2, 2, 1), (2, 2, 1, 2), (2, 1, 2, 2), (1, 2, 2, 2)} <= sizes


def test_models_differ_in_what_layouts_get_wrong() -> None:
    def some(condition) -> bool:  # type: ignore[no-untyped-def]
        return any(condition(model) for model in MODELS) and not all(condition(model) for model in MODELS)

    def setting(name: str):  # type: ignore[no-untyped-def]
        return lambda model: bool(model.settings.get(name))

    assert some(lambda model: model.tied) and some(lambda model: model.packed)
    assert some(lambda model: model.positions == "rope") and some(lambda model: model.positions == "learned_absolute")
    assert some(lambda model: model.vocabulary % 2 == 0) and some(lambda model: model.masked_step is not None)
    assert {1, 2, 4, 8} <= {model.groups for model in MODELS}
    for name in ("qk_layernorm", "hidden_dropout", "attention_dropout", "gated_linear_unit", "window_size"):
        assert some(setting(name)), name
    assert some(lambda model: model.settings.get("softmax_type") == "learnable")
    assert some(lambda model: model.settings.get("add_bias_linear", True))
    assert some(lambda model: model.settings.get("normalization") == "RMSNorm")


def test_cell_names_are_unique() -> None:
    cells = [*quick_cells(), *slow_cells()]
    assert len({cell.name for cell in cells}) == len(cells)


def test_make_test_has_every_model() -> None:
    assert {cell.model.name for cell in quick_cells()} == {model.name for model in MODELS}


def test_special_cells_fit_and_families_have_many_combinations() -> None:
    assert all(cell.fits for cell in special_cells())
    assert sum(1 for family in FAMILIES for _ in all_combinations(family)) > 1000
