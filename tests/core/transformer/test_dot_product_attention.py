"""Which kernels compute attention, as the log says it."""

from unittest import mock

import torch
from support.fake_transformer_engine import FAKE

from megatron.core import backends
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.dot_product_attention import DotProductAttention, describe_kernels
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.layer_inputs import plain_causal_mask
from megatron.core.transformer.transformer_config import TransformerConfig


def config(**settings) -> TransformerConfig:
    settings = {"fp64": True, "hidden_dropout": 0.0, "attention_dropout": 0.0} | settings
    return TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=4, use_cpu_initialization=True, **settings
    )


def gpt(**settings) -> GPTModel:
    return GPTModel(config(**settings), get_gpt_layer_local_spec(), vocab_size=37, max_sequence_length=16)


def test_kernels_in_use_are_told() -> None:
    lines = describe_kernels(
        gpt(attention_dropout=0.1, window_size=(3, 0), window_attn_skip_freq=2), torch.device("cpu")
    )
    assert lines == [
        "backend local: plain torch except dropout masks",
        "attention of layers 1 to 2 on cpu: training: plain torch, because SDPA (CPU flash) cannot draw the "
        "masks of attention dropout 0.1 (--attention-dropout 0 is faster); evaluation: SDPA (CPU flash)",
    ]


def test_linear_layers_in_pieces_are_not_said_to_be_transformer_engines(monkeypatch) -> None:
    monkeypatch.setattr(backends, "find_engine", lambda: FAKE)
    shared = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "transformer_impl": "transformer_engine"}
    cut, whole = (config(**shared, tp_comm_overlap=overlap) for overlap in (True, False))
    lines = [
        describe_kernels(DotProductAttention(each, 1, AttnMaskType.causal, "self"), torch.device("cpu"))[0]
        for each in (cut, whole)
    ]
    assert lines[0] == lines[1] + "; ours, too: linear layers whose products are cut (--tp-comm-overlap)"
    assert lines[1].startswith("backend transformer_engine fake: its linear layers")


def test_a_causal_layer_does_not_read_a_mask_of_later_tokens() -> None:
    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, attention_dropout=0.0)
    query, key, value = torch.randn(3, 6, 2, 2, 8, generator=torch.Generator().manual_seed(1))
    mask = plain_causal_mask((2, 1, 6, 6), query.device)
    for kind, reads in ((AttnMaskType.causal, False), (AttnMaskType.no_mask, True)):
        layer = DotProductAttention(config, 1, kind, "self")
        masks = []
        with mock.patch.object(layer, "plan", wraps=layer.plan) as plan:
            output = layer(query, key, value, mask)
            masks += [call.args[1].mask for call in plan.kernel_of.call_args_list]
        assert [found is not None for found in masks] == [reads]
        torch.testing.assert_close(output, layer(query, key, value, mask.clone()))
