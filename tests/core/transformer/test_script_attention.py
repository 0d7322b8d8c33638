"""Attention classes that scripts wrote for Megatron-LM, in a layer spec, against ours."""

import math
from typing import Any

import pytest
import torch
from support.tiny_models import tiny_config
from torch import Tensor, nn

from megatron.core.exceptions import UserError
from megatron.core.inference.static_context import StaticInferenceContext
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams


class PlainAttention(nn.Module):
    """Unfused attention, written from Megatron-LM's documentation."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        self.scale = 1.0 / math.sqrt(config.kv_channels)
        self.seen: list[tuple[Any, Any]] = []

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        self.seen.append((attn_mask_type.name, packed_seq_params))
        copies = query.shape[2] // key.shape[2]
        key, value = (heads.repeat_interleave(copies, dim=2) for heads in (key, value))
        scores = torch.einsum("sbad,tbad->bast", query, key) * self.scale
        scores = scores.masked_fill(attention_mask, -10000.0)
        return torch.einsum("bast,tbad->sbad", scores.softmax(-1), value).flatten(2)


class Forwarding(PlainAttention):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **kwargs: Any) -> Tensor:
        return super().forward(query, key, value, attention_mask, **kwargs)


def model_of(core: type[nn.Module] | None) -> GPTModel:
    config = tiny_config(num_query_groups=2)
    spec = get_gpt_layer_local_spec()
    if core is not None:
        spec.submodules.self_attention.submodules.core_attention = core
    return GPTModel(config, spec, 32, 8)


@pytest.mark.parametrize("core", [PlainAttention, Forwarding])
def test_a_scripts_attention_is_called_as_in_megatron_lm(core: type[PlainAttention]) -> None:
    tokens, positions = torch.randint(32, (2, 8)), torch.arange(8)[None]
    theirs, ours = model_of(core), model_of(None)
    theirs.load_state_dict(ours.state_dict())
    for mask in (None, torch.ones(1, 1, 8, 8).tril() < 0.5, torch.rand(2, 1, 8, 8) < 0.3):
        hides = None if mask is None else mask & ~torch.eye(8, dtype=torch.bool)
        found, expected = (model(tokens, positions, hides, labels=tokens) for model in (theirs, ours))
        torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-12)
    attention = theirs.decoder.layers[0].self_attention.core_attention
    assert isinstance(attention, core) and attention.seen == [("causal", None)] * 3


def test_what_such_a_class_cannot_be_told_is_refused() -> None:
    tokens, positions = torch.randint(32, (1, 8)), torch.arange(8)[None]
    model = model_of(PlainAttention)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor([0, 3, 8], dtype=torch.int32), max_seqlen_q=5)
    with pytest.raises(UserError, match="PlainAttention as core_attention of a layer spec: not with packed documents"):
        model(tokens, positions, None, labels=tokens, packed_seq_params=packed)
    context = StaticInferenceContext(1, 8)
    with pytest.raises(UserError, match=r"PlainAttention .* inference_context"):
        model(tokens, context.begin(torch.tensor([8]), 8), inference_context=context)
