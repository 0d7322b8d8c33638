"""What MegatronOptimizer does for every optimizer: Megatron-LM's step, and state that goes out and comes back."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.communication.collectives import Group
from megatron.core.dist_checkpointing.chunk import Chunk, optimizer_state_chunk
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.initializers import Constant
from megatron.core.optimizer import optimizer as module
from megatron.core.optimizer.optimizer import MegatronOptimizer, StepUpdate, true_on_all_ranks
from megatron.core.parameters import Box, ParameterInfo


class Fake(MegatronOptimizer):
    """Has two tensors of state, which are boxes of one canonical tensor, and a count."""

    def __init__(self, applied: bool = True, zeros: int | None = None) -> None:
        self.moments = [torch.arange(2.0), torch.arange(2.0) + 10]
        self.count = 3
        num_zeros = None if zeros is None else torch.tensor(zeros)
        self.update = StepUpdate(torch.tensor(2.5), torch.tensor(applied), num_zeros)

    def step_on_device(self, loss_is_finite: Tensor | None = None) -> StepUpdate:
        return self.update

    def zero_grad(self, set_to_none: bool = True) -> None: ...

    def get_loss_scale(self) -> Tensor:
        return torch.tensor(4096.0)

    def get_parameters(self) -> list[nn.Parameter]:
        return []

    def reload_model_params(self, state_dict: dict[str, Any] | None = None) -> None: ...

    def state_chunks(self) -> Iterator[Chunk]:
        for row, moment in enumerate(self.moments):
            info = ParameterInfo((2, 2), Box((row, 0), (1, 2)), Constant(0.0), name="w")
            yield optimizer_state_chunk("exp_avg", info, moment, holders=(0,))

    def common_state(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_common_state(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]


def test_megatron_lm_step_gives_numbers_or_none() -> None:
    assert Fake().step() == (True, 2.5, None)
    assert Fake(zeros=7).step() == (True, 2.5, 7)
    assert Fake(applied=False, zeros=7).step() == (False, None, None)


def test_a_scaled_loss_may_be_beyond_float16() -> None:
    scaled = Fake().scale_loss(torch.tensor(60000.0, dtype=torch.float16))
    assert scaled.dtype is torch.float32 and scaled == 60000.0 * 4096.0


def test_state_is_copied_out_and_comes_back() -> None:
    optimizer = Fake()
    state = optimizer.state_dict()
    assert list(state["state"]) == ["optimizer.exp_avg.w", "optimizer.exp_avg.w (2)"]
    for moment in optimizer.moments:
        moment.zero_()
    optimizer.count = 0
    optimizer.load_state_dict(state)
    assert [moment.tolist() for moment in optimizer.moments] == [[0.0, 1.0], [10.0, 11.0]] and optimizer.count == 3


def test_state_that_does_not_fit_is_refused_before_anything_is_loaded() -> None:
    optimizer = Fake()
    state = optimizer.state_dict()
    state["state"]["optimizer.exp_avg.v"] = state["state"].pop("optimizer.exp_avg.w (2)") + 1
    state["state"]["optimizer.exp_avg.w"] += 1
    with pytest.raises(UserError, match=r"does not fit this model: optimizer\.exp_avg\.v and 1 more differ"):
        optimizer.load_state_dict(state)
    assert optimizer.moments[0].tolist() == [0.0, 1.0]


def test_the_sharded_state_is_live_memory() -> None:
    optimizer = Fake()
    tensors = optimizer.sharded_state_dict()["state"]
    assert [tensor.data.data_ptr() for tensor in tensors.values()] == [m.data_ptr() for m in optimizer.moments]


@pytest.mark.parametrize(("mine", "others", "expected"), [(1, 1, True), (1, 0, False), (0, 1, False)])
def test_one_ranks_false_is_false_for_all(
    monkeypatch: pytest.MonkeyPatch, mine: int, others: int, expected: bool
) -> None:
    asked = []

    def minimum(tensor: Tensor, group: Group, op: object) -> Tensor:
        asked.append((group, op))
        return tensor.clamp_(max=others)

    monkeypatch.setattr(module, "all_reduce", minimum)
    monkeypatch.setattr(ProcessGroupCollection, "mp", "model", raising=False)
    groups = ProcessGroupCollection.from_grid(RankGrid(2, tensor=2), 0)
    flag = torch.tensor(bool(mine))
    assert true_on_all_ranks(flag, groups).item() is expected
    assert flag.item() is bool(mine) and asked == [("model", torch.distributed.ReduceOp.MIN)]
    alone = ProcessGroupCollection.from_grid(RankGrid(1), 0)
    assert true_on_all_ranks(flag, alone).item() is bool(mine) and len(asked) == 1
