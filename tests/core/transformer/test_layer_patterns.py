"""Settings by layer: periods, lists, and layers of multi-token prediction."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.core.transformer.config.heterogeneous import HETEROGENEOUS
from megatron.core.transformer.layer_patterns import (
    LayerParts,
    evenly_mixed,
    has_experts,
    has_rope,
    is_chunked,
    is_windowed,
    layer_parts,
    stages_of_pattern,
)


def config(**fields: Any) -> Any:
    names = ("window_size", "window_attn_skip_freq", "attention_chunk_size", "attention_chunk_skip_freq")
    names = (*names, "no_rope_freq", "num_moe_experts", "experimental_attention_variant", "hybrid_layer_pattern")
    names = (*names, *HETEROGENEOUS)
    none = dict.fromkeys(names)
    return SimpleNamespace(**{**none, "moe_layer_freq": 1, "num_layers": 4, **fields})


def layers(rule: Any, **fields: Any) -> list[int]:
    """The layers, from 1, for which a rule holds; 5 and 6 predict further tokens."""
    return [number for number in range(1, 7) if rule(config(**fields), number)]


@pytest.mark.parametrize(
    ("rule", "size", "pattern"),
    [
        (is_windowed, {"window_size": (3, 0)}, "window_attn_skip_freq"),
        (is_chunked, {"attention_chunk_size": 8}, "attention_chunk_skip_freq"),
    ],
)
def test_windows_and_chunks(rule: Any, size: dict[str, Any], pattern: str) -> None:
    assert layers(rule) == layers(rule, **{pattern: 2}) == []
    assert layers(rule, **size) == [1, 2, 3, 4, 5, 6]
    assert layers(rule, **size, **{pattern: 2}) == [1, 3]  # not every second; 5 and 6 are as 4
    assert layers(rule, **size, **{pattern: [0, 0, 1, 1]}) == [3, 4, 5, 6]


def test_rotary_positions() -> None:
    assert layers(has_rope) == [1, 2, 3, 4, 5, 6]
    assert layers(has_rope, no_rope_freq=4) == [1, 2, 3]
    assert layers(has_rope, no_rope_freq=[1, 0, 1, 0]) == [2, 4, 5, 6]


def test_experts() -> None:
    assert layers(has_experts) == []
    assert layers(has_experts, num_moe_experts=8) == [1, 2, 3, 4, 5, 6]
    assert layers(has_experts, num_moe_experts=8, moe_layer_freq=3) == [1, 4, 5, 6]
    assert layers(has_experts, num_moe_experts=8, moe_layer_freq=[0, 1, 1, 0]) == [2, 3]


def test_parts_of_a_layer() -> None:
    mixed = config(
        num_moe_experts=8,
        moe_layer_freq=[0, 0, 1, 1],
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=2,
    )
    kinds = [layer_parts(mixed, number) for number in range(1, 6)]
    assert kinds[:2] == [LayerParts("gated_delta_net", "mlp"), LayerParts("attention", "mlp")]
    assert kinds[2:] == [LayerParts("gated_delta_net", "moe"), *[LayerParts("attention", "moe")] * 2]
    assert layer_parts(config(), 1) == LayerParts("attention", "mlp")
    assert (
        layer_parts(SimpleNamespace(**vars(config()) | {"experimental_attention_variant": "dsa"}), 2).token_mixer
        == "dsa"
    )


def test_layers_of_a_hybrid_model() -> None:
    hybrid = config(num_moe_experts=8, hybrid_layer_pattern="M*|-E")
    parts = [("mamba", None), ("attention", None), (None, "mlp"), (None, "moe")]
    assert [tuple(layer_parts(hybrid, number)) for number in range(1, 5)] == parts
    assert layers(has_experts, num_moe_experts=8, hybrid_layer_pattern="EM|*-") == [1]
    assert stages_of_pattern("M*|-E|M") == "Ett|tt|tL" and stages_of_pattern("M*") is stages_of_pattern(None) is None


def test_shares_are_spread_as_in_a_published_model() -> None:
    published = "M-M-M--M-M*-M-M-M-M--M*-M-M-M-M-M*--M-M-M-M-M*-M--M-M-M-"
    assert evenly_mixed(56, 0.08, 0.5) == published
    assert evenly_mixed(3, 0.0, 0.0) == "MMM" and evenly_mixed(3, 1.0, 0.0) == "***" and evenly_mixed(2, 0, 1) == "--"
    assert evenly_mixed(4, 0.25, 0.5) in ("M-*-", "M*--")
