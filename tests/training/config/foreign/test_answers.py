"""Settings of any type: a mistake is a line, never an exception."""

import datetime
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.training.config.foreign.accelerate import ACCELERATE, SECTIONS, read_accelerate
from megatron.training.config.foreign.answers import number, unknown, whole
from megatron.training.config.foreign.deepspeed import DEEPSPEED, read_deepspeed
from megatron.training.config.foreign.training_arguments import TRAINING_ARGUMENTS, read_training_arguments

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2.5, float("inf"), float("nan"), 10**400, "", "x", "auto", "True", "false", [], [1],
    ["a"], [[]], {}, {"a": 1}, {1: 2}, {None: 2}, {"enabled": True}, datetime.date(2020, 1, 1),
)  # fmt: skip
ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}
BASES: tuple[dict[str, Any], ...] = (
    {},
    {"optimizer": ADAM, "scheduler": {"type": "WarmupDecayLR"}, "zero_optimization": {"offload_optimizer": {}}},
    {"optimizer": {"type": "SGD"}, "scheduler": {"type": "WarmupCosineLR"}, "fp16": {"enabled": True}},
)


def names_of(table: dict[str, Any]) -> list[str]:
    """Names of settings, and those of their sections."""
    return sorted(table.keys() | {name.rpartition(".")[0] for name in table if "." in name})


def within(base: dict[str, Any], name: str, value: object) -> dict[str, Any]:
    """The base with one more setting, in sections that are switched on."""
    first, _, rest = name.partition(".")
    if not rest:
        return {**base, first: value}
    on = {"enabled": True} if f"{first}.enabled" in DEEPSPEED else {}
    return {**base, first: within({**on, **base.get(first, {})}, rest, value)}


@pytest.mark.parametrize("base", BASES)
def test_any_value_of_a_key_of_deepspeed_is_read_or_is_a_mistake(base: dict[str, Any]) -> None:
    read = {name for name, answer in DEEPSPEED.items() if answer.kind == "honoured"}
    for name in sorted(read) if base else names_of(DEEPSPEED):
        for value in VALUES:
            reading = read_deepspeed(within(base, name, value), "F")
            assert all(problem.startswith("F: ") for problem in reading.problems), (name, value)


@pytest.mark.parametrize("kind", [None, "MEGATRON_LM", "DEEPSPEED", "FSDP"])
def test_any_value_of_a_field_of_accelerate_is_read_or_is_a_mistake(kind: str | None) -> None:
    # A JSON file that a field names is not there, which is an error of its own.
    for name in set(names_of(ACCELERATE)) - {
        f"deepspeed_config.{one}" for one in ("deepspeed_config_file", "hf_ds_config")
    }:
        for value in VALUES:
            reading = read_accelerate(within({"distributed_type": kind, "mixed_precision": "fp8"}, name, value), "F")
            assert all(problem.startswith("F: ") for problem in reading.problems), (name, value)
    for section in SECTIONS:
        assert "F: " + section in read_accelerate({section: {datetime.date(2020, 1, 1): 1}}, "F").problems[0]


def test_any_value_of_a_training_argument_is_read_or_is_a_mistake() -> None:
    for name in TRAINING_ARGUMENTS:
        for value in VALUES:
            reading = read_training_arguments(SimpleNamespace(**{"max_steps": 4, name: value}), 7, 1)
            assert all(problem.startswith("TrainingArguments") for problem in reading.problems), (name, value)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), "1e400", 10**400, None, True, [], "two"])
def test_numbers_are_finite(value: object) -> None:
    for read in (number, whole):
        with pytest.raises(ValueError, match=r"expected a (finite )?number"):
            read(value)


def test_the_nearest_names_are_sections_too() -> None:
    assert unknown("zero_optimisation", DEEPSPEED) == "unknown; did you mean zero_optimization?"
