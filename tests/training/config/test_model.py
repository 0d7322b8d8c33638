"""Rules of the model's flags."""

import pytest
from support.command_lines import problems_of_config

from megatron.training.config.model import ModelConfig


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"max_position_embeddings": 0}, "--max-position-embeddings 0 must be at least 1"),
        ({"rotary_base": 0}, "--rotary-base 0 must be at least 1"),
        ({"swiglu": True, "geglu": True}, "--swiglu and --geglu choose different activations; give one"),
    ],
)
def test_impossible_values(values: dict[str, object], problem: str) -> None:
    found = problems_of_config(ModelConfig, **{**GOOD, **values})
    assert len(found) == 1 and found[0].startswith(problem), found


GOOD: dict[str, object] = {"transformer": None, "max_position_embeddings": 8}


def test_possible_values_are_no_problem() -> None:
    assert problems_of_config(ModelConfig, **GOOD) == []
