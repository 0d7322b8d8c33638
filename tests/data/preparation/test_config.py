"""Flags of tools/preprocess_data.py: defaults and checks."""

from typing import Any

import pytest

from megatron.core.declarations.config_fields import describe_problem
from megatron.data.preparation.config import PreparationConfig, available_cores


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def problems(**values: Any) -> list[str]:
    config = PreparationConfig(**{"input": ["x.jsonl"], "output_prefix": "out", **values})
    return [describe_problem(problem, config, _flag) for problem in config.validate()]


def test_input_and_output_are_enough() -> None:
    assert problems() == []
    config = PreparationConfig(input=["x"], output_prefix="y")
    assert config.json_keys == ["text"] and config.workers == available_cores() >= 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"input": None}, "--input: missing"),
        ({"input": []}, "--input: missing"),
        ({"output_prefix": ""}, "--output-prefix: missing"),
        ({"json_keys": ["a", "b", "a"]}, "a key is given twice"),
        ({"json_keys": ["a/b"]}, "with a slash"),
        ({"workers": 0}, "--workers 0: must be at least 1"),
        ({"max_line_bytes": 0}, "--max-line-bytes 0: must be at least 1"),
        ({"max_line_bytes": (1 << 30) + 1}, "must be at most 1073741824"),
        ({"partitions": 0}, "--partitions 0: must be at least 1"),
        ({"log_interval": 0}, "--log-interval 0: must be at least 1"),
    ],
)
def test_each_impossible_value_is_named(values: dict[str, Any], message: str) -> None:
    (problem,) = problems(**values)
    assert message in problem
