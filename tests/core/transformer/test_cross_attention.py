"""Cross attention of one rank, against its formula."""

from typing import Any

import pytest
import torch

from megatron.core.exceptions import UserError
from megatron.core.ops.dropout.dropout import dropout_tokens
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tokens import RngPosition, Tokens
from megatron.core.transformer.cross_attention import CrossAttention, CrossAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.layer_inputs import EncoderStates, LayerInputs
from megatron.core.transformer.transformer_config import TransformerConfig


def cross_attention(**fields: Any) -> CrossAttention:
    settings = {"fp64": True, "use_cpu_initialization": True, "attention_dropout": 0.0, **fields}
    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=4, kv_channels=6, **settings)
    parts = CrossAttentionSubmodules(ColumnParallelLinear, ColumnParallelLinear, DotProductAttention, RowParallelLinear)
    made = CrossAttention(config, parts, layer_number=1)
    with torch.no_grad():
        for number, parameter in enumerate(made.parameters()):
            parameter.copy_(random(*parameter.shape, seed=number))
    return made


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def encoder_inputs(states: torch.Tensor, hidden_keys: torch.Tensor | None = None, **more: Any) -> LayerInputs:
    """Returns the inputs of a decoder of 3 tokens that reads an encoder of 5, in 2 rows."""
    return LayerInputs(Tokens(3, 2), encoder=EncoderStates(states, Tokens(5, 2), hidden_keys), **more)


def test_cross_attention_is_its_formula() -> None:
    made, hidden, states = cross_attention(), random(6, 16, seed=7), random(10, 16, seed=8)
    hidden_keys = torch.zeros(2, 1, 1, 5, dtype=torch.bool)
    hidden_keys[1, ..., 3:] = True
    output, bias = made(hidden, encoder_inputs(states, hidden_keys))
    query = (hidden @ made.linear_q.weight.t() + made.linear_q.bias).view(3, 2, 4, 6)
    rows = (states @ made.linear_kv.weight.t() + made.linear_kv.bias).view(5, 2, 4, 2, 6)  # for each head: key, value
    scores = torch.einsum("sbad,tbad->bast", query, rows[..., 0, :]) / 6**0.5
    weights = scores.masked_fill(hidden_keys, -torch.inf).softmax(-1)
    context = torch.einsum("bast,tbad->sbad", weights, rows[..., 1, :]).reshape(6, 24)
    torch.testing.assert_close(output, context @ made.linear_proj.weight.t(), rtol=1e-12, atol=1e-12)
    assert bias is made.linear_proj.bias


def test_cross_attention_has_no_order_of_tokens() -> None:
    """Windows, chunks, ALiBi and relative biases belong to attention among the tokens of one sequence."""
    plain, hidden, states = cross_attention(), random(6, 16, seed=7), random(10, 16, seed=8)
    special = cross_attention(window_size=(0, 0), attention_chunk_size=1, alibi=True, relative_bias=True)
    assert torch.equal(plain(hidden, encoder_inputs(states))[0], special(hidden, encoder_inputs(states))[0])


def test_dropout_of_cross_attention_knows_query_and_key_by_their_indices() -> None:
    """Each row alone draws what it draws beside the other, at any lengths."""
    made = cross_attention(attention_dropout=0.5).train()
    hidden, states = random(3, 2, 16, seed=7), random(5, 2, 16, seed=8)

    def run(rows: slice, first: int) -> torch.Tensor:
        count = len(range(2)[rows])
        place = RngPosition(seed=3, iteration=2, first_sample=first)
        own, other = (Tokens(length, count, random=place) for length in (3, 5))
        encoder = EncoderStates(states[:, rows].flatten(0, 1), other, None, dropout_tokens(other, states.device))
        inputs = LayerInputs(own, dropout=dropout_tokens(own, states.device), encoder=encoder)
        return made(hidden[:, rows].flatten(0, 1), inputs)[0].view(3, count, 16)

    both = run(slice(0, 2), 4)
    torch.testing.assert_close(both[:, :1], run(slice(0, 1), 4), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(both[:, 1:], run(slice(1, 2), 5), rtol=1e-12, atol=1e-12)
    assert not torch.equal(
        both, made.eval()(hidden.flatten(0, 1), encoder_inputs(states.flatten(0, 1)))[0].view(3, 2, -1)
    )


@pytest.mark.parametrize("field", [{"num_query_groups": 2}, {"attention_output_gate": True}])
def test_what_cross_attention_refuses(field: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(field))):
        cross_attention(**field)
