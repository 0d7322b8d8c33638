"""Impossible sizes of token mixers are named, with what would work."""

from typing import Any

import pytest
from support.command_lines import configured, problems_of

from megatron.core.exceptions import UserError
from megatron.core.transformer.config.token_mixers import validate
from megatron.core.transformer.transformer_config import TransformerConfig

SMALL: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
DELTA = {"experimental_attention_variant": "gated_delta_net"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"linear_num_value_heads": 40}, "linear_num_value_heads 40 is no multiple of linear_num_key_heads 16; 32 or"),
        ({"linear_num_value_heads": 8}, "is no multiple of linear_num_key_heads 16; 16 is"),
        ({"linear_num_value_heads": None}, "a gated delta net needs linear_num_value_heads"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim 0 must be at least 1"),
        ({"linear_attention_freq": 0}, "linear_attention_freq 0 must be at least 1"),
        ({"linear_attention_freq": [1]}, "linear_attention_freq has 1 entries for num_layers 2; give one for each"),
        ({"linear_attention_freq": [1, 2]}, "has a 1 for a layer with linear attention, a 0 for any other"),
        (
            {"linear_num_key_heads": 6, "linear_num_value_heads": 6, "tensor_model_parallel_size": 4},
            "tensor_model_parallel_size 4 does not divide linear_num_key_heads 6; use 3 or 6",
        ),
        (
            {"context_parallel_size": 8, "tensor_model_parallel_size": 4},
            "context_parallel_size 8 does not divide the 4 key heads of a gated delta net (linear_num_key_heads) on a "
            "tensor parallel rank; use 4",
        ),
    ],
)
def test_impossible_values_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        TransformerConfig(**SMALL | DELTA | fields)
    assert message in str(caught.value)


def test_flags_of_sparse_attention() -> None:
    flags = "--experimental-attention-variant dsa --multi-latent-attention --dsa-indexer-n-heads 4 "
    sizes = (
        "--dsa-indexer-head-dim 64 --dsa-indexer-topk 16 --dsa-indexer-loss-coeff 0.01 --dsa-indexer-use-sparse-loss"
    )
    options = "--no-dsa-indexer-scoring-relu --dsa-indexer-rope-interleaved --dsa-indexer-k-norm-epsilon 1e-6"
    made = configured(f"{flags} {sizes} {options} --dsa-kernel-backend none").transformer
    assert made.dsa_indexer_loss_coeff == 0.01 and made.dsa_indexer_use_sparse_loss
    assert not made.dsa_indexer_scoring_relu and made.dsa_indexer_rope_interleaved
    (problem,) = problems_of(f"{flags} {sizes} --window-size 4,0")
    assert "--window-size 4 0 does not go with dsa; leave it out" in problem


def test_defaults_have_no_problem() -> None:
    assert not list(validate(TransformerConfig(**SMALL)))
    assert not list(validate(TransformerConfig(**SMALL, **DELTA)))


def test_flags() -> None:
    flags = "--experimental-attention-variant gated_delta_net --linear-attention-freq ([1]*1+[0]*1) --num-layers 2"
    sizes = "--linear-conv-kernel-dim 3 --linear-key-head-dim 6 --linear-value-head-dim 5 --linear-num-key-heads 2"
    made = configured(f"{flags} {sizes} --linear-num-value-heads 4").transformer
    assert made.linear_attention_freq == [1, 0] and made.linear_num_value_heads == 4
    (problem,) = problems_of(f"{flags} --linear-num-value-heads 5")
    assert "--linear-num-value-heads 5 is no multiple of --linear-num-key-heads 16; 16 is" in problem
