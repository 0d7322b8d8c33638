"""The tensors that a checkpoint keeps of a run."""

import torch
from support.small_run import PRECISIONS, SmallRun

from megatron.training.checkpoint_contents import optimizer_chunks_to_load, weight_chunks


def test_weights_with_and_without_the_wrapper_are_the_same_chunks_over_live_memory():
    run = SmallRun.make()
    wrapped = {chunk.name: chunk for chunk in weight_chunks([run.model], run.checkpoints.groups)}
    plain = {chunk.name: chunk for chunk in weight_chunks([run.model.module], run.checkpoints.groups)}
    assert wrapped.keys() == plain.keys() and len(wrapped) == 10
    for name, chunk in wrapped.items():
        assert torch.equal(chunk.flat, plain[name].flat) and chunk.global_shape == plain[name].global_shape
        chunk.flat.fill_(7.0)
        assert plain[name].flat.eq(7.0).all()


def test_main_weights_are_loaded_without_optimizer_state_too():
    run = SmallRun.make(**PRECISIONS["bf16 with masters"])
    every = [chunk.name for chunk in optimizer_chunks_to_load(run.optimizer, True)]
    masters = [chunk.name for chunk in optimizer_chunks_to_load(run.optimizer, False)]
    assert 0 < len(masters) < len(every) and set(masters) < set(every)
    assert len(masters) == len(list(weight_chunks([run.model], run.checkpoints.groups)))
