"""Values that all ranks share, as JSON and tensors and back."""

import argparse
import json
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing.common_state import (
    LEFT_OUT,
    decode,
    encode,
    leaves,
    merged,
    path_text,
    tensor_chunks,
    tensors_of,
)
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from megatron.core.exceptions import UserError

VALUES: list[Any] = [
    None,
    True,
    3,
    2.5,
    "text",
    torch.bfloat16,
    [1, [2]],
    (1, (2, "x")),
    {"a": 1, "b": {"c": [None]}},
    {1: "one", (2, 3): "pair"},
    {"$tuple": 1},
    argparse.Namespace(lr=0.1, betas=(0.9, 0.95)),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_come_back_from_json(value: Any) -> None:
    text = json.dumps(encode(value, {}))
    assert decode(json.loads(text), {}) == value


def test_tensors_are_stored_by_path_with_a_checksum() -> None:
    value = {"seed": [torch.arange(3), torch.zeros(2, 2, dtype=torch.bfloat16).t()], "none": torch.empty(0)}
    tensors: dict[str, torch.Tensor] = {}
    encoded = json.loads(json.dumps(encode(value, tensors)))
    assert list(tensors) == ["common.seed.0", "common.seed.1", "common.none"]
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    assert {name: (t.shape, t.dtype) for name, t in tensors_of(encoded).items()} == {
        name: (t.shape, t.dtype) for name, t in tensors.items()
    }
    changed = encode({**value, "seed": [torch.arange(3) + 1, value["seed"][1]]}, {})
    assert changed["seed"][0] != encoded["seed"][0]  # the checksum
    assert torch.equal(decode(encoded, tensors)["seed"][0], torch.arange(3))
    assert [chunk.name for chunk in tensor_chunks(tensors)] == ["common.seed.0", "common.seed.1"]


def test_other_types_are_refused_by_path() -> None:
    with pytest.raises(UserError, match=r"a\.1 is a set, which a checkpoint cannot contain"):
        encode({"a": [0, {1}]}, {})


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(UserError, match=r"two tensors of the state dict have the name common.a.b"):
        encode({"a.b": torch.zeros(1), "a": {"b": torch.zeros(1)}}, {})


def test_placed_values_are_left_out_of_the_common_ones() -> None:
    value = {"local": LocalNonpersistentObject(1), "list": [LocalNonpersistentObject(2), 3]}
    encoded = encode(value, {})
    assert "local" not in encoded and decode(encoded, {}) == {"list": [None, 3]}


def test_leaves_have_their_paths() -> None:
    found = list(leaves({"a": [1, "x"], "b": (2,)}, (int,)))
    assert [(path_text(path), value) for path, value in found] == [("a.0", 1), ("b.0", 2)]
    assert path_text(()) == "the state dict"


def test_requested_places_are_filled_in() -> None:
    places = {name: LocalNonpersistentObject(name) for name in "xyz"}
    requested = {"a": places["x"], "b": [places["y"], 0], "c": places["z"]}
    values = {places["x"]: "X", places["y"]: "Y", places["z"]: LEFT_OUT}
    assert merged(requested, {"b": [None, 5], "d": 6}, values.__getitem__) == {"a": "X", "b": ["Y", 5], "d": 6}
