"""Buckets: which units they join, and when and in which order their reductions start."""

from collections.abc import Callable

import pytest
import torch
from support.small_models import SmallModel, batch
from torch import Tensor

from megatron.core.communication.collectives import Pending
from megatron.core.distributed.buckets import BucketQueue, TwoLevelReduction, make_buckets, wire_dtype_of
from megatron.core.distributed.flat_buffer import Unit
from megatron.core.distributed.main_grad import WeightGradientQueue
from megatron.core.distributed.reductions import PendingReduction, Reduction
from megatron.core.distributed.sharding_strategy import Sharding, ShardingStrategy
from megatron.core.distributed.units import plan_units
from megatron.core.parameters import info_of
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


Step = Callable[[SmallModel, BucketQueue, int], None]


def plain(model: SmallModel, queue: BucketQueue, step: int) -> None:
    """Two micro-batches; the head's and the layers' weights begin with a product."""
    with queue.paused():
        model(*batch(2 * step)).backward()
    model(*batch(2 * step + 1)).backward()


def other_writers_first(model: SmallModel, queue: BucketQueue, step: int) -> None:
    """From the second step on, products are not the first contribution of their weights."""
    if step:
        weight, table, second = model.layers[0].weight, model.embedding.table, model.layers[1].weight
        weight.main_grad_accumulator.add(torch.ones_like(weight))
        table.main_grad_accumulator.add_rows(torch.tensor([1, 1]), torch.ones(2, 6, dtype=torch.float64))
        second.main_grad_accumulator.begin_write()
        second.main_grad_accumulator.gradient.add_(1.0)
        second.main_grad_accumulator.end_write()
    plain(model, queue, step)


def deferred(model: SmallModel, queue: BucketQueue, step: int) -> None:
    """The embedding's rows come before the head's product, which uses the same table."""
    products = WeightGradientQueue(model.parameters())
    with products.defer(0):
        model(*batch(step)).backward()
    products.compute(0)


def without_a_layer(model: SmallModel, queue: BucketQueue, step: int) -> None:
    """The second step uses the first layer only."""
    model.layers[1:].requires_grad_(step != 1)
    model(*batch(step)).backward()


def without_backward(model: SmallModel, queue: BucketQueue, step: int) -> None:
    if step != 1:
        model(*batch(step)).backward()


def twice(model: SmallModel, queue: BucketQueue, step: int) -> None:
    """The second step is computed again."""
    plain(model, queue, step)
    if step == 1:
        queue.finish()
        queue.reset()
        plain(model, queue, step)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "step", [plain, other_writers_first, deferred, without_a_layer, without_backward, twice], ids=lambda s: s.__name__
)
def test_gradients_are_those_of_zeroed_ones_when_the_first_product_overwrites(step: Step, tied: bool) -> None:
    """All gradients, and the elements between them, are NaN before each step but the first."""
    found = []
    for overwrite in (False, True):
        model = SmallModel(tied=tied)
        buckets = make_buckets(units_of(model), ONE_RANK, EVERYTHING, lambda unit: torch.float64)
        queue = BucketQueue(buckets, overlap=False, overwrite=overwrite)
        for number in range(4):
            queue.reset()
            stale = {info_of(m.parameter).name for unit in units_in(queue) for m in unit.main_grads if m.is_stale}
            if step is plain:
                table = "embedding.table" if tied else "output_layer.weight"
                weights = {table, *(f"layers.{layer}.weight" for layer in range(3))}
                assert stale == (weights if overwrite and number else set())
            step(model, queue, number)
            queue.finish()
            found.append([unit.grad_buffer.clone() for unit in units_in(queue)])
            for bucket in queue.buckets:
                bucket.grad_buffer.fill_(float("nan"))
    zeroed, overwritten = found[:4], found[4:]
    for number in range(4):
        assert all(map(torch.equal, zeroed[number], overwritten[number])), number


def test_the_first_step_of_a_run_overwrites_too() -> None:
    """So a resumed run rounds that step as the run that was not interrupted."""
    model = SmallModel()
    buckets = make_buckets(units_of(model), ONE_RANK, EVERYTHING, lambda unit: torch.float64)
    queue = BucketQueue(buckets, overlap=False, overwrite=True)
    queue.reset()
    model.layers[0].weight.main_grad.fill_(float("nan"))  # type: ignore[operator]
    plain(model, queue, 0)
    queue.finish()
    assert model.layers[0].weight.main_grad.isfinite().all()  # type: ignore[operator]


def units_in(queue: BucketQueue) -> list[Unit]:
    return [unit for bucket in queue.buckets for unit in bucket.units]


class TwoOfFour:
    """Sums over an instance of two shards (`scatter`), or over two replicas: doubles this rank's numbers."""

    def start_reduce_scatter(self, gradients: Tensor, wire_dtype: torch.dtype) -> PendingReduction:
        return PendingReduction(Pending(2 * gradients.chunk(2)[1], None))

    def start_all_reduce(self, gradients: Tensor, wire_dtype: torch.dtype) -> PendingReduction:
        return PendingReduction(Pending(gradients.mul_(2), None))


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
