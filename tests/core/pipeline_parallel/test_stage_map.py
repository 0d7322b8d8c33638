"""Which layers stand on which stage, and what is said of a config that cannot be cut."""

from typing import Any

import pytest

from megatron.core.exceptions import UserError
from megatron.core.pipeline_parallel.stage_map import StageMap, stage_map
from megatron.core.pipeline_parallel.stages import virtual_stages
from megatron.core.transformer.transformer_config import TransformerConfig

BOTH_COUNTED = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}


def config(layers: int, stages: int, chunks: int | None = None, **fields: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks,
        **fields,
    )


def layers(stages: StageMap) -> list[list[int]]:
    return [list(stage.layers) for stage in stages.stages]


def test_an_even_cut_gives_each_stage_as_many_layers() -> None:
    stages = stage_map(config(8, 2, 2))
    assert layers(stages) == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert [stage.embedding for stage in stages.stages] == [True, False, False, False]
    assert [stage.loss for stage in stages.stages] == [False, False, False, True]
    assert list(stages.stage_at(1, 1).layers) == [7, 8] and list(stages.stage_at(0, 1).layers) == [5, 6]


def test_a_v_brings_the_last_layers_back_to_the_first_rank() -> None:
    made = config(8, 2, pipeline_schedule="zb-v")
    assert made.virtual_pipeline_model_parallel_size == 2
    stages = stage_map(made)
    assert list(stages.stage_at(0, 0).layers) == [1, 2] and list(stages.stage_at(0, 1).layers) == [7, 8]
    assert stages.stage_at(0, 1).loss and stages.loss_rank == 0


