"""The names of linear layers that adapters can be given to: Megatron-LM's, and those of models of the hub."""

from collections.abc import Iterable, Mapping, Sequence

from megatron.core.adapters.layers import WHOLE, RowPart
from megatron.core.exceptions import UserError

DEFAULT = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""The layers that get an adapter if no names are given, as far as the model has them."""

PARTS: Mapping[str, str] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "linear_qkv"),
    **dict.fromkeys(("gate_proj", "up_proj"), "linear_fc1"),
}
"""Layers of the hub that are a part of the rows of one of ours."""

ALIASES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("o_proj",), ("linear_proj",)),
    **dict.fromkeys(("down_proj", "w2", "dense_4h_to_h", "c_proj_mlp", "fc2"), ("linear_fc2",)),
    **dict.fromkeys(("c_attn", "qkv_proj", "query_key_value"), ("linear_qkv",)),
    **dict.fromkeys(("c_fc", "gate_up_proj", "dense_h_to_4h", "fc1"), ("linear_fc1",)),
    "c_proj": ("linear_proj", "linear_fc2"),
    "w1": ("gate_proj",),
    "w3": ("up_proj",),
    "q_a_proj": ("linear_q_down_proj",),
    "q_b_proj": ("linear_q_up_proj",),
    "kv_a_proj_with_mqa": ("linear_kv_down_proj",),
    "kv_b_proj": ("linear_kv_up_proj",),
}
"""Other names of layers, and ours."""


def parts_of_layer(name: str, rows: Sequence[int], wanted: Iterable[str]) -> tuple[list[RowPart], set[str]]:
    """Returns the parts of a layer that get an adapter, and the wanted names that this layer answers. `name` is the
    last word of its path, `rows` are the dimensions of its canonical rows.

    Raises UserError if the names give a row two adapters.
    """
    found: dict[str, RowPart] = {}
    used: set[str] = set()
    for word in wanted:
        for target in ALIASES.get(word, (word,)):
            part = WHOLE if target == name else _part(name, rows, target)
            if part is not None:
                found[part.name] = part
                used.add(word)
    if WHOLE.name in found and len(found) > 1:
        others = ", ".join(sorted(found.keys() - {WHOLE.name}))
        raise UserError(f"--lora-target-modules: {name} already includes {others}; give one of them")
    return list(found.values()), used


def _part(layer: str, rows: Sequence[int], target: str) -> RowPart | None:
    if PARTS.get(target) != layer:
        return None
    if layer == "linear_qkv":  # [groups, query heads + key + value, width]
        if len(rows) != 3:
            return None
        keys = rows[1] - 2
        bounds = {"q_proj": (0, keys), "k_proj": (keys, keys + 1), "v_proj": (keys + 1, keys + 2)}
        return RowPart(target, 1, *bounds[target])
    if len(rows) == 2:  # gate and up
        return RowPart(target, 0, *((0, 1) if target == "gate_proj" else (1, 2)))
    return WHOLE if target == "up_proj" else None
