"""Mamba2: published settings, and what is refused."""

from typing import Any

import pytest
from conversion.oracles import sizes_of

from megatron.conversion.families import family_of
from megatron.conversion.tensor_mapping import hub_tensors
from megatron.training.config.flag_table import flag_table

MAMBA2 = family_of("Mamba2ForCausalLM")
CODESTRAL: dict[str, Any] = {
    "norm_before_gate": True,
    "residual_in_fp32": True,
    "rms_norm": True,
    "time_step_limit": [0.0, float("inf")],
    "time_step_rank": 256,
}
"""Keys of Mamba-Codestral-7B's config.json that transformers 5 does not write."""


@pytest.mark.parametrize("infinite", [float("inf"), "Infinity", {"__float__": "Infinity"}, None], ids=str)
def test_a_config_of_the_hub(infinite: Any) -> None:
    fields = MAMBA2.fields_of(sizes_of(MAMBA2) | CODESTRAL | {"time_step_limit": [0.0, infinite]})
    assert fields["hybrid_layer_pattern"] == "M" * 64 and fields["num_layers"] == 64
    assert (fields["mamba_num_heads"], fields["mamba_head_dim"], fields["mamba_min_time_step"]) == (128, 64, 0.0)
    values = {name: flag.default for name, flag in flag_table().items()} | fields
    assert MAMBA2.fields_of(MAMBA2.config_of(values)) == fields
    assert MAMBA2.fields_of(MAMBA2.config_of(values | {"mamba_min_time_step": 0.5}))["mamba_min_time_step"] == 0.5


def test_the_rows_of_a_joint_projection() -> None:
    """2 groups of 1 head of width 3 and states of 2: theirs are z, x, B, C and dt, each of both groups."""
    sizes = {"hidden_size": 4, "mamba_num_heads": 2, "mamba_head_dim": 3, "mamba_num_groups": 2, "mamba_state_dim": 2}
    shapes = {
        "decoder.layers.0.self_attention.in_proj.weight": (2, 11, 4),
        "decoder.layers.0.self_attention.conv1d.weight": (2, 7, 4),
    }
    joint, convolution = hub_tensors(MAMBA2.tensors_of(sizes), shapes)
    assert (joint.name, joint.shape) == ("backbone.layers.0.mixer.in_proj.weight", (22, 4))
    assert [(box.start[1], box.shape[1]) for box in joint.boxes] == [(0, 3), (3, 3), (6, 2), (8, 2), (10, 1)]
    assert (convolution.name, convolution.shape) == ("backbone.layers.0.mixer.conv1d.weight", (14, 1, 4))
