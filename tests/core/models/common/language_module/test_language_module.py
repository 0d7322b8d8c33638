"""The record of a call's tokens."""

from typing import Any

import pytest
import torch

from megatron.core.exceptions import UserError
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tokens import RngPosition, Tokens
from megatron.core.transformer.transformer_config import TransformerConfig

IDS, HIDDEN = torch.zeros(2, 6, dtype=torch.int64), torch.zeros(6, 2, 8)


def described(tokens: Tokens | None = None, **fields: Any) -> Tokens:
    module = LanguageModule(TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2))
    names = ("input_ids", "hidden", "position_ids", "packed", "max_positions", "rng_position")
    return module.describe_tokens(tokens, **{**dict.fromkeys(names), **fields})


def test_shapes_say_what_nobody_else_does() -> None:
    assert described(input_ids=IDS) == described(hidden=HIDDEN) == Tokens(6, 2)


def test_arguments_fill_in_the_record() -> None:
    boundaries, positions = torch.tensor([0, 2, 6], dtype=torch.int32), torch.arange(6)[None]
    packed = PackedSeqParams("thd", boundaries, boundaries, max_seqlen_q=4, max_seqlen_kv=4)
    found = described(input_ids=IDS[:1], packed=packed, position_ids=positions)
    assert found.cu_seqlens is boundaries and found.max_seqlen == 4 and found.positions is positions


def test_a_position_in_the_tokens_counts_before_the_micro_batchs() -> None:
    own, other = RngPosition(1, 2, 3), RngPosition(1, 2, 4)
    assert described(Tokens(6, 2, random=own), rng_position=other).random is own
    assert described(Tokens(6, 2), rng_position=other).random is other


def test_rows_beyond_the_learned_positions_are_refused() -> None:
    described(input_ids=IDS, max_positions=6)
    with pytest.raises(UserError, match="6 tokens in a row, but the model has learned positions for 5"):
        described(input_ids=IDS, max_positions=5)
    described(input_ids=IDS, max_positions=5, position_ids=torch.zeros(1, 6, dtype=torch.int64))
