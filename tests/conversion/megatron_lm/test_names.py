"""Where Megatron-LM's checkpoints hold a canonical tensor."""

import pytest

from megatron.conversion.megatron_lm.names import Location, box_in, location_of, merges_into
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box


@pytest.mark.parametrize(
    ("canonical", "theirs", "location"),
    [
        ("decoder.layers.3.input_layernorm.weight", "decoder.layers.self_attention.linear_qkv.layer_norm_weight", 3),
        ("decoder.layers.3.input_layernorm.bias", "decoder.layers.3.self_attention.linear_qkv.layer_norm_bias", None),
        ("decoder.layers.0.input_layernorm.weight", "decoder.layers.input_layernorm.weight", 0),  # latent attention
        ("decoder.layers.1.pre_mlp_layernorm.weight", "decoder.layers.mlp.linear_fc1.layer_norm_weight", 1),
        ("decoder.layers.1.self_attention.q_layernorm.weight", "decoder.layers.self_attention.q_layernorm.weight", 1),
        (
            "decoder.layers.1.self_attention.kv_layernorm.weight",
            "decoder.layers.self_attention.linear_kv_up_proj.layer_norm_weight",
            1,
        ),
        ("decoder.layers.2.mlp.experts.linear_fc1.weight", "decoder.layers.mlp.experts.experts.linear_fc1.weight", 2),
        ("embedding.word_embeddings.weight", "embedding.word_embeddings.weight", None),
    ],
)
def test_locations(canonical: str, theirs: str, location: int | None) -> None:
    shapes = {theirs: (4, 8, 8), "decoder.final_layernorm.weight": (8,)}
    assert location_of(canonical, shapes) == Location(theirs, location)
    assert location_of("decoder.layers.0.mlp.linear_fc2.weight", shapes) is None


def test_boxes() -> None:
    qkv = Location("decoder.layers.self_attention.linear_qkv.weight", 1)
    assert box_in(qkv, (2, 192, 64), "decoder.layers.1.self_attention.linear_qkv.weight", (4, 3, 16, 64)) == Box(
        (1, 0, 0), (1, 192, 64)
    )
    word = "embedding.word_embeddings.weight"
    assert box_in(Location(word, None), (128, 64), word, (100, 64)) == Box((0, 0), (100, 64))
    for shape in ((101, 32), (129, 64)):
        with pytest.raises(UserError, match=r"embedding.word_embeddings.weight has shape .* by the flags of the model"):
            box_in(Location(word, None), (128, 64), word, shape)
    with pytest.raises(UserError, match="has shape"):  # only a vocabulary is padded
        box_in(
            Location("embedding.position_embeddings.weight", None),
            (32, 8),
            "embedding.position_embeddings.weight",
            (31, 8),
        )


def test_merged_dimensions() -> None:
    assert merges_into((4, 3, 16, 64), (192, 64)) and merges_into((2, 8, 16), (16, 16)) and merges_into((5,), (5,))
    assert (
        not merges_into((4, 3, 16, 64), (64, 192)) and not merges_into((6, 4), (4, 6)) and not merges_into((4,), (5,))
    )
