"""Which parts the layers of the two stacks have."""

import logging

import pytest

from megatron.core.models.T5 import t5_spec
from megatron.core.transformer.cross_attention import CrossAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.utils import warn


def test_layers_of_the_two_stacks() -> None:
    encoder = t5_spec.get_t5_encoder_with_local_block_spec(3).layer_specs
    decoder = t5_spec.get_t5_decoder_with_local_block_spec(2).layer_specs
    assert encoder is not None and decoder is not None and (len(encoder), len(decoder)) == (3, 2)
    assert encoder[0].submodules.self_attention.params == {"attn_mask_type": AttnMaskType.padding}
    assert encoder[0].submodules.cross_attention is IdentityOp
    assert decoder[0].submodules.self_attention.params == {"attn_mask_type": AttnMaskType.causal}
    assert decoder[0].submodules.cross_attention.module is CrossAttention


def test_specs_of_another_backend_say_whose_layers_these_are(caplog: pytest.LogCaptureFixture) -> None:
    warn._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            made = t5_spec.get_t5_decoder_with_transformer_engine_block_spec(2)
    assert made == t5_spec.get_t5_decoder_with_local_block_spec(2)
    assert len(caplog.records) == 1 and "layers of this package" in caplog.text
    assert len(t5_spec.get_t5_encoder_with_transformer_engine_block_spec(4).layer_specs or ()) == 4
