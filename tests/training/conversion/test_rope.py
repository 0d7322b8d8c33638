"""config.json of releases before 5 and of today say the same positions: to transformers, and to us."""

import pytest
import transformers

from megatron.core.exceptions import UserError
from megatron.training.conversion.rope import Rope

OLD = {
    "nothing": ({}, {"rotary_base": 10000}),
    "base": ({"rope_theta": 500000.0, "rope_scaling": None}, {"rotary_base": 500000}),
    "linear, type": (
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_scaling_type": "linear", "rope_scaling_factor": 4.0},
    ),
    "yarn, from the length that the model has": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling_type": "yarn", "rope_scaling_factor": 4.0, "rope_scaling_original_length": 32768},
    ),
    "llama3": (
        {
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
        {"rotary_base": 500000, "rope_scaling_type": "llama3", "rope_scaling_factor": 32.0},
    ),
}


@pytest.mark.parametrize("name", OLD)
def test_old_and_new_say_the_same(name):
    old, expected = OLD[name]
    old = {"max_position_embeddings": 32768, **old}
    found = Rope().fields(old)
    assert expected.items() <= found.items()
    today = transformers.LlamaConfig(**old).to_dict()
    assert "rope_theta" not in today
    assert Rope().fields(today) == found


def test_what_is_written_reads_back_and_is_read_by_transformers():
    for old, _ in OLD.values():
        fields = Rope().fields({"max_position_embeddings": 32768, **old})
        defaults = {"use_rope_scaling": False, "rope_scaling_type": None, "rope_scaling_factor": 8.0}
        values = defaults | {"rotary_seq_len_interpolation_factor": None, "rope_scaling_original_length": 8192}
        values |= {"rope_scaling_low_freq_factor": 1.0, "rope_scaling_high_freq_factor": 4.0}
        values |= {"rope_scaling_beta_fast": 32.0, "rope_scaling_beta_slow": 1.0, "rope_scaling_truncate": True}
        keys = Rope().keys(values | {"rope_scaling_attention_factor": None} | fields)
        assert Rope().fields({"max_position_embeddings": 32768, **keys}) == fields
        assert Rope().fields(transformers.LlamaConfig(max_position_embeddings=32768, **keys).to_dict()) == fields


def test_a_scaling_without_its_factor():
    with pytest.raises(UserError, match="has no factor"):
        Rope().fields({"max_position_embeddings": 64, "rope_scaling": {"rope_type": "linear"}})
