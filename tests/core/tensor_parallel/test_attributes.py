"""Megatron-LM's attributes of parameters."""

import torch

from megatron.core import tensor_parallel as tp
from megatron.core.communication.collectives import PlannedGroup
from megatron.core.initializers import Normal
from megatron.core.parameters import declare

X = torch.arange(12.0).view(3, 4)


def test_marks_on_parameters() -> None:
    a, b = torch.nn.Parameter(X.clone()), torch.nn.Parameter(X.clone())
    tp.set_defaults_if_not_set_tensor_model_parallel_attributes(a)
    assert (a.tensor_model_parallel, a.partition_dim, a.partition_stride) == (False, -1, 1)
    tp.set_tensor_model_parallel_attributes(b, True, 0, 1)
    tp.copy_tensor_model_parallel_attributes(a, b)
    assert (a.tensor_model_parallel, a.partition_dim) == (True, 0)
    declared = declare(torch.nn.Parameter(X.clone()), Normal(1.0), sharded_axes=frozenset({"tp"}))
    assert tp.param_is_not_tensor_parallel_duplicate(declared)


def test_a_replicated_parameter_counts_on_the_first_rank() -> None:
    replicated = declare(torch.nn.Parameter(X.clone()), Normal(1.0))
    counted = [tp.param_is_not_tensor_parallel_duplicate(replicated, PlannedGroup((0, 1), rank)) for rank in (0, 1)]
    assert counted == [True, False]
