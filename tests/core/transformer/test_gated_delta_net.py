"""Gated delta nets in models: packed documents, causality, recompute, refusals.

`tests/core/models/test_model_options_against_transformers.py` compares their numbers with Qwen3-Next, `tests/parity`
layouts with one process.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.exact_gradients import assert_equal, gradients, kept_by, recomputing
from support.kept_memory import kept_bytes
from support.tiny_models import randomize, tiny_config, tiny_gpt

from megatron.core.exceptions import UserError
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import gpt_layer_spec_of
from megatron.core.tokens import Tokens
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.layer_inputs import LayerInputs
from megatron.core.utils.recomputed import DiscardedResults, Recomputed

VOCABULARY = 37
SIZES = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 3,
}


def build(**settings: Any) -> GPTModel:
    config = tiny_config(**{"ffn_hidden_size": 24, "normalization": "RMSNorm", **SIZES, **settings})
    model = tiny_gpt(config, position_embedding_type="rope")
    randomize(model)
    return model


@pytest.fixture(scope="module")
def model() -> GPTModel:
    return build()


def test_layers_take_turns(model: GPTModel) -> None:
    mixers = [type(layer.self_attention).__name__ for layer in model.decoder.layers]
    assert mixers == ["GatedDeltaNet", "SelfAttention"]


def test_packed_documents_do_not_see_each_other() -> None:
    model = build(linear_attention_freq=None)  # all layers
    lengths = [5, 1, 10]
    ids = torch.randint(VOCABULARY, (1, 16), generator=torch.Generator().manual_seed(1))
    borders = torch.tensor([0, 5, 6, 16], dtype=torch.int32)
    packed = model(ids, tokens=Tokens(16, 1, cu_seqlens=borders, max_seqlen=10))
    alone = torch.cat([model(part) for part in ids.split(lengths, 1)], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-11, atol=1e-11)
    assert (packed - model(ids)).abs().max() > 1e-3


def test_a_token_sees_no_later_one(model: GPTModel) -> None:
    ids = torch.randint(VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(1))
    other = ids.clone()
    other[:, 6:] = (ids[:, 6:] + 1) % VOCABULARY
    changed = (model(ids) - model(other)).abs().amax(-1)[0]
    assert (changed[:6] < 1e-12).all() and (changed[6:] > 1e-3).all()


def test_recompute_changes_no_bit_and_keeps_less() -> None:
    chosen = recomputing("core_attn", "layernorm")
    plain, recomputed = build(linear_attention_freq=None), build(linear_attention_freq=None, **chosen)
    assert_equal(gradients(recomputed), gradients(plain))
    assert kept_by(recomputed) < 0.7 * kept_by(plain)


def test_results_of_convolution_and_gated_norm_are_not_kept() -> None:
    """With operations that keep their arguments alone, as the kernels of GPUs do."""
    model = build(linear_attention_freq=None, fp64=False)
    ids = torch.randint(VOCABULARY, (1, 16), generator=torch.Generator().manual_seed(1))
    mixers: list[Any] = [layer.self_attention for layer in model.decoder.layers]
    for mixer in mixers:
        recurrence = mixer.backend.recurrence
        names = ("causal_conv", "gated_rms_norm", "delta_rule_attention")
        recurrence = replace(recurrence, **{name: Recomputed(getattr(recurrence, name)) for name in names})
        mixer.backend = mixer.core_attention.backend = mixer.out_norm.backend = replace(
            mixer.backend, recurrence=recurrence
        )
    kept = kept_bytes(lambda: model(ids).sum())
    for mixer in mixers:
        for name in ("attend_to_convolved", "project_gated"):
            setattr(mixer, name, KeptResults(getattr(mixer, name)))
    channels = 4 * (2 * 3 + 2 * 5) + 4 * 2 * 5  # of the convolution, and of the gated norm
    assert kept_bytes(lambda: model(ids).sum()) - kept == len(mixers) * 16 * channels * 4


class KeptResults:
    """`DiscardedResults` that discard nothing."""

    def __init__(self, discarded: DiscardedResults) -> None:
        self.within = discarded.within

    def compute(self, function: Callable[..., torch.Tensor], *inputs: Any) -> torch.Tensor:
        return function(*inputs)

    def __call__(self, *inputs: Any) -> Any:
        return self.within(*inputs)


def test_what_a_state_cannot_respect_is_refused(model: GPTModel) -> None:
    ids = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(UserError, match="gated_delta_net layers cannot follow an attention_mask"):
        model(ids, None, torch.zeros(1, 1, 4, 4, dtype=torch.bool))
    with pytest.raises(UserError, match="gated_delta_net layers are causal"):
        gpt_layer_spec_of(model.config, 1, AttnMaskType.padding)


def test_half_precision_follows_float32() -> None:
    both = {"fp64": False}, {"fp64": False, "bf16": True, "params_dtype": torch.bfloat16}
    layers = [build(**settings).decoder.layers[0].self_attention for settings in both]
    layers[0].load_state_dict({name: value.float() for name, value in layers[1].state_dict().items()})
    hidden = torch.randn(12, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    inputs = LayerInputs(Tokens(6, 2))
    found, wanted = layers[1](hidden, inputs)[0], layers[0](hidden.float(), inputs)[0]
    assert found.dtype is torch.bfloat16 and (found - wanted).abs().max() < 0.05 * wanted.abs().max()
