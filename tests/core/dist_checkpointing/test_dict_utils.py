"""Functions on nested state dicts."""

import pytest

from megatron.core.dist_checkpointing.dict_utils import (
    dict_list_map_inplace,
    dict_list_map_outplace,
    dict_map,
    dict_map_with_key,
    diff,
    extract_matching_values,
    map_reduce,
    merge,
    nested_values,
)
from megatron.core.exceptions import UserError


def nest() -> dict:
    return {"a": 1, "b": [2, {"c": 3}, []], "d": {}}


def test_values_and_maps() -> None:
    assert list(nested_values(nest())) == [1, 2, 3]
    state = nest()
    assert dict_list_map_outplace(lambda x: -x, state) == {"a": -1, "b": [-2, {"c": -3}, []], "d": {}}
    assert state == nest() and dict_list_map_inplace(lambda x: -x, state) is state and state["b"][1]["c"] == -3
    assert dict_list_map_inplace(str, 5) == "5"
    flat = {"a": 1}
    dict_map(str, flat)
    dict_map_with_key(lambda key, value: key + value, flat)
    assert flat == {"a": "a1"}


def test_values_that_match() -> None:
    odd, rest = extract_matching_values(nest(), lambda x: x % 2 == 1)
    assert odd == {"a": 1, "b": [{"c": 3}]} and rest == {"b": [2, []], "d": {}}
    odd, rest = extract_matching_values(nest(), lambda x: x % 2 == 1, return_lists_as_dicts=True)
    assert odd == {"a": 1, "b": {1: {"c": 3}}} and rest == {"b": {0: 2, 2: {}}, "d": {}}


def test_differences() -> None:
    assert diff({"a": 1, "b": [1, 2], "c": 0}, {"b": [1, "2"], "d": 0, "c": 0}) == (
        [("a",)],
        [("d",)],
        [(("b", 1), int, str)],
    )


def test_merging() -> None:
    assert merge({"a": {"x": 1}}, {"a": {"y": 2}, "b": 3}) == {"a": {"x": 1, "y": 2}, "b": 3}
    assert merge({"a": [{"x": 1}]}, {"a": {0: {"y": 2}, 1: 5}}) == {"a": [{"x": 1, "y": 2}, 5]}
    with pytest.raises(UserError, match=r"two values at \('a',\)"):
        merge({"a": 1}, {"a": 2})


def test_groups() -> None:
    assert map_reduce(range(5), lambda x: x % 2, lambda x: x * 10, sum) == {0: 60, 1: 40}
