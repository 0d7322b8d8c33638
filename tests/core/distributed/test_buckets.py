"""Buckets: which units they join, and when and in which order their reductions start."""

from collections.abc import Callable

import pytest
import torch
from support.small_models import SmallModel, batch
from torch import Tensor

from megatron.core.communication.collectives import Pending
from megatron.core.distributed.buckets import BucketQueue, TwoLevelReduction, make_buckets, wire_dtype_of
from megatron.core.distributed.flat_buffer import Unit
from megatron.core.distributed.reductions import Reduction
from megatron.core.distributed.sharding_strategy import Sharding, ShardingStrategy
from megatron.core.distributed.units import plan_units
from megatron.core.utils.warn import _warn_once

EVERYTHING, LAYER = None, 192
ONE_RANK = {"dense": TwoLevelReduction(Reduction(None))}


def units_of(model: SmallModel) -> list[Unit]:
    return [Unit(plan, {"dense": Sharding()}) for plan in plan_units(model)]


def queue_of(model: SmallModel, overlap: bool, max_elements: int | None = 1) -> BucketQueue:
    buckets = make_buckets(units_of(model), ONE_RANK, max_elements, lambda unit: torch.float64)
    return BucketQueue(buckets, overlap)


def watch(queue: BucketQueue) -> list[str]:
    """Names the first unit of each bucket whose reduction starts, as long as the queue lives."""
    started: list[str] = []

    def watched(name: str, start: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            started.append(name)
            start()

        return run

    for bucket in queue.buckets:
        bucket.start = watched(bucket.units[0].plan.name, bucket.start)  # type: ignore[method-assign]
    return started


@pytest.mark.parametrize(
    ("max_elements", "expected"),
    [
        (EVERYTHING, [["layers.2", "layers.1", "layers.0", "embedding"]]),
        (2 * LAYER, [["layers.2", "layers.1"], ["layers.0", "embedding"]]),
        (1, [["layers.2"], ["layers.1"], ["layers.0"], ["embedding"]]),
    ],
)
def test_neighbouring_units_share_a_bucket_up_to_its_size(max_elements: int | None, expected: list[list[str]]) -> None:
    buckets = make_buckets(units_of(SmallModel()), ONE_RANK, max_elements, lambda unit: torch.float64)
    assert [[unit.plan.name for unit in bucket.units] for bucket in buckets] == expected


def test_units_of_another_type_are_not_joined() -> None:
    model = SmallModel(layers=3)
    model.layers[1].to(torch.bfloat16)
    buckets = make_buckets(units_of(model), ONE_RANK, None, lambda unit: wire_dtype_of(unit, False))
    assert [len(bucket.units) for bucket in buckets] == [1, 1, 2]
    assert [bucket.wire_dtype for bucket in buckets] == [torch.float64, torch.bfloat16, torch.float64]
    assert wire_dtype_of(buckets[1].units[0], reduce_in_main_dtype=True) is torch.float32
    assert buckets[1].grad_buffer.dtype is torch.float32


def test_overlap_starts_in_order_as_backward_finishes_once_the_counts_are_known() -> None:
    """The tied table is ready last, although its first contribution, the head's, comes first."""
    queue = queue_of(model := SmallModel(), overlap=True)
    started, order = watch(queue), ["layers.2", "layers.1", "layers.0", "embedding"]
    for step in range(2):
        queue.reset()
        model(*batch(step)).backward()
        assert started == ([] if step == 0 else order)
        queue.finish()
        assert started == order
        started.clear()
    assert [bucket.expected for bucket in queue.buckets] == [3, 3, 3, 2]


def test_a_bucket_waits_for_those_before_it() -> None:
    queue = queue_of(model := SmallModel(), overlap=True)
    for bucket, expected in zip(queue.buckets, (3, 3, 3, 2), strict=True):
        bucket.expected = expected
    started = watch(queue)
    for layer, seen in ((0, []), (1, []), (2, ["layers.2", "layers.1", "layers.0"])):
        for parameter in model.layers[layer].parameters():
            parameter.main_grad_accumulator.add(torch.ones_like(parameter))
        assert started == seen


def test_micro_batches_before_the_last_start_nothing() -> None:
    queue = queue_of(model := SmallModel(), overlap=True)
    model(*batch(0)).backward()
    queue.finish()
    queue.reset()
    started = watch(queue)
    with queue.paused():
        model(*batch(0)).backward()
    assert not started
    model(*batch(1)).backward()
    assert len(started) == 4
    queue.finish()
    plain = SmallModel()
    (plain(*batch(0)) + plain(*batch(1))).backward()
    for got, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert expected.grad is not None
        torch.testing.assert_close(got.main_grad, expected.grad, rtol=1e-13, atol=1e-15)


def test_a_gradient_after_its_reduction_is_an_error_that_names_it() -> None:
    queue = queue_of(model := SmallModel(), overlap=False, max_elements=None)
    queue.start()
    with pytest.raises(RuntimeError, match=r"a gradient of layers\.0\.bias came after its reduction had begun"):
        model.layers[0].bias.main_grad_accumulator.add(torch.ones(6, dtype=torch.float64))
    queue.reset()
    assert not queue.buckets[0].grad_buffer.any()
    model.layers[0].bias.main_grad_accumulator.add(torch.ones(6, dtype=torch.float64))


def test_gradients_of_a_step_that_was_not_zeroed_are_added_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    _warn_once.cache_clear()
    queue = queue_of(model := SmallModel(), overlap=False, max_elements=None)
    bias = model.layers[0].bias
    for _ in range(3):
        bias.main_grad_accumulator.add(torch.ones(6, dtype=torch.float64))
        queue.finish()
    assert bias.main_grad.eq(3).all()
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "zero_grad_buffer() was not called between two steps"
    ]
    queue = queue_of(model := SmallModel(), overlap=True, max_elements=None)
    queue.finish()
    with pytest.raises(RuntimeError, match="came after its reduction had begun"):
        model.layers[0].bias.main_grad_accumulator.add(torch.ones(6, dtype=torch.float64))


class TwoOfFour:
    """Sums over an instance of two shards (`scatter`), or over two replicas: doubles this rank's numbers."""

    def start_reduce_scatter(self, gradients: Tensor, wire_dtype: torch.dtype) -> Pending:
        return Pending(2 * gradients.chunk(2)[1], None)

    def start_all_reduce(self, gradients: Tensor, wire_dtype: torch.dtype) -> Pending:
        return Pending(gradients.mul_(2), None)


def test_shards_are_summed_over_an_instance_and_then_over_its_replicas() -> None:
    model, sharding = SmallModel(), Sharding(ShardingStrategy.OPTIMIZER, shards=2, shard_index=1, instances=2)
    units = [Unit(plan, {"dense": sharding}) for plan in plan_units(model, {"dense": 2})]
    two = TwoLevelReduction(TwoOfFour(), TwoOfFour())  # type: ignore[arg-type]
    queue = BucketQueue(make_buckets(units, {"dense": two}, None, lambda unit: torch.float64), overlap=False)
    for number, unit in enumerate(units):
        unit.grad_buffer.fill_(number + 1)
    queue.finish()
    for number, unit in enumerate(units):
        assert unit.gradient_shard.eq(4.0 * (number + 1)).all() and unit.gradient_shard.numel() == unit.plan.numel // 2
