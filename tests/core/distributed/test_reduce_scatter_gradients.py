"""Sharded gradients on one rank: the sum of all micro-batches, with memory for whole gradients only while needed."""

from unittest import mock

import pytest
import torch
from support.small_models import SmallModel, batch
from torch import Tensor

from megatron.core.distributed import reduce_scatter_gradients
from megatron.core.distributed.buckets import TwoLevelReduction
from megatron.core.distributed.flat_buffer import Unit
from megatron.core.distributed.main_grad import BufferMainGrad, WeightGradientQueue, zero_or_mark
from megatron.core.distributed.reduce_scatter_gradients import ReduceScatterGradients, TransientGradients
from megatron.core.distributed.reductions import Reduction
from megatron.core.distributed.sharding_strategy import Sharding, ShardingStrategy
from megatron.core.distributed.units import plan_units

STEPS = 2
BATCHES = 3


def sharded(overlap: bool) -> tuple[SmallModel, list[Unit], ReduceScatterGradients]:
    model = SmallModel()
    units = [Unit(plan, {"dense": Sharding(ShardingStrategy.GRADIENTS)}) for plan in plan_units(model)]
    reductions = {"dense": TwoLevelReduction(Reduction(None))}
    return model, units, ReduceScatterGradients(units, reductions, lambda unit: torch.float64, overlap)


def in_memory(gradients: ReduceScatterGradients) -> int:
    return sum(unit.whole.untyped_storage().nbytes() > 0 for unit in gradients.units)


def check(units: list[Unit], step: int) -> None:
    """Against one backward of plain autograd."""
    plain = SmallModel()
    sum((plain(*batch(step * BATCHES + n)) for n in range(BATCHES)), torch.zeros((), dtype=torch.float64)).backward()
    wanted: dict[str, Tensor] = {p.info.name: p.grad for p in plain.parameters()}  # type: ignore[misc]
    for unit in units:
        for slot in unit.slots:
            got = slot.view_in(unit.gradient_shard)
            torch.testing.assert_close(got, wanted.pop(slot.info.name), rtol=1e-12, atol=1e-14)
    assert not wanted


@pytest.mark.parametrize("overlap", [False, True])
def test_shards_have_the_sum_of_all_micro_batches(overlap: bool) -> None:
    model, units, gradients = sharded(overlap)
    assert in_memory(gradients) == 0
    for step in range(STEPS):
        gradients.reset()
        for number in range(BATCHES):
            model(*batch(step * BATCHES + number)).backward()
            assert in_memory(gradients) <= overlap  # the last one overlaps what follows
        gradients.finish()
        assert in_memory(gradients) == 0
        check(units, step)
        gradients.finish()  # changes nothing
        check(units, step)


def test_what_memory_holds_when_it_comes_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products replace it, from the second micro-batch on. Units without a contribution reduce zeros."""
    replaced: list[bool] = []

    def over_garbage(buffer: Tensor, main_grads: list[BufferMainGrad]) -> None:
        buffer.fill_(torch.nan)
        replaced.extend(main_grad.can_replace for main_grad in main_grads)
        zero_or_mark(buffer, main_grads)

    monkeypatch.setattr(reduce_scatter_gradients, "zero_or_mark", over_garbage)
    model, units, gradients = sharded(overlap=False)
    gradients.reset()
    for number in range(BATCHES):
        model(*batch(number)).backward()
        assert any(replaced) == (number > 0)
        for transient in gradients.units:
            transient.start()
            transient.finish()
    gradients.finish()
    check(units, 0)


def test_a_small_unit_does_not_wait_for_the_reduction_before_it() -> None:
    model, _, gradients = sharded(overlap=True)
    in_flight: list[int] = []
    start = TransientGradients.start

    def counted(transient: TransientGradients) -> None:
        in_flight.append(len(gradients._reducing))
        start(transient)

    with mock.patch.object(TransientGradients, "start", counted):
        for small, most in ((0, 0), (gradients.units[1].nbytes, 1)):
            gradients._small_bytes = small
            in_flight.clear()
            gradients.reset()
            model(*batch(0)).backward()
            gradients.finish()
            assert in_flight[1] == most


def test_numbers_of_contributions_are_learned() -> None:
    model, _, gradients = sharded(overlap=False)
    model(*batch(0)).backward()
    assert [unit.expected for unit in gradients.units] == [{False: 3}, {False: 3}, {False: 3}, {False: 2}]


@pytest.mark.parametrize("overlap", [False, True])
def test_deferred_products_of_a_micro_batch_are_reduced_when_computed(overlap: bool) -> None:
    model, units, gradients = sharded(overlap)
    queue = WeightGradientQueue(model.parameters())
    for step in range(STEPS):
        gradients.reset()
        for number in range(BATCHES):
            with gradients.deferring(), queue.defer(number):
                model(*batch(step * BATCHES + number)).backward()
            with gradients.computing_deferred():
                queue.compute(number)
            assert in_memory(gradients) <= overlap
        gradients.finish()
        check(units, step)


def test_gradients_added_outside_of_a_backward_are_reduced_too() -> None:
    model, units, gradients = sharded(overlap=True)
    model.layers[1].bias.main_grad_accumulator.add(torch.ones(6, dtype=torch.float64))
    assert not units[2].gradient_shard.any()
    gradients.flush_accumulated()
    gradients.finish()
    assert units[2].gradient_shard.sum() == 6.0 and not units[1].gradient_shard.any()


def test_a_contribution_after_the_reduction_of_its_unit_is_reduced_separately() -> None:
    """Before counts are known, a unit counts as complete as soon as the next one receives a contribution."""
    model, units, gradients = sharded(overlap=False)
    ones = torch.ones(6, dtype=torch.float64)
    for layer, reduced in ((2, 0.0), (1, 6.0), (2, 6.0)):
        model.layers[layer].bias.main_grad_accumulator.add(ones)
        assert units[3].gradient_shard.sum() == reduced
    gradients.finish()
    assert units[3].gradient_shard.sum() == 12.0 and units[2].gradient_shard.sum() == 6.0


def test_a_gradient_after_the_end_of_a_step_is_an_error_that_names_it() -> None:
    model, units, gradients = sharded(overlap=True)
    model(*batch(0)).backward()
    gradients.finish()
    with pytest.raises(RuntimeError, match=r"layers\.0\.bias came after the step's reductions were finished"):
        model.layers[0].bias.main_grad_accumulator.add(torch.ones(6, dtype=torch.float64))
    gradients.reset()
    assert not any(unit.gradient_shard.any() for unit in units)
