"""How a schedule finds what a model chunk takes part in, and hands it the record of its micro-batch."""

from typing import Any

import pytest
from torch import nn

from megatron.core.exceptions import UserError
from megatron.core.micro_batch import MicroBatch
from megatron.core.pipeline_parallel.captured_micro_batch import call_if_defined
from megatron.core.pipeline_parallel.chunk_hooks import micro_batch_receiver, supply_micro_batch


class Model(nn.Module):
    def forward(self, x: int, *, micro_batch: MicroBatch | None = None) -> tuple[int, MicroBatch | None]:
        return x, micro_batch


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class HandsOn(Model):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Forgets(Model):
    def forward(self, x: int) -> Any:
        return super().forward(x)


class Knows(nn.Module):
    def forward(self, x: int, **kwargs: Any) -> Any:
        return x, kwargs


@pytest.mark.parametrize("kind", [Model, HandsOn])
def test_a_wrapped_model_gets_the_record_without_the_forward_steps_help(kind: type[nn.Module]) -> None:
    inner, record, other = kind(), MicroBatch(), MicroBatch()
    model = Wrapper(Wrapper(inner))
    receiver = micro_batch_receiver(model)
    assert receiver is inner
    with supply_micro_batch(receiver, record):
        assert model(3) == (3, record)
        assert model(3)[1] is record and inner(3)[1] is record  # also where a script unwraps the model
        assert model(3, micro_batch=other)[1] is other
    assert model(3) == (3, None)


def test_a_failed_forward_leaves_no_record_behind() -> None:
    model = Model()
    with pytest.raises(TypeError), supply_micro_batch(model, MicroBatch()):
        model()
    assert model(3) == (3, None)


def test_models_that_do_not_take_the_record_are_left_alone() -> None:
    model = Wrapper(Knows())
    assert micro_batch_receiver(model) is None
    with supply_micro_batch(None, MicroBatch()):
        assert model(3) == (3, {})


def test_an_override_that_loses_the_record_is_refused() -> None:
    with pytest.raises(UserError, match=r"Forgets.forward does not take `micro_batch`"):
        micro_batch_receiver(Wrapper(Forgets()))


class GatheringWrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.finished = module, 0

    def finish_param_sync(self) -> None:
        self.finished += 1


def test_weights_are_waited_for_where_a_wrapper_gathers_them() -> None:
    wrapped = GatheringWrapper(nn.Identity())
    call_if_defined([nn.Identity(), wrapped, nn.Sequential()], "finish_param_sync")
    assert wrapped.finished == 1
