"""Models for conversion: canonical shapes without memory, and weights from a checkpoint."""

from pathlib import Path

import pytest
import torch
from conversion.saved_models import LLAMA, VOCAB_SIZE, build_random, config_of, save_checkpoint

from megatron.conversion.model import build_on, canonical_shapes, load_on_cpu, vocab_size_of
from megatron.core.dist_checkpointing.checkpoint import open_checkpoint
from megatron.core.dist_checkpointing.chunk import parameter_chunk
from megatron.core.dist_checkpointing.writing import save
from megatron.core.exceptions import UserError
from pretrain_gpt import build_model


def test_canonical_shapes_have_no_padding_of_the_vocabulary() -> None:
    shapes = canonical_shapes(config_of(f"{LLAMA} --make-vocab-size-divisible-by 64"), build_model, VOCAB_SIZE)
    assert shapes["embedding.word_embeddings.weight"] == (VOCAB_SIZE, 32)
    assert shapes["decoder.layers.1.self_attention.linear_qkv.weight"] == (2, 3, 16, 32)


def test_a_model_on_the_meta_device_has_no_memory() -> None:
    model = build_on(torch.device("meta"), config_of(LLAMA), build_model, VOCAB_SIZE)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_weights_come_from_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_checkpoint(LLAMA, tmp_path) / "iter_0000001")
    assert vocab_size_of(checkpoint) == VOCAB_SIZE
    config = config_of(f"{LLAMA} --no-initialization")
    loaded, expected = load_on_cpu(checkpoint, config, build_model, VOCAB_SIZE), build_random(config_of(LLAMA))
    assert not loaded.training
    for (name, found), parameter in zip(loaded.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter_chunk(found).flat, parameter_chunk(parameter).flat), name


def test_a_checkpoint_without_an_embedding_is_refused(tmp_path: Path) -> None:
    saved = save(tmp_path, [], step=1, common={}, config={}, layout={})
    with pytest.raises(UserError, match=r"iter_0000001 has no embedding.word_embeddings.weight"):
        vocab_size_of(open_checkpoint(saved.folder))
