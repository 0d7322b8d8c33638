"""Sums of gradients against plain sums, for one rank of two; the other rank's gradients are pretended."""

import pytest
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from megatron.core.communication.collectives import Group, Pending, PlannedGroup
from megatron.core.communication.traffic import recorded
from megatron.core.distributed import reductions
from megatron.core.distributed.reductions import Reduction

GROUP = PlannedGroup((3, 7), 1)
MINE, OTHERS = torch.tensor([1.0, 2.0, 3.0, 4.0]).double(), torch.tensor([10.0, 20.0, 30.0, 40.0]).double()


class OtherRank:
    """What rank 0 of the group sends; its gradients are scaled and rounded as this rank's."""

    def __init__(self, gradients: Tensor, scale: float) -> None:
        self.gradients, self.scale = gradients, scale
        self.wire_types: list[torch.dtype] = []

    def sum_with(self, wire: Tensor, op: ReduceOp.RedOpType) -> Tensor:
        self.wire_types.append(wire.dtype)
        total = wire + (self.gradients * self.scale).to(wire.dtype)
        return total / 2 if op is ReduceOp.AVG else total

    def all_reduce(self, wire: Tensor, group: Group, op: ReduceOp.RedOpType) -> Pending:
        return Pending(wire.copy_(self.sum_with(wire, op)), None)

    def reduce_scatter(self, wire: Tensor, group: Group, out: Tensor, op: ReduceOp.RedOpType) -> Pending:
        assert group is GROUP
        return Pending(out.copy_(self.sum_with(wire, op).chunk(2)[1]), None)

    def all_to_all(self, wire: Tensor, group: Group) -> Pending:
        self.wire_types.append(wire.dtype)
        theirs = (self.gradients * self.scale).to(wire.dtype)
        return Pending(torch.cat([theirs.chunk(2)[1], wire.chunk(2)[1]]), None)


def other_rank(monkeypatch: pytest.MonkeyPatch, gradients: Tensor = OTHERS, scale: float = 1.0) -> OtherRank:
    other = OtherRank(gradients, scale)
    monkeypatch.setattr(reductions, "start_all_reduce", other.all_reduce)
    monkeypatch.setattr(reductions, "start_reduce_scatter_rows", other.reduce_scatter)
    monkeypatch.setattr(reductions, "start_all_to_all_rows", other.all_to_all)
    return other


def test_gradients_are_scaled_and_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    other_rank(monkeypatch, scale=0.25)
    gradients = MINE.clone()
    found = Reduction(GROUP, 0.25).start_all_reduce(gradients, torch.float64).wait()
    assert found is gradients and torch.equal(found, (MINE + OTHERS) / 4)
    shard = Reduction(GROUP, 0.25).start_reduce_scatter(MINE.clone(), torch.float64).wait()
    assert torch.equal(shard, ((MINE + OTHERS) / 4)[2:])


def test_a_narrow_wire_leaves_the_sum_in_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    other = other_rank(monkeypatch)
    gradients = MINE.float()
    Reduction(GROUP).start_all_reduce(gradients, torch.bfloat16).wait()
    assert other.wire_types == [torch.bfloat16] and torch.equal(gradients.double(), MINE + OTHERS)


def test_addends_of_a_narrow_wire_can_be_summed_without_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 + 1 is not a bfloat16: there it is 256."""
    gradients, theirs = torch.ones(4), torch.full((4,), 256.0)
    for in_main_type, expected in ((False, 256.0), (True, 257.0)):
        other = other_rank(monkeypatch, theirs)
        reduction = Reduction(GROUP, sum_in_main_dtype=in_main_type)
        shard = reduction.start_reduce_scatter(gradients.clone(), torch.bfloat16).wait()
        assert shard.float().tolist() == [expected] * 2 and other.wire_types == [torch.bfloat16]


@pytest.mark.parametrize(
    ("scale", "kept", "wire", "flag", "factor"),
    [
        (0.5, torch.float64, torch.float64, True, 1.0),
        (0.5, torch.float64, torch.float64, False, 1.0),  # the same bits, without a pass over the gradients
        (0.25, torch.float64, torch.float64, False, 0.25),  # there would be something left to scale
        (0.25, torch.float64, torch.float64, True, 0.5),
        (0.5, torch.float64, torch.float32, False, 0.5),  # other bits: the type that is sent is narrower
        (0.5, torch.float64, torch.float32, True, 1.0),
        (0.5, torch.bfloat16, torch.bfloat16, False, 0.5),  # NCCL would round a factor such as 1/3 to bfloat16
        (0.5, torch.bfloat16, torch.bfloat16, True, 1.0),
    ],
)
def test_a_collective_that_averages_gets_gradients_without_the_factor(
    monkeypatch: pytest.MonkeyPatch, scale: float, kept: torch.dtype, wire: torch.dtype, flag: bool, factor: float
) -> None:
    monkeypatch.setattr(reductions, "averages_in_collective", lambda tensor, group: True)
    averages = factor != scale
    sent: list[tuple[Tensor, ReduceOp.RedOpType]] = []

    def all_reduce(wire: Tensor, group: Group, op: ReduceOp.RedOpType) -> Pending:
        sent.append((wire.clone(), op))
        return Pending(wire, None)

    monkeypatch.setattr(reductions, "start_all_reduce", all_reduce)
    Reduction(GROUP, scale, average_in_collective=flag).start_all_reduce(MINE.to(kept, copy=True), wire)
    ((addend, op),) = sent
    assert torch.equal(addend, (MINE * factor).to(wire)) and op == (ReduceOp.AVG if averages else ReduceOp.SUM)


def test_one_rank_scales_and_neither_sends_nor_rounds() -> None:
    gradients = torch.full((4,), 257.0)
    with recorded() as traffic:
        shard = Reduction(None, 0.5, sum_in_main_dtype=True).start_reduce_scatter(gradients, torch.bfloat16).wait()
        assert shard.tolist() == [128.5] * 4 and shard.data_ptr() == gradients.data_ptr()
        Reduction(None, 2.0).start_all_reduce(gradients, torch.bfloat16).wait()
    assert gradients.tolist() == [257.0] * 4 and not traffic
