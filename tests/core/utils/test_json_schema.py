"""Values that do not fit a schema are named by their key."""

from typing import Any

import pytest

from megatron.core.utils.json_schema import (
    MOST_NESTED,
    Boolean,
    Integer,
    ListOf,
    MapOf,
    Nullable,
    Number,
    OneOf,
    Plain,
    Record,
    Schema,
    Text,
    shown,
)


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


FITTING: list[tuple[Schema, Any]] = [
    (Integer(-3, 3), -3),
    (Integer(), 1 << 53),
    (Number(), -1.5),
    (Number(0.0), 0),
    (Boolean(), False),
    (Text(), "gr\u00fc\u00df\n"),
    (Text(one_line=True), "a b"),
    (OneOf(("a", "b")), "b"),
    (Nullable(Text()), None),
    (ListOf(Integer(0, 5)), [0, 5, 3]),
    (ListOf(Integer()), []),
    (ListOf(Text(), 2), ["a", "b"]),
    (MapOf(Integer()), {"a": 1}),
    (Record({"a": Text()}, {"b": Integer()}), {"a": "", "unknown": [None]}),
    (Plain(), {"a": [1, None, {"b": "c"}]}),
    (Plain(), nested(MOST_NESTED)),
]


@pytest.mark.parametrize(("schema", "value"), FITTING)
def test_what_fits(schema: Schema, value: Any) -> None:
    assert schema.problem(value, "key") is None


PROBLEMS: list[tuple[Schema, Any, str]] = [
    (Integer(), True, "key is true, not an integer from 0 to 9007199254740992"),
    (Integer(1, 3), 4, "key is 4, not an integer from 1 to 3"),
    (Integer(), 1.0, "key is 1.0, not an integer"),
    (Integer(), 10**400, "key is 1000000000000000000000000000000000000000"),
    (Number(), float("nan"), "key is NaN, not a finite number"),
    (Number(), float("-inf"), "key is -Infinity, not a finite number"),
    (Number(), 10**400, "not a finite number"),
    (Number(0.0), -1, "key is -1, not a finite number of at least 0"),
    (Number(0.0, above=True), 0.0, "key is 0.0, not a finite number above 0"),
    (Boolean(), 1, "key is 1, not true or false"),
    (Text(), "\ud800", 'key is "\\ud800", not a string'),
    (Text(one_line=True), "a\nb", 'key is "a\\nb", not a line of text'),
    (OneOf(("a", "b")), ["a"], "key is a list of 1, not one of a, b"),
    (Nullable(Text()), {}, "key is an object, not a string"),
    (ListOf(Integer(0, 5)), [0, 6], "key[1] is 6, not an integer from 0 to 5"),
    (ListOf(Integer(0, 5)), [0, True], "key[1] is true, not an integer"),
    (ListOf(Text(), 2), ["a"], "key is a list of 1, not a list of 2"),
    (MapOf(Integer()), {"a": 1, "b": None}, "key.b is null, not an integer"),
    (MapOf(Integer()), {"\udfff": 1}, "key.\\udfff is not text"),
    (Record({"a": Text()}), {}, "key.a is missing"),
    (Record({"a": Text()}), [], "key is a list of 0, not an object"),
    (Record(optional={"a": MapOf(Text())}), {"a": {"b": 1}}, "key.a.b is 1, not a string"),
    (Plain(), {"a": ["\ud800"]}, 'key contains "\\ud800", which is not text'),
    (Plain(), {"\ud800": 1}, "key contains"),
    (Plain(), nested(MOST_NESTED + 1), "key is nested more than 200 levels deep"),
]


@pytest.mark.parametrize(("schema", "value", "sentence"), PROBLEMS)
def test_what_does_not_fit_is_named(schema: Schema, value: Any, sentence: str) -> None:
    found = schema.problem(value, "key")
    assert found is not None and sentence in found and len(found) < 200


def test_values_are_shown_in_one_short_line() -> None:
    assert shown("x" * 100) == f'"{"x" * 56}...' and shown(None) == "null" and shown({"a": 1}) == "an object"
    assert Record({"n" * 500: Text()}).problem({}) == f"{'n' * 117}... is missing"
