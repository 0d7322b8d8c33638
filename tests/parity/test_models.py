"""The models do what they are there for: experts without tokens, tokens without room."""

from parity.evidence import Step
from parity.model_list import EXPERTS, MODELS
from parity.models import Model
from parity.reference import reference
from torch import Tensor


def steps_of(name: str) -> tuple[Model, list[Step]]:
    model = next(model for model in EXPERTS if model.name == name)
    return model, reference(model, per_token=False, steps=1).steps


def reported(step: Step, name: str) -> list[Tensor]:
    found = [report.total / report.count for report in step.reports if report.name == name]
    assert found, name
    return found


def test_starved_experts_take_no_token_and_others_do() -> None:
    model, (step,) = steps_of("moe-bias")
    # With four ranks of experts the second has none but these.
    assert model.experts // 4 == len(model.starved) == 2 and model.starved[0] % 2 == 0
    for load in reported(step, "moe_load"):
        assert load[list(model.starved)].sum() == 0 and load.sum() > 0


def test_some_tokens_find_no_room_and_some_do() -> None:
    for name in ("moe-capacity", "moe-padded"):
        _, (step,) = steps_of(name)
        assert all(0 < float(dropped) < 1 for dropped in reported(step, "moe_dropped"))


def test_names_are_one_models_each() -> None:
    assert len({model.name for model in MODELS}) == len(MODELS)
