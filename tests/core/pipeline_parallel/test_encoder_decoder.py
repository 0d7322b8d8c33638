"""Stages of an encoder and a decoder: where each layer is, what travels, and what cannot be cut."""

from typing import Any

import pytest
import torch

from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.pipeline_parallel.p2p_communication import MessageFormat, message_format_of
from megatron.core.pipeline_parallel.stage_map import stage_map
from megatron.core.pipeline_parallel.stages import (
    StatesIn,
    decoder_ranks,
    decoder_stage,
    embedding_ranks,
    encoder_ranks,
    states_into_stages,
)
from megatron.core.transformer.transformer_config import TransformerConfig


def config(size: int, encoder: int = 4, decoder: int = 4, **fields: Any) -> TransformerConfig:
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_layers": decoder, "num_encoder_layers": encoder}
    return TransformerConfig(**sizes, pipeline_model_parallel_size=size, pipeline_dtype=torch.float32, **fields)


def parts(made: TransformerConfig) -> list[tuple[list[int], list[int], bool, bool]]:
    """Returns for each stage: layers of the encoder, of the decoder, whether it has the embedding, the loss."""
    return [
        (list(stage.encoder_layers), list(stage.layers), stage.embedding, stage.loss)
        for stage in stage_map(made).stages
    ]


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (config(1, 2, 3), [([1, 2], [1, 2, 3], True, True)]),
        (config(2, 2, 1), [([1, 2], [], True, False), ([], [1], True, True)]),
        (
            config(3, 2, 4),
            [([1, 2], [], True, False), ([], [1, 2], True, False), ([], [3, 4], False, True)],
        ),
        (
            config(4, 6, 2, pipeline_model_parallel_split_rank=2),
            [
                ([1, 2, 3], [], True, False),
                ([4, 5, 6], [], False, False),
                ([], [1], True, False),
                ([], [2], False, True),
            ],
        ),
        (
            config(4, 3, 2, pipeline_model_parallel_layout="Ett|t|E|ttL"),
            [([1, 2], [], True, False), ([3], [], False, False), ([], [], True, False), ([], [1, 2], False, True)],
        ),
    ],
)
def test_encoder_stages_come_first(made: TransformerConfig, expected: Any) -> None:
    assert parts(made) == expected


def test_the_stacks_have_stages_in_proportion_to_their_layers() -> None:
    assert [decoder_stage(config(4, *layers)) for layers in ((4, 4), (12, 4), (2, 30))] == [2, 3, 1]
    assert decoder_stage(TransformerConfig(num_layers=4, hidden_size=8, num_attention_heads=2)) is None


def test_ranks_with_copies() -> None:
    made = config(4, 2, 2)
    assert (encoder_ranks(made), decoder_ranks(made)) == ([0, 1], [2, 3])
    assert (embedding_ranks(made, True), embedding_ranks(made, False)) == ([0, 2, 3], [0, 2])
    groups = [
        ProcessGroupCollection.from_grid(
            RankGrid(8, tensor=2, pipeline=4),
            rank,
            encoder_ranks=lambda ranks: [ranks[place] for place in encoder_ranks(made)],
            decoder_ranks=lambda ranks: [ranks[place] for place in decoder_ranks(made)],
        )
        for rank in (1, 6)
    ]
    assert (groups[0].ranks("encoder_pp"), groups[0].rank("decoder_pp")) == ((1, 3), -1)
    assert (groups[1].ranks("decoder_pp"), groups[1].rank("decoder_pp")) == ((4, 6), 1)


def test_the_encoders_output_travels_with_the_decoders_states() -> None:
    made = config(4, 2, 2)
    expected = [StatesIn(0, 1), StatesIn(0, 1), StatesIn(0, 1), StatesIn(1, 1)]
    assert list(states_into_stages(made, stage_map(made))) == expected
    groups = ProcessGroupCollection.from_grid(RankGrid(4, pipeline=4), 0)
    made_format = message_format_of(made, groups, torch.device("cpu"), 12, 2, 5)
    assert [made_format.shape_of(states)[0] for states in expected] == [12, 12, 12, 17]


def test_both_lengths_are_needed_and_divide() -> None:
    groups = ProcessGroupCollection.from_grid(RankGrid(4, tensor=2, pipeline=2), 0)
    made = config(2, tensor_model_parallel_size=2, sequence_parallel=True)

    def format_of(of: TransformerConfig, *lengths: int | None) -> MessageFormat:
        return message_format_of(of, groups, torch.device("cpu"), lengths[0], 2, lengths[1])

    assert (format_of(made, 8, 6).shape, format_of(made, 8, 6).encoder_length) == ((3, 2, 8), 4)
    with pytest.raises(UserError, match="needs decoder_seq_length"):
        format_of(made, 8, None)
    with pytest.raises(UserError, match="decoder_seq_length 5 is not divisible by 2"):
        format_of(made, 8, 5)
    plain = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, pipeline_model_parallel_size=2)
    with pytest.raises(UserError, match="one stack"):
        format_of(plain, 8, 6)


@pytest.mark.parametrize(
    ("size", "fields", "named"),
    [
        (4, {"virtual_pipeline_model_parallel_size": 2}, "virtual_pipeline_model_parallel_size 2: an encoder"),
        (4, {"pipeline_schedule": "zb-v"}, "pipeline_schedule zb-v: an encoder"),
        (2, {"num_layers_in_first_pipeline_stage": 1}, "num_layers_in_first_pipeline_stage 1"),
        (2, {"account_for_loss_in_pipeline_split": True}, "account_for_loss_in_pipeline_split"),
        (4, {"pipeline_model_parallel_split_rank": 4}, "must be from 1 to 3"),
        (4, {"pipeline_model_parallel_split_rank": 1}, "4 layers of the decoder are not divisible by its 3"),
        (5, {}, "layers of the decoder are not divisible"),
        (2, {"pipeline_model_parallel_layout": "Etttt|ttttL"}, "each begin a stage with E"),
        (2, {"pipeline_model_parallel_layout": "Ettt|EtttttL"}, "3 layers of the encoder, which has 4"),
        (2, {"pipeline_model_parallel_layout": "Etttt|Ett|ttL"}, "has 3 stages"),
        (2, {"pipeline_model_parallel_layout": "Etttt|Etttt"}, "must end with L"),
        (3, {"pipeline_model_parallel_layout": "Etttt|EttttL|"}, "must end with L, the loss, on its last stage"),
        (2, {"pipeline_model_parallel_layout": "Etttt|EttttmL"}, "multi-token prediction"),
        (2, {"pipeline_model_parallel_layout": "Etttt?"}, "out of place"),
        (
            3,
            {"pipeline_model_parallel_layout": "Ett|tt|EttttL", "pipeline_model_parallel_split_rank": 1},
            "begins the decoder on stage 2",
        ),
    ],
)
def test_what_cannot_be_cut(size: int, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        config(size, **fields)
