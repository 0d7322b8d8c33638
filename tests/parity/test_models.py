"""Models of the parity tests show what they are meant to: idle experts, dropped tokens."""

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


def test_starved_experts_get_no_token_and_others_do() -> None:
    model, (step,) = steps_of("moe-bias")
    # With four expert parallel ranks, the second rank has only these experts.
    assert model.experts // 4 == len(model.starved) == 2 and model.starved[0] % 2 == 0
    for load in reported(step, "moe_load"):
        assert load[list(model.starved)].sum() == 0 and load.sum() > 0


def test_capacity_drops_some_tokens_and_not_all() -> None:
    for name in ("moe-capacity", "moe-padded"):
        _, (step,) = steps_of(name)
        assert all(0 < float(dropped) < 1 for dropped in reported(step, "moe_dropped"))


def test_model_names_are_unique() -> None:
    assert len({model.name for model in MODELS}) == len(MODELS)
