"""Megatron-LM's names around random state, and its checkpoint function."""

import torch

from megatron.core import tensor_parallel as tp

X = torch.arange(12.0).view(3, 4)


def test_seed_and_checkpoint() -> None:
    tp.model_parallel_cuda_manual_seed(7)
    first = torch.rand(3)
    tp.model_parallel_cuda_manual_seed(7)
    with tp.get_cuda_rng_tracker().fork():
        assert torch.equal(torch.rand(3), first)
    for distribute_saved_activations in (False, True):
        x = X.clone().requires_grad_()
        tp.checkpoint(torch.sin, distribute_saved_activations, x).sum().backward()
        assert torch.allclose(x.grad, X.cos())
