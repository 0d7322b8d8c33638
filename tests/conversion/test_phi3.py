"""Phi-3: settings, positions with a divisor per frequency, and what is refused."""

from megatron.conversion.families import family_of
from megatron.training.config.flag_table import flag_table

PHI3 = family_of("Phi3ForCausalLM")
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}


def test_phi3_mini_of_128k() -> None:
    fields = PHI3.fields_of({"max_position_embeddings": 131072, "rope_scaling": LONGROPE})
    assert (fields["rope_scaling_type"], fields["rope_scaling_factor"]) == ("longrope", 32.0)
    assert fields["rope_scaling_original_length"] == 4096
    values = {name: flag.default for name, flag in flag_table().items()} | fields
    assert PHI3.config_of(values)["rope_scaling"] == LONGROPE, "the three keys that every release reads"
    assert PHI3.fields_of({"rope_scaling": LONGROPE | {"type": "su"}})["rope_scaling_type"] == "longrope"
    assert PHI3.fields_of({"partial_rotary_factor": 0.75})["rotary_percent"] == 0.75
