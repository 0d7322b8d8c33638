"""Windows and rotary positions by type of layer."""

from typing import Any

import pytest
from conversion.oracles import sizes_of

from megatron.conversion.families import family_of
from megatron.core.exceptions import UserError
from megatron.training.config.flag_table import flag_table

FULL, WINDOWED = "full_attention", "sliding_attention"
GEMMA, OLMO, OSS = (family_of(f"{name}ForCausalLM") for name in ("Gemma3", "Olmo3", "GptOss"))
LINEAR = {"rope_type": "linear", "factor": 8.0}


def keys_of(family: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """The keys that an export of these fields writes."""
    defaults = {name: flag.default for name, flag in flag_table().items()}
    return dict(family.config_of(defaults | {"num_query_groups": fields["num_attention_heads"]} | fields))


def test_layers_with_a_window_are_all_but_every_nth_unless_they_are_named() -> None:
    assert OSS.fields_of(sizes_of(OSS) | {"num_hidden_layers": 3})["window_attn_skip_freq"] == [1, 0, 1]
    assert GEMMA.fields_of({"num_hidden_layers": 4, "sliding_window_pattern": 2})["window_attn_skip_freq"] == [1, 0] * 2
    assert OLMO.fields_of(sizes_of(OLMO) | {"num_hidden_layers": 3})["window_attn_skip_freq"] is None
    named = {"num_hidden_layers": 2, "layer_types": [FULL, WINDOWED], "sliding_window": 9}
    fields = OLMO.fields_of(sizes_of(OLMO) | named)
    assert (fields["window_size"], fields["window_attn_skip_freq"]) == ((8, 0), [0, 1])
    assert "window_size" not in OLMO.fields_of(sizes_of(OLMO) | {"num_hidden_layers": 2, "layer_types": [FULL] * 2})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layer_types": [FULL, "chunked_attention"]}, "layer_types has 'chunked_attention'; sliding_attention and "),
        ({"layer_types": [FULL]}, "layer_types has 1 entries, but num_hidden_layers is 2"),
        ({"sliding_window": None}, "sliding_window is None; with layers of sliding_attention it must be at least 1"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters has rope_type; only full_attention and "),
        ({"rope_parameters": {WINDOWED: LINEAR}}, "rope_parameters has 'linear' for sliding_attention; only 'default'"),
    ],
)
def test_what_is_unsupported_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refusal:
        GEMMA.fields_of({"num_hidden_layers": 2} | change)
    assert str(refusal.value).startswith(f"config.json: {said}")


@pytest.mark.parametrize("family", [GEMMA, OLMO], ids=["Gemma 3", "OLMo 3"])
@pytest.mark.parametrize("bases", [(1000000.0, 10000.0), (500000.0, 500000.0), (7000.0, 900.0)])
@pytest.mark.parametrize("scaling", [{}, LINEAR])
def test_both_bases_and_the_scaling_are_read_back(
    family: Any, bases: tuple[float, float], scaling: dict[str, Any]
) -> None:
    rope = {FULL: {"rope_theta": bases[0], **scaling}, WINDOWED: {"rope_theta": bases[1]}}
    fields = family.fields_of(sizes_of(family) | {"num_hidden_layers": 8, "rope_parameters": rope})
    assert (fields["rotary_base"], fields["rotary_base_local"]) == bases
    assert ("rope_scaling_type" in fields) == bool(scaling)
    assert family.fields_of(keys_of(family, fields)) == fields


def test_a_base_that_releases_read_differently_is_refused() -> None:
    """transformers 5 gives it to the layers with full attention alone, older releases to all."""
    with pytest.raises(UserError, match=r"rope_theta is 10000.0; only 500000.0 is supported beside rope_parameters"):
        OLMO.fields_of(sizes_of(OLMO) | {"rope_theta": 10000.0})
    assert OLMO.fields_of(sizes_of(OLMO) | {"rope_theta": 500000})["rotary_base_local"] == 500000.0
    assert GEMMA.fields_of({"rope_theta": 20000.0})["rotary_base_local"] == 10000.0
