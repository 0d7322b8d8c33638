"""Weight gradients that are put off: the same numbers later, kept as factors and nothing else."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from support.processes import run_on_ranks
from support.small_models import Layer
from torch import Tensor, nn

from megatron.core.communication.collectives import Pending, start_gather_rows
from megatron.core.distributed.main_grad import (
    BufferMainGrad,
    WeightGradientQueue,
    accumulate_product,
    attach_main_grad,
)


def layer_with_sinks() -> tuple[Layer, list[nn.Parameter]]:
    torch.manual_seed(1)
    layer, on_accumulated = Layer(6).double(), []
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, dtype=torch.float64)
        attach_main_grad(parameter, torch.zeros_like(parameter), on_accumulated.append)
    return layer, on_accumulated


def gradients_at_once(inputs: list[Tensor]) -> dict[str, Tensor]:
    layer, _ = layer_with_sinks()
    for x in inputs:
        layer(x).pow(2).sum().backward()
    return {name: parameter.main_grad.clone() for name, parameter in layer.named_parameters()}  # type: ignore[union-attr]


def test_products_wait_until_they_are_asked_for_and_are_the_same_then() -> None:
    inputs = [torch.randn(5, 6, dtype=torch.float64) for _ in range(3)]
    expected = gradients_at_once(inputs)
    layer, on_accumulated = layer_with_sinks()
    queue = WeightGradientQueue(layer.parameters())
    for number, x in enumerate(inputs):
        with queue.defer(number):
            layer(x).pow(2).sum().backward()
    assert not layer.weight.main_grad.any()  # type: ignore[union-attr]
    assert torch.equal(layer.norm.main_grad, expected["norm"])  # type: ignore[arg-type]
    assert not any(parameter is layer.weight for parameter in on_accumulated)
    for number in range(3):
        queue.compute(number)
        assert sum(parameter is layer.weight for parameter in on_accumulated) == number + 1
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.main_grad, expected[name]), name  # type: ignore[arg-type]


def test_products_that_lag_come_when_called_for_and_at_the_latest_with_the_end_of_backward() -> None:
    inputs = [torch.randn(5, 6, dtype=torch.float64) for _ in range(2)]
    expected = gradients_at_once(inputs)
    layer, on_accumulated = layer_with_sinks()
    queue = WeightGradientQueue(layer.parameters())
    seen: list[list[int]] = []

    def count() -> int:
        return sum(parameter is layer.weight for parameter in on_accumulated)

    for number, x in enumerate(inputs):
        x = x.clone().requires_grad_()
        with queue.deferred() as compute_deferred:
            hidden = layer(x)

            def look(
                gradient: Tensor, *, calls: bool = number == 1, compute_deferred: Callable[[], None] = compute_deferred
            ) -> None:
                before = count()
                if calls:
                    compute_deferred()
                seen.append([before, count()])

            x.register_hook(look)  # the last thing in this backward
            hidden.pow(2).sum().backward()
            assert count() == number + 1
    assert seen == [[0, 0], [1, 2]]
    queue.compute_deferred()  # nothing is deferred any more
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.main_grad, expected[name]), name  # type: ignore[arg-type]


def test_a_backward_that_fails_leaves_nothing_that_lags() -> None:
    layer, on_accumulated = layer_with_sinks()
    queue = WeightGradientQueue(layer.parameters())
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    x.register_hook(lambda gradient: 1 // 0)
    with pytest.raises(ZeroDivisionError), queue.deferred():
        layer(x).pow(2).sum().backward()
    queue.compute_deferred()
    assert not any(parameter is layer.weight for parameter in on_accumulated) and not queue.takes_products


def test_outside_of_it_products_are_computed_at_once() -> None:
    x = torch.randn(5, 6, dtype=torch.float64)
    layer, _ = layer_with_sinks()
    queue = WeightGradientQueue(layer.parameters())
    with queue.defer("first"):
        pass
    layer(x).pow(2).sum().backward()
    assert torch.equal(layer.weight.main_grad, gradients_at_once([x])["weight"])  # type: ignore[arg-type]
    queue.compute("first")
    with pytest.raises(KeyError):
        queue.compute("never")


def test_what_waits_keeps_no_graph_alive() -> None:
    layer, _ = layer_with_sinks()
    queue = WeightGradientQueue(layer.parameters())
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    kept_by_graph = torch.randn(5, 6, dtype=torch.float64)
    below = x * kept_by_graph  # saves it for backward
    gone = weakref.ref(kept_by_graph)
    with queue.defer(0):
        layer.weight.main_grad_accumulator.add_product(torch.ones(5, 6, dtype=torch.float64), below)  # type: ignore[union-attr]
    del below, kept_by_graph
    gc.collect()
    assert gone() is None
    queue.compute(0)
    assert layer.weight.main_grad.any()  # type: ignore[union-attr]


class Shard:
    """Rows of inputs that lie on several ranks, and the order in which they are asked for."""

    def __init__(self, rows: Tensor, order: list[str], name: str) -> None:
        self.rows, self.order, self.name = rows, order, name

    def start_gather(self) -> Pending:
        self.order.append(f"gather {self.name}")
        return start_gather_rows(self.rows, torch.distributed.group.WORLD)


def gather_two_products() -> tuple[Tensor, list[str]]:
    order: list[str] = []
    weight = nn.Parameter(torch.zeros(3, 2, dtype=torch.float64))
    attach_main_grad(weight, torch.zeros_like(weight), lambda parameter: order.append("product"))
    queue = WeightGradientQueue([weight])
    main_grad = weight.main_grad_accumulator  # type: ignore[attr-defined]
    assert isinstance(main_grad, BufferMainGrad) and not main_grad.defers_weight_grad
    rank = torch.distributed.get_rank()
    with queue.defer(0):
        assert main_grad.defers_weight_grad
        for name in ("a", "b"):
            rows = torch.full((2, 2), float(rank + 1), dtype=torch.float64)
            main_grad.add_product(torch.arange(12, dtype=torch.float64).view(4, 3), Shard(rows, order, name))
    queue.compute(0)
    return main_grad.gradient, order


def test_inputs_on_several_ranks_are_gathered_while_the_product_before_is_computed() -> None:
    dy = torch.arange(12, dtype=torch.float64).view(4, 3)
    x = torch.tensor([[1.0, 1], [1, 1], [2, 2], [2, 2]], dtype=torch.float64)
    for gradient, order in run_on_ranks(gather_two_products, 2):
        assert torch.equal(gradient, 2 * dy.t() @ x)
        assert order == ["gather a", "gather b", "product", "product"]


def test_every_contribution_is_multiplied_by_the_factor() -> None:
    dy, x = (torch.randn(5, size, dtype=torch.float64) for size in (3, 2))
    weight, product = nn.Parameter(torch.zeros(3, 2, dtype=torch.float64)), dy.t() @ x
    attach_main_grad(weight, torch.zeros_like(weight), lambda parameter: None, factor=0.3)
    main_grad, queue = weight.main_grad_accumulator, WeightGradientQueue([weight])  # type: ignore[attr-defined]
    added = torch.zeros_like(weight.data)

    def agree(contribution: Tensor) -> None:
        added.add_(contribution, alpha=0.3)
        torch.testing.assert_close(main_grad.gradient, added, rtol=1e-14, atol=1e-14)

    main_grad.add_product(dy, x)
    agree(product)
    with queue.defer(0):
        main_grad.add_product(dy, x)
    agree(torch.zeros_like(product))
    queue.compute(0)
    agree(product)
    with main_grad.counted_once():
        main_grad.add_grouped_product(dy, x, accumulate_product)
    agree(product)
    (weight * product).sum().backward()  # by the hook
    agree(product)
    main_grad.add_rows(torch.tensor([2, 0, 2]), dy[:3, :2])
    agree(torch.stack([dy[1, :2], torch.zeros(2), dy[0, :2] + dy[2, :2]]))
    with pytest.raises(AssertionError, match="is_added_to_directly"):
        main_grad.begin_write()


@pytest.mark.parametrize(("total", "operands"), [(torch.float64, torch.float64), (torch.float32, torch.bfloat16)])
def test_a_product_replaces_what_only_counts_as_zero(total: torch.dtype, operands: torch.dtype) -> None:
    dy, x = (torch.randn(5, size).to(operands) for size in (3, 2))
    added, replaced = torch.zeros(3, 2, dtype=total), torch.full((3, 2), torch.nan, dtype=total)
    accumulate_product(added, dy, x, factor=0.3)
    accumulate_product(replaced, dy, x, factor=0.3, replaces=True)
    assert torch.equal(added, replaced)
