"""Random positions of a layer's tokens, and how they are divided among sequence parallel ranks."""

import torch

from megatron.core.communication.collectives import PlannedGroup
from megatron.core.ops.dropout.dropout import dropout_tokens
from megatron.core.tokens import RngPosition, Tokens
from megatron.core.transformer.layer_inputs import LayerInputs, as_heads, encoder_states_of, sequence_slice

TOKENS = Tokens(4, 2, random=RngPosition(1, 2, 3))


def test_sequence_parallel_ranks_divide_the_tokens_in_memory_order() -> None:
    whole = dropout_tokens(TOKENS, torch.device("cpu"))
    parts = [sequence_slice(whole, PlannedGroup((0, 1), rank)) for rank in (0, 1)]
    assert torch.equal(torch.cat([part.index for part in parts if part is not None]), whole.index)
    assert sequence_slice(None, PlannedGroup((0, 1), 0)) is None


def test_positions_of_attention_and_of_hidden_states() -> None:
    whole = dropout_tokens(TOKENS, torch.device("cpu"))
    part = sequence_slice(whole, PlannedGroup((0, 1), 1))
    inputs = LayerInputs(TOKENS, dropout=whole, hidden_dropout=part)
    attention, hidden = inputs.dropout_position(3, "attention"), inputs.hidden_dropout_position(3, "mlp")
    assert attention is not None and attention.tokens is whole and (attention.layer, attention.site) == (3, "attention")
    assert hidden is not None and hidden.tokens is part
    alone = LayerInputs(TOKENS, dropout=whole).hidden_dropout_position(3, "mlp")
    assert alone is not None and alone.tokens is whole
    assert LayerInputs(TOKENS).dropout_position(1, "mlp") is None is LayerInputs(TOKENS).hidden_dropout_position(1, "x")


def test_heads_are_a_view() -> None:
    flat = torch.arange(4 * 2 * 6).view(8, 6)
    heads = as_heads(flat, TOKENS, 3)
    assert heads.shape == (4, 2, 3, 2) and heads.data_ptr() == flat.data_ptr()


def test_sites_of_an_encoder_are_not_those_of_the_decoder() -> None:
    dropout = dropout_tokens(TOKENS, torch.device("cpu"))
    encoder, decoder = (LayerInputs(TOKENS, dropout=dropout, stack=stack) for stack in ("encoder.", ""))
    for method in ("dropout_position", "hidden_dropout_position"):
        sites = [getattr(inputs, method)(1, "mlp").site for inputs in (encoder, decoder)]
        assert sites == ["encoder.mlp", "mlp"]


def test_encoder_states_of_one_rank() -> None:
    states = torch.randn(4, 2, 3)
    encoder = encoder_states_of(states, TOKENS, None)
    assert torch.equal(encoder.hidden_states, states.flatten(0, 1)) and encoder.tokens is TOKENS
