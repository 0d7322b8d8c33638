"""examples/custom_model under tensor, sequence, pipeline and data parallelism: the numbers of one process."""

import os
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from support.processes import run_on_ranks
from support.runs import Outcome, run_script, state_at_end, state_at_start

from examples.custom_model.pretrain_custom import (
    add_flags,
    build_datasets,
    build_forward_step,
    build_model,
    refuse_what_has_no_effect,
)
from megatron.core.exceptions import UserError
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.providers import Providers

FLAGS = (
    "--num-layers 4 --ffn-hidden-size 24 --hidden-size 16 --normalization RMSNorm --fp64 --mock-data --train-iters 3 "
    "--hidden-dropout 0 --attention-dropout 0 --convolution-width 3 --eval-iters 0"
)
SPLIT = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"


def train(flags: str) -> Outcome:
    ranks = {"WORLD_SIZE": str(dist.get_world_size()), "RANK": str(dist.get_rank())} if dist.is_initialized() else {}
    with mock.patch.dict(os.environ, ranks):  # as torchrun says it
        return run_script(
            flags, Providers(build_model, build_datasets, build_forward_step), extra_args_provider=add_flags
        )


def test_four_ranks_compute_what_one_computes() -> None:
    alone, ranks = train(FLAGS), run_on_ranks(train, 4, f"{FLAGS} {SPLIT}")
    (logger,) = (rank for rank in ranks if rank.logs)
    assert logger.losses == pytest.approx(alone.losses, rel=1e-11) and len(alone.losses) == 3
    start, split_start = state_at_start([alone]), state_at_start(ranks)
    assert start.keys() == split_start.keys() and all(start[name].equal(split_start[name]) for name in start)
    end, split_end = state_at_end([alone]), state_at_end(ranks)
    assert end.keys() == split_end.keys()
    for name, value in end.items():
        assert (value - split_end[name]).abs().max() <= 1e-11, name


@pytest.mark.parametrize("setting", [{"hidden_dropout": 0.1}, {"context_parallel_size": 2}])
def test_what_it_lacks_is_refused(setting: dict[str, Any]) -> None:
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "hidden_dropout": 0.0}
    config = TransformerConfig(**{**sizes, "attention_dropout": 0.0, **setting})
    with pytest.raises(UserError, match=f"--{next(iter(setting)).replace('_', '-')}"):
        refuse_what_has_no_effect(config)
