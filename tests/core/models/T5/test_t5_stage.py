"""The layers of a T5 on each pipeline stage."""

import copy

import pytest
from support.tiny_models import tiny_config

from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.models.T5.t5_stage import T5Part, part_of_stage
from megatron.core.pipeline_parallel.stages import StatesIn
from megatron.core.transformer.transformer_config import TransformerConfig


def configs(size: int, encoder: int | None = 4) -> tuple[TransformerConfig, TransformerConfig]:
    decoder = tiny_config(num_encoder_layers=encoder, pipeline_model_parallel_size=size)
    read = copy.copy(decoder)
    read.num_layers = 4
    return decoder, read


def part(size: int, rank: int, encoder: int | None = 4, **added: bool) -> T5Part:
    groups = ProcessGroupCollection.from_grid(RankGrid(size, pipeline=size), rank)
    return part_of_stage(*configs(size, encoder), groups, **{"add_encoder": True, "add_decoder": True, **added})


def test_one_stage_has_what_it_is_asked_for() -> None:
    assert part(1, 0, None) == T5Part(range(1, 5), range(1, 3))
    assert part(1, 0, None, add_encoder=False) == T5Part(None, range(1, 3))
    assert part(1, 0, None, add_decoder=False) == T5Part(range(1, 5), None)


def test_stages_of_the_encoder_then_of_the_decoder() -> None:
    assert part(3, 0) == T5Part(range(1, 3), None, False, StatesIn(0, 1))
    assert part(3, 1) == T5Part(range(3, 5), None, True, StatesIn(0, 1))
    assert part(3, 2) == T5Part(None, range(1, 3), False, StatesIn(0, 1))


def test_the_encoders_layers_must_be_known() -> None:
    with pytest.raises(UserError, match=r"num_encoder_layers is 2, while encoder_config.num_layers is 4"):
        part(2, 0, 2)
