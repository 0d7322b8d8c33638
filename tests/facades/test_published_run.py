"""What a run tells of itself: the functions of scripts see it, and the run before comes back."""

import time
from types import SimpleNamespace

import pytest
from support.runs import GPT, TINY

from megatron.core.exceptions import UserError
from megatron.facades import global_vars, parallel_state
from megatron.facades.pretrain import pretrain_config
from megatron.facades.published_run import PublishedRun, published
from megatron.training.arguments import configure
from megatron.training.pretraining import run_pretraining
from megatron.training.publication import Publication


def test_providers_are_published_once_they_are_asked_to_be() -> None:
    assert type(GPT.publication) is Publication and isinstance(published(GPT).publication, PublishedRun)


def test_a_run_that_publishes_nothing_leaves_the_functions_of_scripts_alone() -> None:
    global_vars.clear_current_run()
    config = configure(f"{TINY} --mock-data --eval-iters 0 --train-iters 1".split())
    run_pretraining(config, GPT, time.monotonic())
    with pytest.raises(UserError, match="works once the run is set up"):
        global_vars.get_args()
    pretrain_config(config, GPT, time.monotonic())
    assert global_vars.get_args().train_iters == 1


def test_virtual_stages_are_those_of_the_run_inside_it() -> None:
    run = PublishedRun()
    with run.stages(SimpleNamespace(chunks=3, v_shaped=False)):
        assert parallel_state.get_virtual_pipeline_model_parallel_world_size() == 3
        with run.stages(SimpleNamespace(chunks=2, v_shaped=True)):
            assert parallel_state.get_virtual_pipeline_model_parallel_world_size() == 2
            assert parallel_state.is_pipeline_v_shaped()
        assert parallel_state.get_virtual_pipeline_model_parallel_world_size() == 3
    assert parallel_state.get_virtual_pipeline_model_parallel_world_size() is None
