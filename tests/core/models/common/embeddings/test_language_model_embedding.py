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


def test_token_types_and_the_norm() -> None:
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, fp64=True, embedding_norm=True)
    made = LanguageModelEmbedding(config, 5, 4, num_tokentypes=2).eval()
    types = torch.tensor([[0, 1, 1], [1, 1, 0]])
    assert made.position_embeddings is not None and made.tokentype_embeddings is not None
    tables = [made.word_embeddings.weight[IDS.t()], made.position_embeddings.weight[:3, None]]
    added = sum(tables) + made.tokentype_embeddings.weight[types.t()]
    assert torch.allclose(made(IDS, POSITIONS, None, types), torch.nn.functional.layer_norm(added, (8,)), atol=1e-12)


def test_token_types_are_given_to_a_model_that_has_them() -> None:
    with pytest.raises(UserError, match="tokentype_ids are given, but the model was built with num_tokentypes 0"):
        embedding()(IDS, POSITIONS, None, IDS)
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
    with pytest.raises(UserError, match="tokentype_ids are missing, but the model was built with num_tokentypes 2"):
        LanguageModelEmbedding(config, 5, 4, num_tokentypes=2)(IDS, POSITIONS)


def test_a_norm_needs_the_tokens_of_its_rank() -> None:
    settings = {"sequence_parallel": True, "tensor_model_parallel_size": 2, "embedding_norm": True}
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, **settings)
    with pytest.raises(UserError, match="needs scatter_to_sequence_parallel"):
        LanguageModelEmbedding(config, 5, 4, scatter_to_sequence_parallel=False)
