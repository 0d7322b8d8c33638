"""Sizes of a layout on a few processes."""

import pytest
from support.runs import TINY

from megatron.diagnosis.layout_check.shrink_layout import LayoutSizes, comm_types, shrink_layout
from megatron.training.arguments import configure
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.settings import LaunchEnvironment

MODEL = "--mock-data --train-iters 1 --num-layers 16 --num-attention-heads 16 --hidden-size 64 --global-batch-size 64"


def config_of(flags: str, ranks: int) -> PretrainConfig:
    return configure(f"{TINY} {MODEL} {flags}".split(), launch_environment=LaunchEnvironment(ranks, False))


@pytest.mark.parametrize(
    ("flags", "ranks", "processes", "sizes"),
    [
        ("--tensor-model-parallel-size 2", 4, 8, LayoutSizes(2, 1, 1, 2)),  # it fits as it is
        ("--tensor-model-parallel-size 8", 16, 8, LayoutSizes(4, 1, 1, 2)),  # the longest is halved
        ("--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4", 32, 8, LayoutSizes(2, 1, 2, 2)),
        ("--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4", 32, 4, LayoutSizes(2, 1, 2, 1)),
    ],
)
def test_every_dimension_keeps_two_ranks_if_that_is_possible(
    flags: str, ranks: int, processes: int, sizes: LayoutSizes
) -> None:
    found, notes = shrink_layout(config_of(flags, ranks), processes)
    assert found == sizes and found.ranks <= processes
    assert bool(notes) == (found.ranks < ranks)


def test_a_dimension_that_is_left_out_is_said_with_the_number_that_takes_it_in() -> None:
    flags = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    _, notes = shrink_layout(config_of(flags, 8), 4)
    assert notes == [
        "layout: tensor 2 x context 1 x pipeline 2 x data 1 instead of tensor 2 x context 1 x pipeline 2 x data 2",
        "data parallelism is left out: 8 processes would be needed, 4 are allowed (--processes 8 takes it in)",
    ]


def test_hierarchical_context_parallelism_keeps_four_ranks() -> None:
    flags = "--context-parallel-size 8 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 4"
    config = config_of(f"{flags} --seq-length 64 --max-position-embeddings 64", 8)
    assert comm_types(config.transformer) == ["a2a+p2p"]
    assert shrink_layout(config, 4)[0] == LayoutSizes(context=4)


def test_sizes_as_text() -> None:
    assert str(LayoutSizes(2, 1, 4, 1)) == "tensor 2 x context 1 x pipeline 4 x data 1"
    assert str(LayoutSizes(2, 1, 1, 2, expert=4)).endswith(", experts over 4 x 1 tensor")
