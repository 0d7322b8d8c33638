"""Names of linear layers that get adapters."""

import pytest

from megatron.core.adapters.layers import WHOLE, RowPart
from megatron.core.adapters.targets import parts_of_layer
from megatron.core.exceptions import UserError

QKV = (2, 5, 8)  # groups; three query heads, a key and a value head; width


@pytest.mark.parametrize(
    ("layer", "rows", "name", "part"),
    [
        ("linear_qkv", QKV, "linear_qkv", WHOLE),
        ("linear_qkv", QKV, "c_attn", WHOLE),
        ("linear_qkv", QKV, "q_proj", RowPart("q_proj", 1, 0, 3)),
        ("linear_qkv", QKV, "v_proj", RowPart("v_proj", 1, 4, 5)),
        ("linear_fc1", (2, 16), "w1", RowPart("gate_proj", 0, 0, 1)),
        ("linear_fc1", (2, 16), "up_proj", RowPart("up_proj", 0, 1, 2)),
        ("linear_fc1", (16,), "up_proj", WHOLE),
        ("linear_fc1", (16,), "gate_proj", None),
        ("linear_proj", (12,), "o_proj", WHOLE),
        ("linear_proj", (12,), "c_proj", WHOLE),
        ("linear_fc2", (12,), "c_proj", WHOLE),
        ("linear_fc2", (12,), "o_proj", None),
    ],
)
def test_parts_of_layers(layer: str, rows: tuple[int, ...], name: str, part: RowPart | None) -> None:
    parts, used = parts_of_layer(layer, rows, [name, "other"])
    assert parts == ([] if part is None else [part]) and used == (set() if part is None else {name})


def test_two_adapters_for_one_row_are_refused() -> None:
    with pytest.raises(UserError, match="linear_qkv already includes q_proj; give one of them"):
        parts_of_layer("linear_qkv", QKV, ["linear_qkv", "q_proj"])
