"""Parameters without memory: questions about their shape are answered, reads are errors that name them."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from megatron.core.distributed.freed_parameter import FreedParameter, mark_freed, mark_gathered
from megatron.core.initializers import Constant
from megatron.core.parameters import declare

X = torch.ones(2, 3)


def freed() -> nn.Parameter:
    parameter = declare(nn.Parameter(torch.ones(3, 4)), Constant(1.0), name="layers.3.weight")
    mark_freed(parameter)
    return parameter


@pytest.mark.parametrize(
    "read",
    [
        lambda p: p + 1,
        lambda p: X @ p,
        lambda p: nn.functional.linear(X, p.t()),
        lambda p: torch.cat([X.t(), p], 1),
        lambda p: p[0],
        lambda p: p.tolist(),
        lambda p: p.data,
        lambda p: p.fill_(0.0),
    ],
)
def test_reads_and_writes_are_errors_that_name_the_parameter(read: Callable[[nn.Parameter], object]) -> None:
    with pytest.raises(RuntimeError, match=r"layers\.3\.weight is read .*not gathered.*borrowed_parameters"):
        read(freed())


def test_questions_about_shape_and_type_are_answered() -> None:
    parameter = freed()
    assert (parameter.shape, parameter.numel(), parameter.dtype) == ((3, 4), 12, torch.float32)
    assert parameter.requires_grad and parameter.is_leaf and parameter.grad is None and not parameter.is_cuda
    assert repr(parameter) == "FreedParameter(layers.3.weight, shape=(3, 4))"
    assert {parameter: 1}[parameter] == 1


def test_gathered_again_it_is_an_ordinary_parameter() -> None:
    parameter = freed()
    mark_gathered(parameter)
    assert type(parameter) is nn.Parameter and parameter.sum() == 12.0
    mark_freed(parameter)
    with pytest.raises(AssertionError):
        mark_freed(parameter)
    assert isinstance(parameter, FreedParameter)


def test_backward_uses_what_autograd_saved() -> None:
    parameter = declare(nn.Parameter(torch.full((3, 4), 2.0)), Constant(1.0), name="weight")
    x = X.clone().requires_grad_()
    loss = (x @ parameter).sum()
    mark_freed(parameter)
    loss.backward()
    assert x.grad is not None and x.grad.eq(8.0).all()
    assert parameter.grad is not None and parameter.grad.eq(2.0).all()
