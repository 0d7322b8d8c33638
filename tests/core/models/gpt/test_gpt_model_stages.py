"""A GPT cut into stages, run one after the other in this process, against the whole one."""

from typing import Any

import torch
from support.tiny_models import tiny_config

from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec


class Padded(int):
    """A rounded up vocabulary that knows what from."""

    unpadded = 37


def build(stage: int, stages: int, vocab_size: int = 37, **model: Any) -> GPTModel:
    config = tiny_config(
        num_layers=4,
        hidden_dropout=0.2,
        attention_dropout=0.2,
        embedding_init_method_std=0.5,
        pipeline_model_parallel_size=stages,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size,
        16,
        pre_process=stage == 0,
        post_process=stage == stages - 1,
        pg_collection=ProcessGroupCollection.from_grid(RankGrid(stages, pipeline=stages), stage),
        **model,
    )


def test_a_shared_weight_says_who_holds_it() -> None:
    first, last = (build(stage, 2, share_embeddings_and_output_weights=True) for stage in range(2))
    word, copy = first.embedding.word_embeddings.weight, last.output_layer.weight
    assert first.shared_embedding_or_output_weight() is word and last.shared_embedding_or_output_weight() is copy
    assert word.info.name == copy.info.name == "embedding.word_embeddings.weight"
    assert word.info.tied and copy.info.tied and word.info.box == copy.info.box
    alone = build(0, 1, share_embeddings_and_output_weights=True)
    assert not alone.embedding.word_embeddings.weight.info.tied
    assert alone.output_layer.borrowed_parameters == (alone.embedding.word_embeddings.weight,)
    middle = build(1, 4, share_embeddings_and_output_weights=True)
    assert middle.shared_embedding_or_output_weight() is None
    untied = build(1, 2).output_layer.weight.info
    assert untied.name == "output_layer.weight" and not untied.tied


def test_a_rounded_up_vocabulary_keeps_its_rows() -> None:
    model = build(0, 1, Padded(48))
    assert model.embedding.word_embeddings.weight.shape == (48, 16) and model.vocab_size == 37
    assert model.output_layer.weight.info.global_shape == (37, 16)
    assert model(torch.zeros(2, 12, dtype=torch.int64)).shape == (2, 12, 37)
