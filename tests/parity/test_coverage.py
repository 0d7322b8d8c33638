"""The list of cells forgets nothing."""

import itertools

from parity.cells import WORLD, all_combinations, covering_cells, further_cells, quick_cells, slow_cells, values_of
from parity.layouts import DIMENSIONS, FURTHER, Choice, Layout, dimension_of
from parity.models import MODELS


def choices(*tables: dict[str, list[Choice]]) -> list[Choice]:
    return [choice for table in tables for row in table.values() for choice in row]


def test_every_value_of_every_dimension_is_met_in_every_run() -> None:
    assert set(choices(DIMENSIONS, FURTHER)) == values_of(quick_cells())


def test_every_two_values_are_met_together_in_every_run() -> None:
    met = {pair for cell in covering_cells() for pair in cell.pairs}
    missing = []
    for (one, firsts), (other, seconds) in itertools.combinations(sorted(DIMENSIONS.items()), 2):
        for first, second in itertools.product(firsts, seconds):
            together = Layout(**{one: first, other: second})
            possible = any(together.misfit(model) is None for model in MODELS) and together.ranks <= WORLD
            if possible and ((one, first.name), (other, second.name)) not in met:
                missing.append((first.name, second.name))
    assert not missing
    # Eight ranks hold any two values of two dimensions.
    for first, second in itertools.combinations(choices(DIMENSIONS), 2):
        assert first.ranks * second.ranks <= WORLD or dimension_of(first) == dimension_of(second)


def test_every_model_meets_every_value() -> None:
    met = {(cell.model.name, value.name) for cell in (*quick_cells(), *slow_cells()) for value in cell.layout.choices}
    for model, value in itertools.product(MODELS, choices(DIMENSIONS, FURTHER)):
        if Layout(**{dimension_of(value): value}).misfit(model) is None:
            assert (model.name, value.name) in met, (model.name, value.name)


def test_three_dimensions_at_once() -> None:
    """TP 2 x PP 2 x CP 2, with and without sequence parallelism, and with a sharded placement in place of each."""
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


def test_names_say_which_cell() -> None:
    cells = [*quick_cells(), *slow_cells()]
    assert len({cell.name for cell in cells}) == len(cells)


def test_the_larger_values_meet_others_too() -> None:
    assert all(cell.fits for cell in further_cells())
    assert len(list(all_combinations())) > 1000