@pytest.mark.parametrize(
    ("layers_in_all", "stages", "chunks", "fields", "expected"),
    [
        (8, 4, None, {"num_layers_in_first_pipeline_stage": 2}, [2, 2, 2, 2]),
        (8, 3, None, {"num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 0}, [2, 6, 0]),
        (14, 3, 2, {"num_layers_in_last_pipeline_stage": 2}, [3, 3, 1, 3, 3, 1]),
        (6, 2, None, {"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 5}, [1, 5]),
        (7, 2, None, {"account_for_embedding_in_pipeline_split": True}, [3, 4]),
        (6, 2, 2, BOTH_COUNTED, [1, 2, 2, 1]),
        (11, 3, None, {"pipeline_model_parallel_layout": "Et*3|(t|)*0t*7|tL"}, [3, 7, 1]),
        (8, 2, None, {"pipeline_model_parallel_layout": "E|(tt|)*2,t*4L"}, [0, 2, 2, 4]),
        (3, 2, None, {"pipeline_model_parallel_layout": ["Et", "ttL"]}, [1, 2]),
        (2, 2, None, {"pipeline_model_parallel_layout": [["embedding", "decoder"], ["decoder", "loss"]]}, [1, 1]),
        (5, 1, None, {"num_layers_in_first_pipeline_stage": 2}, [5]),
    ],
)  # fmt: skip
def test_uneven_cuts(
    layers_in_all: int, stages: int, chunks: int | None, fields: dict[str, Any], expected: list[int]
) -> None:
    found = stage_map(config(layers_in_all, stages, chunks, **fields))
    assert [len(stage.layers) for stage in found.stages] == expected
    assert [number for numbers in layers(found) for number in numbers] == list(range(1, layers_in_all + 1))
    assert found.num_stages == len(expected)


def test_a_layout_says_how_many_chunks_a_rank_has_and_survives_a_copy() -> None:
    made = config(8, 2, pipeline_model_parallel_layout="Ett|tt|tt|ttL")
    assert made.virtual_pipeline_model_parallel_size == 2
    again = TransformerConfig(**{name: getattr(made, name) for name in made.__dataclass_fields__ if name[0] != "_"})
    assert stage_map(again) == stage_map(made)


def test_layers_per_virtual_stage_say_how_many_chunks() -> None:
    assert virtual_stages(config(16, 2), 2) == 4
    assert virtual_stages(config(14, 4, **BOTH_COUNTED), 2) == 2


@pytest.mark.parametrize(
    ("arguments", "fields", "message"),
    [
        ((7, 2), {}, r"num_layers 7 is not divisible by 2 pipeline stages; use 6 or 8 layers"),
        ((1, 2, 2), {}, r"num_layers 1 is not divisible by 4 pipeline stages; use 4 layers"),
        ((8, 2), {"account_for_loss_in_pipeline_split": True}, r"num_layers 8, with what .* use 7 or 9 layers"),
        ((8, 3), {"num_layers_in_first_pipeline_stage": 3}, r"leave 5 of num_layers 8 to 2 ranks .* leave 4 or 6"),
        ((8, 2), {"num_layers_in_first_pipeline_stage": 9}, r"do not fit num_layers 8: 1 too many"),
        (
            (8, 2),
            {"num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 4},
            r"do not fit num_layers 8: 1 too few",
        ),
        ((8, 2, 2), {"num_layers_in_first_pipeline_stage": 3}, r"is not divisible by the 2 chunks of a rank; use 4"),
        (
            (8, 2),
            {"num_layers_in_first_pipeline_stage": 4, "account_for_loss_in_pipeline_split": True},
            r"account_for_loss_in_pipeline_split cut evenly; drop them",
        ),
        ((8, 2), {"pipeline_model_parallel_layout": "Et*4|t*5L"}, r"has 9 layers, num_layers 8"),
        ((8, 2), {"pipeline_model_parallel_layout": "t*4|Et*4L"}, r"must begin with E"),
        ((8, 2), {"pipeline_model_parallel_layout": "Et*4|Lt*4"}, r"must end with L"),
        ((8, 2), {"pipeline_model_parallel_layout": "|Et*8L"}, r"must begin with E, the embedding, on its first"),
        ((8, 2), {"pipeline_model_parallel_layout": "Et*8L|"}, r"must end with L, the loss, on its last stage"),
        ((8, 2), {"pipeline_model_parallel_layout": "Et*4|t*2|t*2L"}, r"has 3 stages .* give 2 or 4 stages"),
        ((8, 2), {"pipeline_model_parallel_layout": "Et*4|t*4mL"}, r"has 1 multi-token prediction layers"),
        ((8, 2), {"pipeline_model_parallel_layout": "Et*4|{x}"}, r"'x' is out of place"),
        ((2, 2), {"pipeline_model_parallel_layout": [["Et"], ["tL"]]}, r"'Et' in the stage .* embedding, decoder"),
        ((2, 2), {"pipeline_model_parallel_layout": [[["decoder"]], ["loss"]]}, r"\['decoder'\] in the stage"),
        ((2, 2), {"pipeline_model_parallel_layout": [1, 1]}, r"1 is not a stage"),
        ((2, 2), {"pipeline_model_parallel_layout": 2}, r"2 is not a layout"),
        ((8, 2, 2), {"pipeline_model_parallel_layout": "Et*4|t*4L"}, r"has 2 stages, 2 ranks of 2 chunks have 4"),
        (
            (8, 2),
            {"pipeline_model_parallel_layout": "Et*4|t*4L", "num_layers_in_last_pipeline_stage": 4},
            r"num_layers_in_last_pipeline_stage 4 does not go with pipeline_model_parallel_layout",
        ),
        ((8, 2, 2), {"pipeline_schedule": "1f1b"}, r"1f1b has one chunk a rank"),
        ((8, 2), {"pipeline_schedule": "interleaved"}, r"interleaved needs virtual_pipeline_model_parallel_size"),
        ((12, 2, 3), {"pipeline_schedule": "zb-v"}, r"zb-v has two chunks a rank"),
        ((8, 2), {"pipeline_schedule": "zb-v", "num_layers_in_last_pipeline_stage": 2}, r"zb-v has the first and the"),
        ((8, 4, 2), {"microbatch_group_size_per_vp_stage": 3}, r"_vp_stage 3 is less .* 4 or more"),
        ((6, 2), {"pipeline_schedule": "zb-v"}, r"num_layers 6 is not divisible by 4 pipeline stages"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_says_what_would_work(arguments: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config(*arguments, **fields)


def test_auto_waits_for_the_sizes_it_needs() -> None:
    made = config(7, 2, pipeline_model_parallel_layout="auto")
    with pytest.raises(UserError, match="needs the sequence length and the vocabulary"):
        stage_map(made)
