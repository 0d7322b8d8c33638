"""Who does what among the processes of a run, by numbers alone."""

import resource

import pytest
import torch
from support.runs import TINY

from megatron.core.pipeline_parallel.stages import pipeline_of
from megatron.training.arguments import configure
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.launch.environment import Environment, groups_of_rank, raise_open_file_limit
from megatron.training.providers import stages_of_rank

FLAGS = f"{TINY} --num-layers 8 --mock-data --train-iters 1"
PP = "--pipeline-model-parallel-size"


def configured(flags: str, world_size: int) -> PretrainConfig:
    return configure(f"{FLAGS} {flags}".split(), launch_environment=LaunchEnvironment(world_size, False))


def environments(config: PretrainConfig) -> list[Environment]:
    """Returns the environment of every rank."""
    stage = pipeline_of(config.transformer).loss_rank
    return [
        Environment(rank, config.world_size, torch.device("cpu"), groups_of_rank(config, rank), stage)
        for rank in range(config.world_size)
    ]


@pytest.mark.parametrize(
    ("flags", "world_size", "with_loss", "logger"),
    [
        ("", 1, [0], 0),
        ("", 4, [0, 1, 2, 3], 3),
        ("--tensor-model-parallel-size 2", 4, [0, 1, 2, 3], 3),
        (f"{PP} 2", 4, [2, 3], 3),
        (f"{PP} 2 --use-tp-pp-dp-mapping", 4, [1, 3], 3),
        (f"{PP} 2 --tensor-model-parallel-size 2 --context-parallel-size 2", 8, [4, 5, 6, 7], 7),
        (f"{PP} 2 --pipeline-schedule zb-v", 4, [0, 1], 1),
        (f"{PP} 2 --pipeline-schedule zb-v --use-tp-pp-dp-mapping", 4, [0, 2], 2),
    ],
)
def test_one_of_the_ranks_that_have_the_losses_prints_them(flags, world_size, with_loss, logger):
    ranks = environments(configured(flags, world_size))
    assert [each.rank for each in ranks if each.has_loss] == with_loss
    assert [each.rank for each in ranks if each.logs] == [logger]
    assert [each.rank for each in ranks if each.is_first] == [0]


@pytest.mark.parametrize(
    ("flags", "embedding", "positions"),
    [(f"{PP} 4", (0, 3), (0,)), (f"{PP} 4 --pipeline-schedule zb-v", (0,), (0,)), (f"{PP} 1", (0,), (0,))],
)
def test_ranks_that_share_the_embedding(flags, embedding, positions):
    for each in environments(configured(flags, 4)):
        pipeline = each.groups.ranks("pp")
        assert each.groups.ranks("embd") == tuple(pipeline[place] for place in embedding)
        assert each.groups.ranks("pos_embd") == tuple(pipeline[place] for place in positions)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (f"{PP} 2", [["E"], ["L"]]),
        (f"{PP} 2 --num-layers-per-virtual-pipeline-stage 2", [["E", ""], ["", "L"]]),
        (f"{PP} 2 --pipeline-schedule zb-v", [["E", "L"], ["", ""]]),
        (f"{PP} 2 --pipeline-model-parallel-layout Et|t*6|t|L", [["E", ""], ["", "L"]]),
        (f"{PP} 1", [["EL"], ["EL"]]),
    ],
)
def test_the_chunks_of_a_rank(flags, expected):
    """Every layout has the embedding once and the loss once; chunks are numbered where there are several."""
    config = configured(flags, 2)
    for each, parts in zip(environments(config), expected, strict=True):
        stages = stages_of_rank(config, each.groups.rank("pp"))
        assert ["E" * stage.pre_process + "L" * stage.post_process for stage in stages] == parts
        assert [stage.virtual for stage in stages] == (list(range(len(parts))) if len(parts) > 1 else [None])
        assert each.has_loss == any(stage.post_process for stage in stages)


def test_the_limit_of_open_files_is_raised_to_what_the_system_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        raise_open_file_limit()
        most = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        raise_open_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
