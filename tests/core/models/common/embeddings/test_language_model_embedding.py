"""Embedding of words and positions, with one rank."""

from typing import Any

import pytest
import torch

from megatron.core.exceptions import UserError
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer.transformer_config import TransformerConfig

IDS, POSITIONS = torch.tensor([[3, 1, 2], [0, 4, 4]]), torch.tensor([[0, 1, 2]])


def embedding(kind: Any = "learned_absolute", **fields: Any) -> LanguageModelEmbedding:
    settings = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "use_cpu_initialization": True, **fields}
    return LanguageModelEmbedding(TransformerConfig(**settings), 5, 4, kind).eval()


def test_words_and_positions_are_added() -> None:
    made = embedding(embedding_multiplier=3.0)
    assert made.position_embeddings is not None
    words, places = made.word_embeddings.weight, made.position_embeddings.weight
    expected = 3.0 * words[IDS].transpose(0, 1) + places[POSITIONS].transpose(0, 1)
    torch.testing.assert_close(made(IDS, POSITIONS), expected)  # [s, b, h]


def test_without_learned_positions_there_is_no_table() -> None:
    made = embedding("rope")
    assert made.position_embeddings is None
    assert torch.equal(made(IDS, POSITIONS), made.word_embeddings.weight[IDS.t()])


def test_dropout_needs_a_position() -> None:
    made = embedding("rope", hidden_dropout=0.9).train()
    assert torch.equal(made(IDS, POSITIONS, None), made.word_embeddings.weight[IDS.t()])


def test_the_residual_stream_starts_in_float32() -> None:
    made = embedding(bf16=True, params_dtype=torch.bfloat16, fp32_residual_connection=True)
    assert made(IDS, POSITIONS).dtype is torch.float32


def test_token_types_are_refused() -> None:
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
    with pytest.raises(UserError, match="num_tokentypes 2; use 0"):
        LanguageModelEmbedding(config, 5, 4, num_tokentypes=2)
