"""The published names around tensor parallel layers, among one rank."""

import pytest
import torch

from megatron.core import tensor_parallel as tp
from megatron.core.exceptions import UserError
from megatron.core.parameters import Normal, declare

X = torch.arange(12.0).view(3, 4)


@pytest.mark.parametrize(
    "move",
    [
        tp.copy_to_tensor_model_parallel_region,
        tp.reduce_from_tensor_model_parallel_region,
        tp.scatter_to_tensor_model_parallel_region,
        tp.gather_from_tensor_model_parallel_region,
        tp.all_gather_last_dim_from_tensor_parallel_region,
        tp.scatter_to_sequence_parallel_region,
        tp.gather_from_sequence_parallel_region,
        tp.reduce_scatter_to_sequence_parallel_region,
        lambda tensor: tp.all_to_all(None, tensor),
    ],
)
def test_moves_are_the_identity(move) -> None:
    x = X.clone().requires_grad_()
    move(x).sum().backward()
    assert torch.equal(move(x), x) and (x.grad == 1).all()


def test_cutting() -> None:
    left, right = tp.split_tensor_along_last_dim(X, 2)
    assert torch.equal(torch.cat([left, right], -1), X) and left.data_ptr() == X.data_ptr()
    assert all(part.is_contiguous() for part in tp.split_tensor_along_last_dim(X, 2, contiguous_split_chunks=True))
    with pytest.raises(UserError, match="4 does not divide by 3"):
        tp.split_tensor_along_last_dim(X, 3)
    assert torch.equal(tp.gather_split_1d_tensor(tp.split_tensor_into_1d_equal_chunks(X)), X.view(-1))
    assert tp.VocabUtility.vocab_range_from_global_vocab_size(128, 1, 4) == (32, 64)
    assert tp.VocabUtility.vocab_range_from_per_partition_vocab_size(32, 3, 4) == (96, 128)


def test_broadcast_data() -> None:
    assert torch.equal(tp.broadcast_data(["a"], {"a": X}, torch.float32)["a"].cpu(), X)
    with pytest.raises(UserError, match=r"not torch.int64: a"):
        tp.broadcast_data(["a"], {"a": X}, torch.int64)


def test_marks_on_parameters() -> None:
    a, b = torch.nn.Parameter(X.clone()), torch.nn.Parameter(X.clone())
    tp.set_defaults_if_not_set_tensor_model_parallel_attributes(a)
    assert (a.tensor_model_parallel, a.partition_dim, a.partition_stride) == (False, -1, 1)
    tp.set_tensor_model_parallel_attributes(b, True, 0, 1)
    tp.copy_tensor_model_parallel_attributes(a, b)
    assert (a.tensor_model_parallel, a.partition_dim) == (True, 0)
    declared = declare(torch.nn.Parameter(X.clone()), Normal(1.0), sharded_axes=frozenset({"tp"}))
    assert tp.param_is_not_tensor_parallel_duplicate(declared)


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


def test_linear_by_its_published_name() -> None:
    weight, bias = torch.ones(2, 4), torch.ones(2)
    result = tp.linear_with_grad_accumulation_and_async_allreduce(X, weight, bias, False, False, False)
    assert torch.equal(result, X @ weight.T + bias)
