"""How fields state flags, and how problems are spelled."""

import dataclasses
from dataclasses import dataclass

import pytest

from megatron.core.declarations.config_fields import (
    declaration_of,
    describe_problem,
    field_docstrings,
    fields_of_problem,
    flag,
    not_a_flag,
    not_yet,
    refuse,
    unsupported_values,
    value_text,
)
from megatron.core.exceptions import UserError
from megatron.core.transformer.enums import AttnBackend


@dataclass(kw_only=True)
class Base:
    depth: int = 1
    """How deep."""


@dataclass(kw_only=True)
class Example(Base):
    width: int = flag(4, on="--breadth")
    """How wide,
    in words."""

    hidden: int = not_a_flag(0)

    future: str | None = not_yet(None)
    """Still to come."""

    many: list[int] = not_yet(default_factory=list)
    """Still to come, too."""


def fields() -> dict[str, "dataclasses.Field[object]"]:
    return {field.name: field for field in dataclasses.fields(Example)}


def test_docstrings_below_fields_are_found_in_bases_too_and_folded() -> None:
    assert field_docstrings(Example) == {
        "depth": "How deep.",
        "width": "How wide, in words.",
        "future": "Still to come.",
        "many": "Still to come, too.",
    }


def test_a_plain_field_has_the_plain_declaration() -> None:
    assert declaration_of(fields()["depth"]).exposed
    assert declaration_of(fields()["width"]).on == "--breadth"
    assert not declaration_of(fields()["hidden"]).exposed


def test_only_the_default_of_a_feature_to_come_is_supported() -> None:
    assert unsupported_values(Example()) == []
    assert unsupported_values(Example(future="x", many=[1])) == ["{future}: not yet", "{many}: not yet"]


def test_a_problem_is_spelled_as_attributes_or_as_flags() -> None:
    problem = "{width} is not {depth:name}"
    assert describe_problem(problem, Example(width=9)) == "width 9 is not depth"
    assert describe_problem(problem, Example(width=9), lambda field: "--" + field) == "--width 9 is not --depth"
    assert fields_of_problem(problem) == {"width", "depth"}


def test_all_problems_come_in_one_message() -> None:
    with pytest.raises(UserError, match="width 4 is odd; depth 1 too"):
        refuse(["{width} is odd", "{depth} too"], Example())
    refuse([], Example())


@pytest.mark.parametrize(
    ("value", "text"), [(AttnBackend.flash, "flash"), ([1, 2], "1 2"), (1e-5, "1e-05"), (None, "None"), ("a", "a")]
)
def test_values_are_written_as_on_the_command_line(value: object, text: str) -> None:
    assert value_text(value) == text
